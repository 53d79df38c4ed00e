"""Figures of updates: what they saw, entry by entry, as a few numbers for a report.

Invariant: what could not be measured is absent. Means, quantiles and maxima are over the entries of all
updates together; `report.TrainReport` and `art_core.observe.metrics` say what each name means.
"""

from collections.abc import Sequence

import numpy as np
import torch

from art_core.config import TrainConfig
from art_core.training.coefficients import Coefficients
from art_core.training.losses import MAX_LOG_RATIO
from art_core.training.update import UpdateFigures, joined


def update_metrics(
    seen: Sequence[UpdateFigures], norms: Sequence[float], rate: float, *, skipped: int
) -> dict[str, float]:
    """What updates saw, as numbers; see `TrainReport`. Without updates, only their count."""
    metrics = {
        "updates": float(len(seen) - skipped),
        "updates_skipped": float(skipped),
        "learning_rate": rate,
    }
    if not seen:
        return metrics
    whole = joined(seen)
    metrics |= {
        "loss": sum(f.loss for f in seen) / len(seen),
        "entropy": float(whole.entropy.mean()),
        "grad_norm": sum(norms) / len(norms),
    }
    if len(whole.ratio):
        metrics |= {
            "clip_fraction": float(whole.clipped.float().mean()),
            "ratio_mean": float(whole.ratio.mean()),
            "ratio_max": float(whole.ratio.max()),
            "importance_mean": float(whole.importance.mean()),
            "importance_max": float(whole.importance.max()),
            "masked_fraction": float((whole.importance == 0).float().mean()),
            **_ratio_metrics(whole),
        }
    if len(whole.ratio) and not torch.isnan(whole.old_logprob).all():
        metrics["kl_old_new"] = whole.kl_old_new
    if len(whole.kl_base):
        metrics["kl_base"] = float(whole.kl_base.mean())
    return metrics


def _ratio_metrics(whole: UpdateFigures) -> dict[str, float]:
    """How far the policies that sampled are from the one that the updates found."""
    ratio = torch.exp((whole.logprob - whole.old_logprob).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    known = ratio[~torch.isnan(ratio)].cpu().numpy()
    if not len(known):
        return {}
    p50, p99 = np.quantile(known, [0.5, 0.99])
    return {
        "behaviour_ratio_p50": float(p50),
        "behaviour_ratio_p99": float(p99),
        # Kish 1965, "Survey sampling", 11.2: of n weighted tokens, as many count; here as a share of n.
        "effective_sample_size": float(known.sum() ** 2 / (len(known) * (known**2).sum())),
    }


def mix_metrics(config: TrainConfig, used: Coefficients, imitated: Sequence[float]) -> dict[str, float]:
    """Coefficients of the last update, and the loss of what was imitated beside."""
    metrics: dict[str, float] = {}
    if config.kl_coef:
        metrics["kl_coef"] = used.kl
    if config.entropy_coef or config.entropy_target is not None:
        metrics["entropy_coef"] = used.entropy_weight
    if imitated:
        metrics["sft_loss"] = sum(imitated) / len(imitated)
    return metrics


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Most bytes of a GPU that tensors of this process took so far; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {"gpu_memory_peak": float(torch.cuda.max_memory_allocated(device))}

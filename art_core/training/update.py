"""One update's gradient, accumulated over the pieces of a minibatch.

Invariant: the gradient is that of the whole minibatch, however its tree was cut; nothing but
``.grad`` of the trainable parameters changes here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from art_core.config import TrainConfig
from art_core.training.batch import Minibatch
from art_core.training.logprobs import entry_logprobs
from art_core.training.losses import (
    importance_weights,
    kl,
    log_ratio,
    policy_loss,
    segment_mean,
)
from art_core.training.policy import TRAINING, Policy
from art_core.training.token_tree import TokenTree

Advance = Callable[[], None]
"""Called after each forward pass, to report progress."""


@dataclass(frozen=True, slots=True)
class UpdateFigures:
    """What an update saw, entry by entry, before it was applied. All without gradient.

    Attributes:
        loss: the minibatch's loss.
        logprob: under the policy before this update  [entries].
        old_logprob: under the policy that sampled; NaN where unknown  [entries].
        entropy: in nats  [entries].
        ratio: new / proximal probability; empty for SFT  [entries].
        clipped: whether the ratio was clipped; empty for SFT  [entries].
        importance: truncated importance weights; empty for SFT  [entries].
        kl_base: KL to the base model, in nats; empty unless it is part of the loss  [entries].
    """

    loss: float
    logprob: Tensor
    old_logprob: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
    importance: Tensor
    kl_base: Tensor

    @property
    def kl_old_new(self) -> float:
        """Mean KL(old, new) in nats, over entries whose old log-probability is known; 0 without any."""
        known = ~torch.isnan(self.old_logprob)
        return float(kl(self.old_logprob[known], self.logprob[known]).mean()) if known.any() else 0.0


def reference_logprobs(
    policy: Policy, pieces: Sequence[TokenTree], adapter: str | None, advance: Advance
) -> list[Tensor]:
    """Log-probabilities of every piece's entries under an adapter, without gradient."""
    found: list[Tensor] = []
    for piece in pieces:
        with torch.no_grad(), policy.using(adapter):
            found.append(entry_logprobs(policy, piece).logprob)
        advance()
    return found


def accumulate_policy_gradient(
    policy: Policy,
    batch: Minibatch,
    config: TrainConfig,
    *,
    proximal: Sequence[Tensor] | None,
    base: Sequence[Tensor] | None,
    advance: Advance,
) -> tuple[UpdateFigures, list[Tensor]]:
    """Add the gradient of a minibatch's policy loss.

    Args:
        policy: its training adapter is used.
        batch: what to train on.
        config: which loss.
        proximal: log-probabilities by piece before this call of ``train`` changed anything; None when
            nothing has changed yet, so that they are the ones found now.
        base: log-probabilities by piece under the base model; None without a KL term.
        advance: progress.

    Returns:
        Figures, and the log-probabilities by piece as they were now.
    """
    ratios = _segment_log_ratios(policy, batch, config, proximal, advance)
    found: list[Tensor] = []
    parts: list[UpdateFigures] = []
    for i, piece in enumerate(batch.pieces):
        with policy.using(TRAINING):
            new = entry_logprobs(policy, piece)
            logprob = new.logprob
            now = logprob.detach()
            before = now if proximal is None else proximal[i]
            old = _tensor(piece.entries.old_logprob, now)
            outcome = policy_loss(
                config.loss,
                logprob,
                before,
                _tensor(piece.entries.advantage, now),
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                segment_log_ratio=ratios[i] if ratios else torch.zeros_like(now),
            )
            importance = importance_weights(before, old, config.importance_cap)
            losses = importance * outcome.loss
            kl_base = now.new_empty(0)
            if base is not None:
                penalty = kl(logprob, base[i])
                losses = losses + config.kl_coef * penalty
                kl_base = penalty.detach()
            loss = (_tensor(piece.entries.weight, now) * losses).sum()
            loss.backward()
        found.append(now)
        parts.append(
            UpdateFigures(
                float(loss.detach()),
                now,
                old,
                new.entropy,
                outcome.ratio,
                outcome.clipped,
                importance,
                kl_base,
            )
        )
        advance()
    return joined(parts), found


def accumulate_sft_gradient(policy: Policy, batch: Minibatch) -> UpdateFigures:
    """Add the gradient of a minibatch's negative log-likelihood, weighted by its entries' weights."""
    parts: list[UpdateFigures] = []
    for piece in batch.pieces:
        # Dropout helps imitation; a policy loss must see the policy that is served.
        with policy.using(TRAINING), policy.dropout():
            new = entry_logprobs(policy, piece)
            now = new.logprob.detach()
            loss = -(_tensor(piece.entries.weight, now) * new.logprob).sum()
            loss.backward()
        none = now.new_empty(0)
        old = _tensor(piece.entries.old_logprob, now)
        parts.append(
            UpdateFigures(float(loss.detach()), now, old, new.entropy, none, none.bool(), none, none)
        )
    return joined(parts)


def joined(parts: Sequence[UpdateFigures]) -> UpdateFigures:
    """Figures of several pieces, or of several updates, as one; losses are summed."""
    return UpdateFigures(
        sum(p.loss for p in parts),
        torch.cat([p.logprob for p in parts]),
        torch.cat([p.old_logprob for p in parts]),
        torch.cat([p.entropy for p in parts]),
        torch.cat([p.ratio for p in parts]),
        torch.cat([p.clipped for p in parts]),
        torch.cat([p.importance for p in parts]),
        torch.cat([p.kl_base for p in parts]),
    )


def _segment_log_ratios(
    policy: Policy,
    batch: Minibatch,
    config: TrainConfig,
    proximal: Sequence[Tensor] | None,
    advance: Advance,
) -> list[Tensor] | None:
    """gspo: the mean log-ratio of each entry's step, which may be spread over several pieces.

    It needs every piece's log-probabilities before the first gradient: one more pass without gradient,
    except before the first update of a call, when every ratio is 1.
    """
    if config.loss != "gspo" or proximal is None:
        return None
    now = reference_logprobs(policy, batch.pieces, TRAINING, advance)
    steps = torch.cat([torch.from_numpy(p.entries.step) for p in batch.pieces]).to(now[0].device)
    means = segment_mean(log_ratio(torch.cat(now), torch.cat(list(proximal))), steps)
    return list(means.split([len(p) for p in now]))


def _tensor(column: object, like: Tensor) -> Tensor:
    return torch.as_tensor(column, dtype=like.dtype, device=like.device)

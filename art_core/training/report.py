"""What one call of training did.

Invariant: every metric that is named here means the same in every report, and a metric that could not
be measured is absent, never 0.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from art_core.training.guardrails import TrainEvent
from art_core.training.trained import StepTraining


@dataclass(frozen=True, slots=True)
class TrainReport:
    """Figures and events of one call of `Trainer.train` or `Trainer.sft`.

    Attributes:
        metrics: numbers by name.

            Of the data: ``reward_mean``, ``reward_std``, ``groups``, ``groups_without_spread``,
            ``trajectories``, ``trajectories_failed``, ``trajectories_unscored``, ``steps_left_out``,
            ``entries`` (tokens trained), ``tree_nodes`` (tokens when each is computed once),
            ``tokens_total`` (tokens as rows), ``unique_share`` (nodes per token), ``fork_rate`` (rows
            that a trajectory needs beyond its first), ``null_logprobs``, ``steps_truncated`` (answers that
            ``max_tokens`` cut off), ``steps_greedy`` and ``steps_reshaped`` (sampled at temperature 0, and
            with cuts, penalties or biases: not as the policy in training would), ``steps_raw_logprobs``
            (the server's logprobs are not of what was sampled, and are not used).

            Of the updates, as means over their entries: ``kl_old_new`` (nats, from the policy that
            sampled to the one before the update), ``kl_base`` (nats; when it is part of the loss),
            ``entropy`` (nats), ``clip_fraction``, ``ratio_mean``, ``ratio_max`` (new to proximal),
            ``importance_mean``, ``importance_max`` (proximal to behaviour, truncated), ``masked_fraction``
            (tokens whose importance weight is 0: they were left out), ``behaviour_ratio_p50`` and
            ``behaviour_ratio_p99`` (median and 99th percentile of new to behaviour, not truncated),
            ``effective_sample_size`` (of those ratios as weights; share of the entries). As means over
            updates: ``loss``, ``grad_norm`` (before clipping), ``sft_loss`` (nats; of what is imitated
            beside).

            ``learning_rate``, ``kl_coef``, ``entropy_coef`` (of the last update), ``updates``,
            ``updates_skipped``, ``seconds``, ``gpu_memory_peak`` (bytes; on a GPU).

            `art_core.observe.metrics` says more of each.
        events: what training did on its own: updates it skipped, and why.
        left_out: steps that were not trained, by reason.
        trained: what was done with each step that was, token by token; empty after fine-tuning.
    """

    metrics: Mapping[str, float]
    events: tuple[TrainEvent, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    trained: tuple[StepTraining, ...] = field(default=(), repr=False)

    @property
    def updated(self) -> bool:
        """Whether the weights changed."""
        return self.metrics["updates"] > 0


def report_to_json(report: TrainReport) -> dict[str, Any]:
    """A report's figures and events as JSON can hold them."""
    events = [asdict(event) for event in report.events]
    return {"metrics": dict(report.metrics), "events": events, "left_out": dict(report.left_out)}


def report_from_json(values: Mapping[str, Any]) -> TrainReport:
    """The inverse of `report_to_json`."""
    events = tuple(TrainEvent(**event) for event in values["events"])
    return TrainReport(dict(values["metrics"]), events, dict(values["left_out"]))


_SUMS = (
    "groups",
    "groups_without_spread",
    "trajectories",
    "trajectories_failed",
    "trajectories_unscored",
    "steps_left_out",
    "steps_truncated",
    "steps_greedy",
    "steps_reshaped",
    "steps_raw_logprobs",
    "entries",
    "tree_nodes",
    "tokens_total",
    "null_logprobs",
    "updates",
    "updates_skipped",
    "seconds",
)
_LAST = ("learning_rate", "kl_coef", "entropy_coef")
_OF_TRAJECTORIES = ("reward_mean", "reward_std")


def merge_reports(reports: Sequence[TrainReport]) -> TrainReport:
    """One report of several calls: counts added, maxima kept, means weighted by what they are means of.

    Raises:
        ValueError: there is no report.
    """
    if not reports:
        raise ValueError("no reports to merge")
    if len(reports) == 1:
        return reports[0]
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report.metrics):
        having = [r.metrics for r in reports if name in r.metrics]
        if name in _SUMS:
            metrics[name] = sum(m[name] for m in having)
        elif name.endswith("_max") or name == "gpu_memory_peak":
            metrics[name] = max(m[name] for m in having)
        elif name in _LAST:
            metrics[name] = having[-1][name]
        else:
            of = "trajectories" if name in _OF_TRAJECTORIES else "entries"
            weights = [m.get(of, 0.0) for m in having]
            total = sum(weights)
            if total:
                metrics[name] = sum(m[name] * w for m, w in zip(having, weights, strict=True)) / total
    left_out: Counter[str] = Counter()
    for report in reports:
        left_out.update(report.left_out)
    return TrainReport(
        metrics,
        tuple(e for r in reports for e in r.events),
        left_out,
        tuple(t for r in reports for t in r.trained),
    )

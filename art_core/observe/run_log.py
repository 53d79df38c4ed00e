"""What a run writes down after each training step.

Invariant: steps are numbered on from the run that this one continues, so that curves of a run that was
restarted are one curve; the store has a step's numbers before anybody else is told of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from art_core.observe.phases import Phases, Training
from art_core.observe.rollout_watch import RolloutWatch
from art_core.observe.sinks.base import MetricSink
from art_core.observe.sinks.delivery import Delivery
from art_core.observe.sinks.prometheus import PrometheusSink
from art_core.store import RunState, Store
from art_core.types import TrajectoryGroup

if TYPE_CHECKING:
    from art_core.training.report import TrainReport


class RunLog:
    """Keeps the numbers of one run.

    A training step has the number of the policy version that it makes, unless earlier steps made none (all
    their groups were without spread, or a guardrail refused the update): then it is that many further on,
    and the metric ``policy_version`` says which version was served after it.

    Args:
        store: where they are kept.
        run_id: of the run.
        sinks: where they go from there.
        directory: for sinks that write files and were not told where.
    """

    def __init__(self, store: Store, run_id: str, sinks: Sequence[MetricSink], directory: Path) -> None:
        self._store = store
        self._run = run_id
        self._sinks = sinks
        self._directory = directory
        self._phases = Phases()
        self._rollouts = RolloutWatch(store, run_id)
        self._delivery: Delivery | None = None

    def begin(self) -> None:
        """From now on it takes time, and sinks are told."""
        self._phases = Phases()
        self._delivery = Delivery(self._store, self._run, self._sinks, self._directory)

    def show(self, registry: CollectorRegistry) -> None:
        """Let whoever serves a registry of Prometheus show what our sinks for it show."""
        for sink in self._sinks:
            if isinstance(sink, PrometheusSink):
                registry.register(sink.collector)

    def close(self, state: RunState) -> None:
        """Tell sinks the rest, and how the run ended."""
        if self._delivery is not None:
            self._delivery.close(state)
            self._delivery = None

    def complete(self, report: "TrainReport", version: int) -> None:
        """Keep the numbers of an update whose process ended before it could, unless they are kept.

        Args:
            report: of the trainer.
            version: number of the policy version that it made.
        """
        for run in self._store.lineage(self._run):
            if any(metric.value == version for metric in self._store.metrics(run, "policy_version")):
                return
        self._keep({**report.metrics, "policy_version": float(version)}, version)

    def record(
        self,
        report: "TrainReport",
        groups: Sequence[TrajectoryGroup],
        training: Training,
        version: int,
        more: Mapping[str, float],
    ) -> None:
        """Keep what a training step did.

        Args:
            report: of the trainer.
            groups: what was gathered for it.
            training: when it did what.
            version: number of the policy version that is served now.
            more: what others measured meanwhile.
        """
        ended = self._rollouts.ended()
        failures = {t.id: t.failure.cause if t.failure else "unknown" for g in groups for t in g if t.failed}
        failures |= {rollout.id: rollout.cause for rollout in ended if rollout.cause is not None}
        metrics = {
            **report.metrics,
            "policy_version": float(version),
            **{f"failures/{cause}": float(n) for cause, n in sorted(Counter(failures.values()).items())},
            **self._phases.metrics(groups, training, ended, trained_tokens=report.metrics.get("entries")),
            **more,
        }
        step = self._keep(metrics, version)
        self._store.log_trained(self._run, step, report.trained)
        if self._delivery is not None:
            self._delivery.notify()

    def note(self, values: Mapping[str, float]) -> None:
        """Keep somebody else's numbers beside those of the newest training step (0 before the first)."""
        self._store.log_metrics(self._run, self._last_step(), values)
        if self._delivery is not None:
            self._delivery.notify()

    def _last_step(self) -> int:
        return max(self._store.last_step(run) for run in self._store.lineage(self._run))

    def _keep(self, metrics: Mapping[str, float], version: int) -> int:
        """Write a step's numbers under its own number, which is returned."""
        step = max(self._last_step() + 1, version)
        self._store.log_metrics(self._run, step, metrics)
        return step

"""What the groups of one step go through: the feed, the trainer, the scores of versions, the audit.

Invariant: versions are compared on one scale, that on which their rollouts were scored.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from art_core.backends.feed import Feed
from art_core.backends.reward_watch import RewardWatch, must_stop
from art_core.config import TrainableModelConfig
from art_core.observe.gathered import gathered_metrics
from art_core.selection import Train
from art_core.training.knobs import KnobBoard
from art_core.types import TrajectoryGroup

if TYPE_CHECKING:
    from art_core.training.grpo import Trainer
    from art_core.training.launch import TrainerProcesses
    from art_core.training.report import TrainReport


class GroupTraining:
    """Trains a model's groups as its settings and knobs say.

    Args:
        config: of the model.
        trainer: who learns.
        board: settings as they are turned.
        metric: what versions are compared by.

    Attributes:
        scores: by version, the metric of the rollouts that it answered.
    """

    def __init__(
        self,
        config: TrainableModelConfig,
        trainer: "Trainer | TrainerProcesses",
        board: KnobBoard,
        metric: str,
    ) -> None:
        self.scores: dict[int, float] = {}
        self._trainer = trainer
        self._board = board
        self._metric = metric
        self._feed = Feed(config.name, seed=config.seed)
        self._watch = RewardWatch()

    def train(
        self,
        batches: Sequence[Sequence[TrajectoryGroup]],
        version: int,
        *,
        train: Train = None,
        imitate: Sequence[Any] = (),
    ) -> "TrainReport":
        """One call of the trainer per batch.

        Args:
            batches: groups as they were scored.
            version: number of the policy version in training.
            train: the user's choice among the steps.
            imitate: conversations to learn from beside them; see `Trainer.train`.

        Raises:
            NothingToTrainError: nothing of it can be trained.
        """
        from art_core.training.report import merge_reports

        config = self._board.config
        served = self._feed.serve(batches, version, config, self._board.knobs.reward_weights, train=train)
        if served.rescaled:
            self._trainer.forget_rewards()
        report = merge_reports(
            [self._trainer.train(batch, train=train, imitate=imitate) for batch in served.batches]
        )
        self._feed.keep(batches, version, config)
        groups = [group for batch in batches for group in batch]
        gathered = gathered_metrics(groups, success_reward=config.success_reward)
        metrics = {**report.metrics, **gathered, **served.metrics}
        scored = {"reward_mean": metrics.get("reward_mean_scored", metrics["reward_mean"])}
        if (score := {**metrics, **scored}.get(self._metric)) is not None:
            self.scores[version] = score
        report = replace(
            report,
            metrics=metrics,
            events=(*served.events, *report.events),
            left_out=Counter(report.left_out) + served.left_out,
        )
        return self._audited(report, served.collected)

    def _audited(self, report: "TrainReport", groups: Sequence[TrajectoryGroup]) -> "TrainReport":
        """The report with what an audit of the rewards says, where one is due."""
        guardrails = self._board.config.guardrails
        found = self._watch.after(groups, guardrails)
        if found is None:
            return report
        why = must_stop(found, guardrails)
        events = (found,) if why is None else (found, self._trainer.stop(why))
        return replace(report, events=(*report.events, *events))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "replay": self._feed.state(),
            "reward_weights": self._feed.weights,
            "scores": {str(n): s for n, s in self.scores.items()},
        }

    def restore(self, state: Mapping[str, Any], group: Callable[[str], TrajectoryGroup]) -> None:
        """Go on from what a checkpoint kept.

        Args:
            state: as `state` gave it.
            group: reads a group from the record, by its id.
        """
        self.scores.update({int(n): score for n, score in state["scores"].items()})
        weights = state.get("reward_weights", {})  # older checkpoints say nothing
        self._feed.restore(state["replay"], group, self._board.config, weights)

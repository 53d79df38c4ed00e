"""Feed: what each call of ``train`` is given, of what was collected and of what was kept.

Invariant: what is given depends on the groups, the version in training and the seed alone; everything that is
held back is counted under its reason; a feed that was restored goes on as if it had never ended.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from art_core.config import TrainConfig
from art_core.errors import NothingToTrainError, UnknownTrajectoryError
from art_core.types import TrajectoryGroup

if TYPE_CHECKING:
    from art_core.training.replay import ReplayBuffer

logger = logging.getLogger(__name__)

Batches = Sequence[Sequence[TrajectoryGroup]]


@dataclass(frozen=True, slots=True)
class Served:
    """What one call is given.

    Attributes:
        batches: to be trained, one call of the trainer each.
        left_out: rollouts that were held back, by reason.
        metrics: ``staleness_mean`` and ``staleness_max`` (versions), ``groups_replayed``; and where groups
            are replayed, ``reward_mean`` and ``reward_std`` of the others, in place of those of all.
    """

    batches: tuple[tuple[TrajectoryGroup, ...], ...]
    left_out: Counter[str]
    metrics: dict[str, float]


class Feed:
    """The data policy of one model.

    Args:
        seed: of what is drawn from earlier groups.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._buffer: ReplayBuffer | None = None

    def serve(self, batches: Batches, version: int, config: TrainConfig) -> Served:
        """Hold back what is too old, and add earlier groups to the first batch.

        Args:
            batches: as they were collected.
            version: number of the policy version in training.
            config: ``max_staleness`` and ``replay`` are read.

        Raises:
            NothingToTrainError: everything is too old.
        """
        from art_core.training.replay import fresh, staleness

        left_out: Counter[str] = Counter()
        young: list[list[TrajectoryGroup]] = []
        for batch in batches:
            kept, old = fresh(batch, version, config.max_staleness)
            left_out += old
            if kept or not batch:
                young.append(kept)
        if left_out and not any(young):
            raise NothingToTrainError(
                f"all {left_out.total()} rollouts are more than max_staleness={config.max_staleness} "
                f"versions behind version {version}; collect new ones, or raise it"
            )
        again = self._draw(version, config) if young else []
        if again:
            young[0] = [*young[0], *again]
        ages = [a for b in young for g in b for t in g if (a := staleness(t, version)) is not None]
        metrics = {"groups_replayed": float(len(again))} if config.replay else {}
        rewards = [t.reward for batch in batches for g in batch for t in g if t.reward is not None]
        if again and rewards:  # what was replayed says nothing about how the policy does now
            metrics |= {"reward_mean": fmean(rewards), "reward_std": pstdev(rewards)}
        if ages:
            metrics |= {"staleness_mean": sum(ages) / len(ages), "staleness_max": float(max(ages))}
        return Served(tuple(tuple(b) for b in young), left_out, metrics)

    def keep(self, batches: Batches, version: int, config: TrainConfig) -> None:
        """Keep groups that were trained, for later calls."""
        if config.replay is not None:
            self._of(config).add([group for batch in batches for group in batch], version)

    def state(self) -> list[dict[str, Any]]:
        """What is kept, as JSON."""
        return [] if self._buffer is None else self._buffer.state()

    def restore(
        self,
        state: Sequence[Mapping[str, Any]],
        lookup: Callable[[str], TrajectoryGroup],
        config: TrainConfig,
    ) -> None:
        """Go on from what `state` said; groups that the store has lost are said, and left out."""
        if config.replay is None:
            return
        there: list[Mapping[str, Any]] = []
        for item in state:
            try:
                lookup(item["group"])
            except UnknownTrajectoryError as lost:
                logger.warning("a group that was to be trained again is not replayed: %s", lost)
            else:
                there.append(item)
        self._of(config).restore(there, lookup)

    def _draw(self, version: int, config: TrainConfig) -> list[TrajectoryGroup]:
        return [] if config.replay is None else self._of(config).draw(version)

    def _of(self, config: TrainConfig) -> "ReplayBuffer":
        from art_core.training.replay import ReplayBuffer

        assert config.replay is not None
        if self._buffer is None:
            self._buffer = ReplayBuffer(config.replay, seed=self._seed)
        self._buffer.config = config.replay
        return self._buffer

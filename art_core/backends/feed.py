"""Feed: what each call of ``train`` is given, of what was collected and of what was kept.

Invariant: what is given depends on the groups, the version in training, the weights of rewards and the seed
alone; everything that is held back is counted under its reason; a feed that was restored goes on as if it had
never ended.

Groups are recorded and kept as they were scored. Here, and nowhere else, their rewards become those that are
trained: fresh and replayed ones are brought under the weights in force (`art_core.rewards.reweighting`). Of
what several policies said, the steps of the others are left out (`art_core.selection.own_steps`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from art_core.config import TrainConfig
from art_core.errors import NothingToTrainError, UnknownTrajectoryError
from art_core.observe.gathered import group_std
from art_core.rewards.reweighting import Reweighted, reweighted
from art_core.selection import Train, own_steps, staleness
from art_core.training.guardrails import TrainEvent
from art_core.types import TrajectoryGroup

if TYPE_CHECKING:
    from art_core.training.replay import ReplayBuffer

logger = logging.getLogger(__name__)

UNUSED = "reward_weights_unused"
"""The event that says where turned weights of rewards could not be put to use."""

MISPLACED = "node_rewards_unused"
"""The event that says which nodes were given rewards, and made no call in any rollout."""

Batches = Sequence[Sequence[TrajectoryGroup]]


@dataclass(frozen=True, slots=True)
class Served:
    """What one call is given.

    Attributes:
        batches: to be trained, one call of the trainer each, under the weights in force.
        collected: all that was collected, under the weights in force.
        left_out: rollouts that were held back, by reason.
        metrics: ``staleness_mean`` and ``staleness_max`` (versions), ``groups_replayed``; where groups are
            replayed, ``reward_mean`` and ``reward_std`` of the others, in place of those of all; where
            weights were turned, ``groups_reweighted``, ``reward_group_std`` under them, and
            ``reward_mean_scored``, of the rewards as they were scored.
        events: where turned weights, or rewards of nodes, could not be put to use.
        rescaled: whether rewards are on another scale than in the call before.
    """

    batches: tuple[tuple[TrajectoryGroup, ...], ...]
    collected: tuple[TrajectoryGroup, ...]
    left_out: Counter[str]
    metrics: dict[str, float]
    events: tuple[TrainEvent, ...] = ()
    rescaled: bool = False


class Feed:
    """The data policy of one model.

    Args:
        policy: the model's name.
        seed: of what is drawn from earlier groups.
    """

    def __init__(self, policy: str, *, seed: int = 0) -> None:
        self._policy = policy
        self._seed = seed
        self._buffer: ReplayBuffer | None = None
        self._weights: dict[str, float] = {}
        self._told: set[str] = set()
        self._nowhere: set[str] = set()

    @property
    def weights(self) -> dict[str, float]:
        """The weights that the last call was given rewards under."""
        return dict(self._weights)

    def serve(
        self,
        batches: Batches,
        version: int,
        config: TrainConfig,
        weights: Mapping[str, float] | None = None,
        *,
        train: Train = None,
    ) -> Served:
        """Hold back what is too old, add earlier groups to the first batch, and reweight all of them.

        Args:
            batches: as they were collected and scored.
            version: number of the policy version in training.
            config: ``max_staleness`` and ``replay`` are read.
            weights: of components of rewards, in place of those that they were scored with.
            train: the user's choice among the steps; the others may be of any age.

        Raises:
            NothingToTrainError: everything is too old.
        """
        from art_core.training.replay import fresh

        weights = dict(weights or {})
        batches = self._own(batches)
        left_out: Counter[str] = Counter()
        young: list[list[TrajectoryGroup]] = []
        for batch in batches:
            kept, old = fresh(batch, version, config.max_staleness, train)
            left_out += old
            if kept or not batch:
                young.append(kept)
        if left_out and not any(young):
            raise NothingToTrainError(
                f"all {left_out.total()} rollouts are more than max_staleness={config.max_staleness} "
                f"versions behind version {version}; collect new ones, or raise it"
            )
        rescaled, self._weights = weights != self._weights, weights
        if rescaled:
            self._told.clear()
        again = self._draw(version, config) if young else []
        if again:
            young[0] = [*young[0], *again]
        ages = [a for b in young for g in b for t in g if (a := staleness(t, version, train)) is not None]
        metrics = {"groups_replayed": float(len(again))} if config.replay else {}
        scored = [g for batch in batches for g in batch]
        collected = reweighted(scored, weights)
        trained = reweighted([g for batch in young for g in batch], weights)
        rewards = _rewards(collected.groups)
        if again and rewards:  # what was replayed says nothing about how the policy does now
            metrics |= {"reward_mean": fmean(rewards), "reward_std": pstdev(rewards)}
        if weights:
            metrics["groups_reweighted"] = float(trained.changed)
        if collected.changed:
            metrics |= {"reward_mean_scored": fmean(_rewards(scored)), **group_std(collected.groups)}
        if ages:
            metrics |= {"staleness_mean": sum(ages) / len(ages), "staleness_max": float(max(ages))}
        return Served(
            _split(trained.groups, [len(batch) for batch in young]),
            collected.groups,
            left_out,
            metrics,
            (*self._unused(trained, weights), *self._misplaced(scored)),
            rescaled,
        )

    def _unused(self, trained: Reweighted, weights: Mapping[str, float]) -> tuple[TrainEvent, ...]:
        """What turned weights could not do, each thing once until they are turned again."""
        count = len(trained.groups)
        said = {name: f"{name!r} is not used: {why}" for name, why in trained.unknown.items()}
        said |= {
            why: f"{groups} of {count} groups are trained as they were scored: they hold {why}"
            for why, groups in trained.as_scored.items()
        }
        new = [text for key, text in said.items() if key not in self._told]
        self._told |= said.keys()
        if not new:
            return ()
        message = (
            f"reward_weights: {'; '.join(new)}. Turn what is not meant back with "
            "model.turn(reward_weights={name: None}), or score the rollouts again (score_trajectories)"
        )
        logger.warning(message)
        data: dict[str, Any] = {
            "unknown": dict(trained.unknown),
            "as_scored": dict(trained.as_scored),
            "weights": dict(weights),
        }
        return (TrainEvent(UNUSED, message, float(len(new)), data=data),)

    def _misplaced(self, groups: Sequence[TrajectoryGroup]) -> tuple[TrainEvent, ...]:
        """Rewards of nodes that nothing has: told once for each name."""
        rollouts = [t for group in groups for t in group]
        nodes = {s.identity.node for t in rollouts for s in t.steps if s.identity.node is not None}
        new = sorted({name for t in rollouts for name in t.node_rewards} - nodes - self._nowhere)
        if not new:
            return ()
        self._nowhere.update(new)
        message = (
            f"rewards were given to {', '.join(map(repr, new))}, and no call of {len(rollouts)} rollouts was "
            f"made in a node of that name (they were made in {', '.join(map(repr, sorted(nodes))) or 'none'})"
        )
        logger.warning(message)
        return (TrainEvent(MISPLACED, message, float(len(new)), data={"nodes": new}),)

    def keep(self, batches: Batches, version: int, config: TrainConfig) -> None:
        """Keep groups that were trained, as they were scored, for later calls."""
        if config.replay is not None:
            self._of(config).add([group for batch in self._own(batches) for group in batch], version)

    def state(self) -> list[dict[str, Any]]:
        """What is kept, as JSON."""
        return [] if self._buffer is None else self._buffer.state()

    def restore(
        self,
        state: Sequence[Mapping[str, Any]],
        lookup: Callable[[str], TrajectoryGroup],
        config: TrainConfig,
        weights: Mapping[str, float],
    ) -> None:
        """Go on from what `state` and `weights` said; groups that the store lost are left out, and said."""
        self._weights = dict(weights)
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
        self._of(config).restore(there, lambda found: own_steps([lookup(found)], self._policy)[0])

    def _own(self, batches: Batches) -> Batches:
        own = own_steps([group for batch in batches for group in batch], self._policy)
        return _split(own, [len(batch) for batch in batches])

    def _draw(self, version: int, config: TrainConfig) -> list[TrajectoryGroup]:
        return [] if config.replay is None else self._of(config).draw(version)

    def _of(self, config: TrainConfig) -> "ReplayBuffer":
        from art_core.training.replay import ReplayBuffer

        assert config.replay is not None
        if self._buffer is None:
            self._buffer = ReplayBuffer(config.replay, seed=self._seed)
        self._buffer.config = config.replay
        self._buffer.reweigh(self._weights)
        return self._buffer


def _rewards(groups: Sequence[TrajectoryGroup]) -> list[float]:
    return [reward for group in groups for reward in group.rewards]


def _split(
    groups: Sequence[TrajectoryGroup], sizes: Sequence[int]
) -> tuple[tuple[TrajectoryGroup, ...], ...]:
    """Groups in batches of these sizes."""
    left: Iterator[TrajectoryGroup] = iter(groups)
    return tuple(tuple(next(left) for _ in range(size)) for size in sizes)

"""Learning: rollouts and training at the same time, with a bound on how old a rollout may be.

Invariant: no group is trained whose oldest step is more than ``staleness`` versions behind the policy in
training; every group that was gathered is trained, counted as dropped, or handed back; every scenario that
was begun is seen to its end, or cancelled.

Groups are gathered one scenario each, several at a time. As soon as ``groups_per_step`` of them have ended,
whichever they are, a training step begins, and gathering goes on meanwhile with the version before. A new
scenario is begun only when what is under way and not yet trained would still be young enough, if each step
published one version: at most ``(staleness + 1) * groups_per_step`` groups (AReaL, arXiv:2505.24298, eq. 3).
With ``staleness=0`` nothing overlaps: gather, train, gather.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from art_core.errors import ConfigError, RolloutFailedError
from art_core.inference.endpoint import PolicyEndpoint
from art_core.selection import Train, as_selection, own_steps, staleness
from art_core.sync import run_sync
from art_core.types import Scenario, TrajectoryGroup

if TYPE_CHECKING:
    from art_core.training.report import TrainReport

logger = logging.getLogger(__name__)

IN_VAIN = 32
"""Scenarios in a row without a group, after which something is wrong with all of them."""

Gather = Callable[[Scenario], Awaitable[Iterable[TrajectoryGroup]]]
"""Runs one scenario's rollouts, with rewards; its group, or none if too many of them failed."""


class Learner(Protocol):
    """What learns: a `TrainableModel`, for one."""

    @property
    def endpoint(self) -> PolicyEndpoint:
        """Where it answers."""
        ...

    async def atrain(self, groups: "list[TrajectoryGroup]", *, train: Train = None) -> "TrainReport":
        """Learn from groups and publish the new version."""
        ...


@dataclass(frozen=True, slots=True)
class LearningStep:
    """One training step and what led to it.

    Attributes:
        step: its number, from 1.
        report: what training did.
        groups: what it was made of.
        staleness: versions that each group's oldest step was behind  [groups].
        dropped: groups too old to be trained, since the step before.
        wait_seconds: how long training waited for groups.
        train_seconds: how long it took, publishing included.
        gathering: scenarios under way when it ended.
    """

    step: int
    report: "TrainReport"
    groups: tuple[TrajectoryGroup, ...]
    staleness: tuple[int, ...]
    dropped: int
    wait_seconds: float
    train_seconds: float
    gathering: int


@dataclass(frozen=True, slots=True)
class Learned:
    """A whole run.

    Attributes:
        steps: in order.
        seconds: from the first scenario to the last step.
        dropped: groups too old to be trained, also those that ended after the last step.
        unused: groups that had been gathered and were not needed any more, or too few for a step.
    """

    steps: tuple[LearningStep, ...]
    seconds: float
    dropped: int
    unused: tuple[TrajectoryGroup, ...] = field(repr=False, default=())

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which training waited for groups."""
        return sum(step.wait_seconds for step in self.steps) / self.seconds if self.seconds else 0.0


async def alearn(
    learner: Learner,
    gather: Gather,
    scenarios: Iterable[Scenario],
    *,
    groups_per_step: int,
    steps: int | None = None,
    staleness: int = 1,
    train: Train = None,
    on_step: Callable[[LearningStep], None] | None = None,
) -> Learned:
    """Gather and train at the same time.

    Needs a trainer that leaves the server its machine, as one on a GPU of its own does (`ParallelConfig`).
    Otherwise training holds the server back, and the result is that of ``staleness=0``, only later.

    Args:
        learner: what is trained.
        gather: runs one scenario's rollouts, as in
            ``lambda s: agather(graph, [s], group_size=16, reward=..., model=model)``.
        scenarios: what to run, in order; may be endless when ``steps`` is given.
        groups_per_step: groups that make one training step.
        steps: how many steps to make; None: until the scenarios are used up.
        staleness: versions that a rollout may be behind the policy in training. 0: none, so that nothing
            overlaps; 1: rollouts go on during training; more: long rollouts hold nobody up.
        train: which steps are trained; see `TrainableModel.atrain`.
        on_step: called after each step.

    Raises:
        ConfigError: a number is out of range.
        RolloutFailedError: many scenarios in a row gave no group.
        Exception: what ``gather`` or the training raised first; everything under way has then been cancelled.
    """
    for name, value, least in (
        ("groups_per_step", groups_per_step, 1),
        ("staleness", staleness, 0),
        ("steps", 1 if steps is None else steps, 1),
    ):
        if value < least:
            raise ConfigError(f"{name}={value}: at least {least}")
    gathering = _Gathering(learner, gather, iter(scenarios), (staleness + 1) * groups_per_step, train)
    began = time.perf_counter()
    made: list[LearningStep] = []
    try:
        gathering.begin()
        while steps is None or len(made) < steps:
            waited = time.perf_counter()
            batch = await _batch(gathering, groups_per_step, staleness)
            if batch is None:
                break
            groups, ages = batch
            trained = time.perf_counter()
            report = await gathering.beside(learner.atrain(groups, train=train))
            gathering.settle(len(groups))
            step = LearningStep(
                step=len(made) + 1,
                report=report,
                groups=tuple(groups),
                staleness=tuple(ages),
                dropped=gathering.dropped - sum(step.dropped for step in made),
                wait_seconds=trained - waited,
                train_seconds=time.perf_counter() - trained,
                gathering=gathering.under_way,
            )
            made.append(step)
            if on_step is not None:
                on_step(step)
    finally:
        unused = await gathering.end()
    return Learned(tuple(made), time.perf_counter() - began, gathering.dropped, tuple(unused))


def learn(learner: Learner, gather: Gather, scenarios: Iterable[Scenario], **options: Any) -> Learned:
    """`alearn` from sync code; takes the same options."""
    return run_sync(lambda: alearn(learner, gather, scenarios, **options))


async def _batch(
    gathering: "_Gathering", size: int, staleness: int
) -> tuple[list[TrajectoryGroup], list[int]] | None:
    """Groups for one step, and how old each is; None when there are too few more."""
    kept: list[_Ended] = []
    while len(kept) < size:
        ended = await gathering.next()
        if ended is None:
            gathering.give_back(kept)
            return None
        if gathering.age(ended) > staleness:
            gathering.drop()
        else:
            kept.append(ended)
    return [ended.group for ended in kept], [gathering.age(ended) for ended in kept]


@dataclass(frozen=True, slots=True)
class _Ended:
    """A group, and the version that was current when its scenario began."""

    group: TrajectoryGroup
    begun_at: int


class _Gathering:
    """Scenarios under way, and groups that have ended.

    Args:
        learner: whose current version counts.
        gather: runs a scenario.
        scenarios: those to come.
        most: groups begun and not yet settled.
        train: which steps are trained; the others may be of any age.
    """

    def __init__(
        self, learner: Learner, gather: Gather, scenarios: Iterator[Scenario], most: int, train: Train
    ) -> None:
        self._learner = learner
        self._trained = as_selection(train)
        self._gather = gather
        self._scenarios = scenarios
        self._most = most
        self.dropped = 0
        self._unsettled = 0
        self._exhausted = False
        self._in_vain = 0
        # In the order in which they began.
        self._tasks: dict[asyncio.Task[list[_Ended]], None] = {}
        self._ended: deque[_Ended] = deque()

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    def _version(self) -> int:
        return self._learner.endpoint.current_version().number

    def begin(self) -> None:
        """Begin as many scenarios as may be under way."""
        while not self._exhausted and self._unsettled < self._most:
            scenario = next(self._scenarios, None)
            if scenario is None:
                self._exhausted = True
                return
            self._unsettled += 1
            self._tasks[asyncio.create_task(self._run(scenario))] = None

    async def _run(self, scenario: Scenario) -> list[_Ended]:
        version = self._version()
        return [_Ended(group, version) for group in await self._gather(scenario)]

    def age(self, ended: _Ended) -> int:
        """Versions that a group's oldest step to be trained is behind; without any, since it began."""
        (group,) = own_steps([ended.group], self._learner.endpoint.current_version().model)
        version = self._version()
        ages = [a for t in group if (a := staleness(t, version, self._trained)) is not None]
        return max(ages, default=version - ended.begun_at)

    def settle(self, count: int) -> None:
        """Groups have been trained or dropped: others may begin."""
        self._unsettled -= count
        self.begin()

    def drop(self) -> None:
        """A group was too old."""
        self.dropped += 1
        self.settle(1)

    def give_back(self, ended: list[_Ended]) -> None:
        """Groups that were taken and not used."""
        self._ended.extendleft(reversed(ended))

    async def next(self) -> _Ended | None:
        """The next group that has ended; None when there will be no more."""
        while not self._ended:
            if not self._tasks:
                return None
            await self._until_one_ends(self._tasks)
        return self._ended.popleft()

    async def beside(self, training: Awaitable["TrainReport"]) -> "TrainReport":
        """Wait for training, and fail when gathering does."""
        task = asyncio.ensure_future(training)
        try:
            while not task.done():
                await self._until_one_ends([*self._tasks, task])
        except BaseException:
            # A step that has begun is seen to its end: half of it may be on disk.
            await asyncio.gather(task, return_exceptions=True)
            raise
        return await task

    async def _until_one_ends(self, among: Iterable[asyncio.Future[Any]]) -> None:
        await asyncio.wait(list(among), return_when=asyncio.FIRST_COMPLETED)
        for task in [t for t in self._tasks if t.done()]:
            del self._tasks[task]
            groups = task.result()
            self._ended.extend(groups)
            self._in_vain = 0 if groups else self._in_vain + 1
            if self._in_vain >= IN_VAIN:
                raise RolloutFailedError(
                    f"the last {self._in_vain} scenarios gave no group: too many of their rollouts failed; "
                    "the record has each one's failure"
                )
            self.settle(1 - len(groups))

    async def end(self) -> list[TrajectoryGroup]:
        """Cancel what is under way; the groups that were not used."""
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, list):  # it was whole already
                self._ended.extend(ended)
            elif not isinstance(ended, asyncio.CancelledError):
                logger.warning("a scenario that was to be cancelled failed", exc_info=ended)
        self._tasks.clear()
        return [ended.group for ended in self._ended]

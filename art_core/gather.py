"""Many rollouts at once: scenarios x group size, in groups, under limits.

Invariant: the result's order and every member's seed depend on the scenarios alone, never on timing;
when `agather` returns or raises, none of its rollouts is still running.

Data flow: scenarios -> jobs (scenario, member) -> a `Plan` for each attempt, of which a `Runner` (this
process, or `art_core.workers`) runs ``concurrency`` at a time -> groups in the scenarios' order -> groups
that are too small are set aside. While the sink acknowledges the ends of rollouts, others run in their place,
and the sink may keep several ends together. Groups that teach nothing may be replaced by those of spares.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, cast

from art_core.errors import ConfigError, RolloutFailedError
from art_core.progress import Board, ProgressReport, report_progress
from art_core.recording import Sink, new_id
from art_core.rollouts import Agent, InProcess, Plan, Runner, Terms
from art_core.scoring import RewardFunction
from art_core.sync import run_sync
from art_core.types import Scenario, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)


LEAST_ENDS = 8
"""How many ends of rollouts may wait for the sink while others run; or as many as run, if that is more."""


FLAT = 1e-6
"""Rewards of a group that differ by no more than this teach nothing; it is float noise."""


class OnFailure(StrEnum):
    """What happens when a rollout has failed, its retries included."""

    DROP_TRAJECTORY = "drop_trajectory"
    """It stays in its group as failed, without a reward, and the group is compared without it."""
    RETRY = "retry"
    """Like ``drop_trajectory``, after at least one more try."""
    FAIL_FAST = "fail_fast"
    """Everything is cancelled and `RolloutFailedError` raised."""


class Gathered(list[TrajectoryGroup]):
    """The groups, in the scenarios' order.

    Attributes:
        dropped: groups in which fewer than ``min_group_size`` members finished.
        flat: groups that groups of ``spares`` took the place of, since their rewards did not differ.
    """

    def __init__(
        self,
        groups: Iterable[TrajectoryGroup],
        dropped: Iterable[TrajectoryGroup] = (),
        flat: Iterable[TrajectoryGroup] = (),
    ) -> None:
        super().__init__(groups)
        self.dropped = tuple(dropped)
        self.flat = tuple(flat)

    @property
    def failed(self) -> tuple[Trajectory, ...]:
        """Every rollout that failed, those of dropped groups included."""
        return tuple(t for group in (*self, *self.dropped) for t in group if t.failed)

    @property
    def mean_reward(self) -> float | None:
        """Mean over scored members of kept groups; None when there is none."""
        rewards = [reward for group in self for reward in group.rewards]
        return sum(rewards) / len(rewards) if rewards else None


@dataclass(frozen=True, slots=True)
class _Job:
    """One member of one group."""

    group: int
    member: int
    scenario: Scenario
    group_id: str
    occurrence: int


@dataclass(slots=True)
class _Slot:
    """Leave to run one rollout; it goes to the next one once, when this one finishes or has ended."""

    slots: asyncio.Semaphore
    held: bool = True

    def give_back(self) -> bool:
        """Let the next rollout start; whether there is one."""
        if self.held:
            self.held = False
            self.slots.release()
        return self.slots.locked()  # somebody was waiting for it


async def agather(
    agent: Agent,
    scenarios: Iterable[Scenario],
    *,
    group_size: int,
    reward: RewardFunction | None = None,
    concurrency: int = 64,
    timeout: float | None = None,
    retries: int = 0,
    on_failure: OnFailure | str = OnFailure.DROP_TRAJECTORY,
    min_group_size: int | None = None,
    max_calls: int | None = None,
    require_policy_calls: bool = True,
    seed: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    spares: Iterable[Scenario] | None = None,
    sink: Sink | None = None,
    progress: bool | ProgressReport = True,
) -> Gathered:
    """Run every scenario ``group_size`` times.

    Each rollout has its own context, in which it is the current rollout; its metadata holds ``member``,
    ``attempt`` and, with ``seed`` given, its own ``seed``: a function of ``seed``, scenario id, member and
    attempt (`member_seed`). ChatART then gives every call a seed of its own (`Rollout.next_seed`), so that
    a server that honours seeds samples the same again.

    Args:
        agent: ``scenario -> output``, sync or async.
        scenarios: what to try; ids may repeat.
        group_size: rollouts of each scenario.
        reward: ``(trajectory)`` or ``(trajectory, output)``, sync or async, to a number, named parts or
            `Reward`; without one, rollouts finish unscored.
        concurrency: most rollouts at the same time.
        timeout: seconds for one rollout, and as many again for its reward; None for no limit.
        retries: how often a failed rollout is tried again, as a new rollout.
        on_failure: what a rollout that still failed means for the rest.
        min_group_size: groups with fewer finished members are set aside in ``dropped``; None: 2, or 1 when
            ``group_size`` is 1.
        max_calls: most policy calls of one rollout.
        require_policy_calls: a rollout without one captured policy call is a failure.
        seed: base of the members' seeds; another one for another sample of the same scenarios. None: calls
            have no seed.
        metadata: kept with every trajectory.
        spares: dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): scenarios that are tried in place of
            those whose group has no spread of rewards, and teaches nothing, until every group has one or
            there are no more of them. An endless iterator makes for endless work on a task that is solved.
        sink: where rollouts are kept; None: in memory alone.
        progress: True shows a bar if standard error is a terminal; a callable gets every change instead.

    Returns:
        The groups in the scenarios' order, members in theirs. Failed members are in their group, with
        ``failure``, without a reward; of a retried member, the last attempt.

    Raises:
        ConfigError: an argument is out of range.
        RolloutFailedError: a rollout failed and ``on_failure`` is ``fail_fast``.
        RewardError: the reward function takes the wrong arguments.
        StoreError: the sink cannot keep what happens.
    """
    terms = Terms(reward, timeout, require_policy_calls, sink)
    return await agather_on(
        InProcess(agent, terms),
        scenarios,
        group_size=group_size,
        concurrency=concurrency,
        retries=retries,
        on_failure=on_failure,
        min_group_size=min_group_size,
        max_calls=max_calls,
        seed=seed,
        metadata=metadata,
        spares=spares,
        progress=progress,
    )


async def agather_on(
    runner: Runner,
    scenarios: Iterable[Scenario],
    *,
    group_size: int,
    concurrency: int = 64,
    retries: int = 0,
    on_failure: OnFailure | str = OnFailure.DROP_TRAJECTORY,
    min_group_size: int | None = None,
    max_calls: int | None = None,
    seed: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    spares: Iterable[Scenario] | None = None,
    progress: bool | ProgressReport = True,
) -> Gathered:
    """`agather` for rollouts that a runner runs, here or in other processes; same options and errors."""
    policy = _failure_policy(on_failure)
    needed = _min_group_size(min_group_size, group_size)
    for name, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
        if value < least:
            raise ConfigError(f"{name}={value}: expected at least {least}")
    tries = 1 + max(retries, int(policy is OnFailure.RETRY))
    waiting = _scenarios(scenarios)
    reserve = iter(spares or ())
    seen: Counter[str] = Counter()

    async def run(job: _Job, finishing: Callable[[], bool]) -> Trajectory:
        attempt = 0
        while True:
            attempt += 1
            plan = Plan(
                scenario=job.scenario,
                group_id=job.group_id,
                max_calls=max_calls,
                metadata={
                    **(metadata or {}),
                    **(
                        {}
                        if seed is None
                        else {"seed": member_seed(job.scenario.id, job.member, seed, attempt, job.occurrence)}
                    ),
                    "member": job.member,
                    "attempt": attempt,
                },
            )
            trajectory = await runner.run(plan, finishing)
            if not trajectory.failed:
                return trajectory
            logger.info("%s", _describe(trajectory, attempt, tries))
            if attempt == tries:
                return trajectory

    async def collect(given: Sequence[Scenario], board: Board) -> list[TrajectoryGroup]:
        """One group of each scenario."""
        jobs = list(_jobs(given, group_size, seen))
        ended: dict[tuple[int, int], Trajectory] = {}
        queue = iter(jobs)
        slots = asyncio.Semaphore(concurrency)

        async def work() -> None:
            for job in queue:
                await slots.acquire()
                slot = _Slot(slots)
                trajectory = await run(job, slot.give_back)
                if trajectory.failed and policy is OnFailure.FAIL_FAST:
                    raise RolloutFailedError(
                        f"{_describe(trajectory, tries, tries)}; on_failure='fail_fast' stops here"
                    )
                slot.give_back()
                ended[job.group, job.member] = trajectory
                board.ended(trajectory)

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(concurrency + max(concurrency, LEAST_ENDS), len(jobs))):
                    workers.create_task(work())
        except BaseExceptionGroup as broken:
            raise broken.exceptions[0] from None
        return [
            TrajectoryGroup(
                scenario,
                tuple(ended[index, member] for member in range(group_size)),
                jobs[index * group_size].group_id,
            )
            for index, scenario in enumerate(given)
        ]

    flat: list[TrajectoryGroup] = []
    with report_progress(progress, total=len(waiting) * group_size) as board:
        groups = await collect(waiting, board)
        while spares is not None:
            places = [index for index, group in enumerate(groups) if _is_flat(group)]
            substitutes = list(islice(reserve, len(places)))
            if not substitutes:
                break
            board.expect(len(substitutes) * group_size)
            for index, group in zip(places, await collect(substitutes, board), strict=False):
                flat.append(groups[index])
                groups[index] = group
    return _set_small_aside(groups, needed, flat)


def _is_flat(group: TrajectoryGroup) -> bool:
    """Whether a group's rewards do not differ; one that has fewer than two teaches as little."""
    rewards = group.rewards
    return len(rewards) < 2 or max(rewards) - min(rewards) <= FLAT


def gather(agent: Agent, scenarios: Iterable[Scenario], *, group_size: int, **options: Any) -> Gathered:
    """`agather` from sync code; takes the same options.

    It blocks until all is done. In async code and notebooks, ``await agather(...)`` is the better one.
    """
    return run_sync(lambda: agather(agent, scenarios, group_size=group_size, **options))


def member_seed(scenario_id: str, member: int, base: int = 0, attempt: int = 1, occurrence: int = 0) -> int:
    """The seed of one rollout: 31 bits, the same on every machine and in every process.

    Args:
        scenario_id: which scenario.
        member: which member of its group.
        base: the caller's seed.
        attempt: 1 for the first try; a retry must not fail in the same way by construction.
        occurrence: 0 for the first time that this scenario id occurs in one call, then 1, 2, ...
    """
    key = f"{base}/{occurrence}/{member}/{attempt}/{scenario_id}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4]) >> 1


def _jobs(scenarios: Sequence[Scenario], group_size: int, seen: Counter[str]) -> Iterator[_Job]:
    """Jobs by scenario and member; ``seen`` counts how often each scenario's id has occurred."""
    for index, scenario in enumerate(scenarios):
        group_id = new_id("g")
        for member in range(group_size):
            yield _Job(index, member, scenario, group_id, seen[scenario.id])
        seen[scenario.id] += 1


def _failure_policy(given: OnFailure | str) -> OnFailure:
    try:
        return OnFailure(given)
    except ValueError:
        known = ", ".join(repr(policy.value) for policy in OnFailure)
        raise ConfigError(f"on_failure={given!r}: expected one of {known}") from None


def _min_group_size(given: int | None, group_size: int) -> int:
    if group_size < 1:
        raise ConfigError(f"group_size={group_size}: expected at least 1")
    needed = min(2, group_size) if given is None else given
    if not 0 <= needed <= group_size:
        raise ConfigError(f"min_group_size={given}: expected 0 to group_size={group_size}")
    return needed


def _scenarios(given: Iterable[Scenario]) -> list[Scenario]:
    if isinstance(given, Scenario):
        raise ConfigError(f"scenarios is one Scenario; give a list: [Scenario({given.id!r}, ...)]")
    found = list(given)
    for place, scenario in enumerate(cast("list[object]", found)):
        if not isinstance(scenario, Scenario):
            raise ConfigError(
                f"scenarios[{place}] is {type(scenario).__name__}; give Scenario('a name', inputs={{...}})"
            )
    return found


def _set_small_aside(groups: list[TrajectoryGroup], needed: int, flat: Sequence[TrajectoryGroup]) -> Gathered:
    kept: list[TrajectoryGroup] = []
    dropped: list[TrajectoryGroup] = []
    for group in groups:
        finished = sum(not t.failed for t in group)
        (kept if finished >= needed else dropped).append(group)
        if finished < needed:
            causes = Counter(t.failure.cause for t in group if t.failure)
            logger.warning(
                "group of scenario %r dropped: %d of %d rollouts finished, %d needed (%s); first failure: %s",
                group.scenario.id,
                finished,
                len(group),
                needed,
                ", ".join(f"{count} {cause}" for cause, count in causes.most_common()),
                next((t.failure.message for t in group if t.failure), "none"),
            )
    return Gathered(kept, dropped, flat)


def _describe(trajectory: Trajectory, attempt: int, tries: int) -> str:
    cause, message = (
        (trajectory.failure.cause, trajectory.failure.message) if trajectory.failure else ("unknown", "")
    )
    return (
        f"rollout {trajectory.id} of scenario {trajectory.scenario.id!r} failed, "
        f"try {attempt} of {tries} ({cause}): {message}"
    )

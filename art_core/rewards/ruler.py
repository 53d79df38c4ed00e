"""RULER: a judge that scores the trajectories of one group relative to each other, by a rubric.

Invariant: no score is invented. Each one comes from a judge's valid verdict on exactly that content, by id;
when there are too few of those, the group has no scores, and says why.

A group -> members that finished -> entries, equal ones once -> sets that fit into the judge's context -> for
each vote a question in an order of its own -> verdicts (asked again once) -> medians -> one scale -> scores.
Order and sets follow from the contents and a seed, so the same group is judged the same way in any order.
"""

import asyncio
import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar, cast

from art_core.errors import ConfigError, RewardError
from art_core.judgings import keep
from art_core.rewards.asking import Asked, JudgeAsker
from art_core.rewards.cache import VerdictCache
from art_core.rewards.judge import Judge, JudgeError, Usage
from art_core.rewards.judgement import Judgement, Scored
from art_core.rewards.question import DEFAULT_RUBRIC, needed, question
from art_core.rewards.rendering import (
    CountTokens,
    Entries,
    approximate_tokens,
    common_beginning,
    entries,
)
from art_core.rewards.scales import one_scale, overlapping_sets
from art_core.rewards.shape import Price
from art_core.rewards.verdicts import Verdict
from art_core.scoring import Reward
from art_core.sync import run_sync
from art_core.types import RolloutStatus, Scenario, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Ruler:
    """Scores trajectories by a rubric in plain language.

    Relative scores (RULER, of OpenPipe's ART) need no scale that holds across scenarios: GRPO compares the
    members of one group alone.

    Args:
        judge: which model judges.
        rubric: what makes a run good; or a function of the scenario that says so.
        votes: how often a group is judged, each time in another order; the median counts.
        seed: decides the orders.
        timeout: seconds for one call of the judge.
        token_budget: most tokens of one question; leave room for the answer in the judge's context.
        least_tokens: a trajectory is shortened no further than to this many; where that does not fit, the
            group is judged in overlapping sets.
        count_tokens: counts tokens as the judge's model does; the default takes four bytes for one.
        cache: verdicts given before; None: a new one in memory.
        concurrency: most groups that `ascore_groups` has judged at the same time.
        price: of the judge's tokens, so that its cost is known.

    Raises:
        ConfigError: an argument is out of range, or the judge is none.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        rubric: str | Callable[[Scenario], str] = DEFAULT_RUBRIC,
        votes: int = 1,
        seed: int = 0,
        timeout: float = 120.0,
        token_budget: int = 24_000,
        least_tokens: int = 400,
        count_tokens: CountTokens = approximate_tokens,
        cache: VerdictCache | None = None,
        concurrency: int = 8,
        price: Price | None = None,
    ) -> None:
        for name, value in (("votes", votes), ("least_tokens", least_tokens), ("concurrency", concurrency)):
            if not _whole(value) or value < 1:
                raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1")
        if not _whole(seed):
            raise ConfigError(f"seed={seed!r}: expected a whole number")
        if not isinstance(cast(object, timeout), int | float) or not timeout > 0:
            raise ConfigError(f"timeout={timeout!r}: expected seconds above 0")
        if not _whole(token_budget) or token_budget < 1000:
            raise ConfigError(
                f"token_budget={token_budget!r}: expected at least 1000, the frame alone has 500"
            )
        _check_parts(rubric, count_tokens, cache, price)
        self._asker = JudgeAsker(judge, timeout, VerdictCache() if cache is None else cache)
        self._rubric = rubric
        self._votes = votes
        self._seed = seed
        self._budget = token_budget
        self._least = least_tokens
        self._count = count_tokens
        self._concurrency = concurrency
        self._price = price

    @property
    def judge(self) -> Judge:
        """Which model judges."""
        return self._asker.judge

    @property
    def usage(self) -> Usage:
        """What all calls so far took."""
        return self._asker.usage

    @property
    def author(self) -> str:
        """Who gives the scores, for their history."""
        return f"ruler:{self.judge.name}"

    # -- what users call ---------------------------------------------------------------------------

    async def ascore(self, group: TrajectoryGroup) -> Judgement:
        """Score the members of a group relative to each other.

        Members that failed or never ended are left out. Members that did the same are judged once and get
        the same score; when all did the same, that one run is judged by the rubric alone.

        Returns:
            The scores, or why there are none: the judge failed, ran out of time, or answered wrongly, and
            again when it was asked once more.

        Raises:
            ConfigError: it is no group.
            RewardError: two members have one id.
        """
        _check_group(group, "a group", "score_groups(groups) takes several, ascore_one(trajectory) one run")
        left_out: dict[str, str] = {}
        judged: dict[str, Entries] = {}
        for member in group:
            if member.id in judged or member.id in left_out:
                raise RewardError(f"group {group.id or '?'} has trajectory {member.id} twice")
            if (why := _unfit(member)) is not None:
                left_out[member.id] = why
            elif told := entries(member):
                judged[member.id] = told
            else:
                left_out[member.id] = "it has no steps to judge"
        if not judged:
            return Judgement(author=self.author, unscored="no member can be judged", left_out=left_out)
        distinct = sorted(set(judged.values()), key=_contents)
        record = Asked()
        unscored, scores = None, dict[str, Scored]()
        started_at, began = time.time(), time.perf_counter()
        try:
            found = await self._scores(distinct, self._rubric_of(group.scenario), record)
            by_entries = dict(zip(distinct, found, strict=True))
            scores = {name: by_entries[told] for name, told in judged.items()}
        except JudgeError as failure:
            unscored = str(failure)
            logger.warning("group %s of scenario %r is unscored: %s", group.id, group.scenario.id, unscored)
        return Judgement(
            author=self.author,
            scores=scores,
            unscored=unscored,
            left_out=left_out,
            usage=record.usage,
            problems=tuple(record.problems),
            started_at=started_at,
            seconds=time.perf_counter() - began,
            cost=None if self._price is None else record.usage.cost(self._price),
        )

    async def ascore_groups(self, groups: Iterable[TrajectoryGroup]) -> list[Judgement]:
        """Score several groups, each by itself; the judgements are in the groups' order.

        Raises:
            ConfigError: it was given something else.
            RewardError: as `ascore`.
        """
        groups = list(groups)
        for group in groups:
            _check_group(group, "several groups", "score(group) takes one")
        slots = asyncio.Semaphore(self._concurrency)

        async def one(group: TrajectoryGroup) -> Judgement:
            async with slots:
                return await self.ascore(group)

        return await _all([one(group) for group in groups])

    async def ascore_one(self, trajectory: Trajectory) -> Reward:
        """Score one trajectory by the rubric alone; a reward function for ``agather(reward=...)``.

        Raises:
            JudgeError: the judge gave no usable verdict, or the trajectory cannot be judged.
        """
        group = TrajectoryGroup(trajectory.scenario, (trajectory,), trajectory.group_id or "")
        judgement = await self.ascore(group)
        if judgement.took:
            keep(judgement.took)
        if not judgement.scores:
            why = judgement.left_out.get(trajectory.id) or judgement.unscored
            raise JudgeError(f"trajectory {trajectory.id} has no score of {self.author}: {why}")
        return judgement.reward(trajectory.id)

    async def ascore_in_order(self, group: TrajectoryGroup, order: Sequence[int]) -> dict[str, float]:
        """One vote on members that stand in this order: what an audit compares with other orders.

        The judge is asked even if it was before, and what it says is not kept.

        Args:
            group: a group that fits into one question.
            order: numbers of the members that are asked about.

        Returns:
            The scores by trajectory id.

        Raises:
            JudgeError: there are none; the message says why.
        """
        items = [entries(group.trajectories[i]) for i in order]
        rubric = self._rubric_of(group.scenario)
        asked = question(items, rubric, budget=self._budget, count=self._count, seed=self._seed)
        if asked is None:
            raise JudgeError(f"token_budget={self._budget} has no room for {len(items)} trajectories at once")
        verdicts = await self._asker.answered(asked, Asked())
        return {group.trajectories[i].id: verdicts[n].score for i, n in zip(order, asked.ids, strict=True)}

    def score(self, group: TrajectoryGroup) -> Judgement:
        """`ascore` from sync code."""
        return run_sync(lambda: self.ascore(group))

    def score_groups(self, groups: Iterable[TrajectoryGroup]) -> list[Judgement]:
        """`ascore_groups` from sync code."""
        return run_sync(lambda: self.ascore_groups(groups))

    # -- how it is done ----------------------------------------------------------------------------

    def _rubric_of(self, scenario: Scenario) -> str:
        """The rubric of a scenario.

        Raises:
            JudgeError: the user's function gave none: without it, one group has no scores, not all.
        """
        if isinstance(self._rubric, str):
            return self._rubric
        try:
            given = cast(object, self._rubric(scenario))
        except Exception as error:
            raise JudgeError(
                f"the rubric function raised {type(error).__name__} for scenario {scenario.id!r}: {error}"
            ) from error
        if isinstance(given, str):
            return given
        if isinstance(given, Coroutine):
            cast("Coroutine[Any, Any, Any]", given).close()
        raise JudgeError(
            f"the rubric function gave {type(given).__name__} for scenario {scenario.id!r}, expected a text"
        )

    async def _scores(self, items: Sequence[Entries], rubric: str, record: Asked) -> list[Scored]:
        """The items' scores, in order.

        Raises:
            JudgeError: there are none.
        """
        rng = random.Random(f"{self._seed}/{[_contents(item) for item in items]}")
        sets = overlapping_sets(len(items), self._set_size(items, rubric), rng)
        judged = await _all([self._votes_on(items, chosen, rubric, record) for chosen in sets])
        medians = [{i: statistics.median(v.score for v in votes[i]) for i in votes} for votes in judged]
        on_scale = one_scale(medians)
        return [
            _scored(on_scale[i], [verdict for votes in judged for verdict in votes.get(i, ())])
            for i in range(len(items))
        ]

    def _set_size(self, items: Sequence[Entries], rubric: str) -> int:
        """How many items one question has room for, each with its least tokens.

        Raises:
            JudgeError: not even two, or the only one.
        """
        same = common_beginning(items)
        least = sorted((min(needed(item[same:], self._count), self._least) for item in items), reverse=True)
        shared = needed(items[0][:same], self._count) if same else 0
        frame = self._count(rubric) + 600
        room = self._budget - frame
        room -= min(shared, room // 2)
        size = taken = 0
        for tokens in least:
            taken += tokens + 40  # its markers
            if taken > room:
                break
            size += 1
        if size < min(2, len(items)):
            raise JudgeError(
                f"token_budget={self._budget} has no room for {min(2, len(items))} trajectories of "
                f"{least[0]} tokens (least_tokens={self._least}); give the judge a larger budget"
            )
        return size

    async def _votes_on(
        self, items: Sequence[Entries], chosen: Sequence[int], rubric: str, record: Asked
    ) -> dict[int, list[Verdict]]:
        """The verdicts of all votes on some items, by item.

        Raises:
            JudgeError: half of the votes or more came to nothing.
        """

        async def vote(number: int) -> dict[int, Verdict] | str:
            # Rotated, so that an item's places differ as much as they can between the votes.
            turn = number * len(chosen) // self._votes
            order = [*chosen[turn:], *chosen[:turn]]
            seed = self._seed + number
            asked = question(
                [items[i] for i in order], rubric, budget=self._budget, count=self._count, seed=seed
            )
            if asked is None:
                return (
                    f"token_budget={self._budget} has no room for {len(order)} trajectories of so many steps"
                )
            try:
                verdicts = await self._asker.verdicts(asked, record)
            except JudgeError as failure:
                return str(failure)
            return {i: verdicts[name] for i, name in zip(order, asked.ids, strict=True)}

        votes = await _all([vote(number) for number in range(self._votes)])
        valid = [given for given in votes if not isinstance(given, str)]
        if len(valid) * 2 <= self._votes:
            reasons = list(dict.fromkeys(given for given in votes if isinstance(given, str)))
            raise JudgeError(
                f"judge {self.judge.name}: {len(valid)} of {self._votes} votes are valid, more than half are "
                f"needed: {' | '.join(reasons)}"
            )
        return {i: [given[i] for given in valid] for i in chosen}


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_parts(rubric: object, count_tokens: object, cache: object, price: object) -> None:
    """Refuse what would only break when a judge has been paid.

    Raises:
        ConfigError: one is of the wrong kind.
    """
    if not callable(rubric) and not (isinstance(rubric, str) and rubric.strip()):
        raise ConfigError(f"rubric={rubric!r}: expected a text, or a function of the scenario that gives one")
    if not callable(count_tokens):
        raise ConfigError(f"count_tokens={count_tokens!r}: expected a function of a text that gives a number")
    if cache is not None and not isinstance(cache, VerdictCache):
        raise ConfigError(f"cache={cache!r}: expected a VerdictCache, such as VerdictCache('verdicts.jsonl')")
    if price is not None and not isinstance(price, Price):
        raise ConfigError(f"price={price!r}: expected Price(prompt=..., completion=...)")


def _check_group(group: object, expected: str, way_out: str) -> None:
    if not isinstance(group, TrajectoryGroup):
        raise ConfigError(f"RULER was given {type(group).__name__}, expected {expected}; {way_out}")


def _unfit(member: Trajectory) -> str | None:
    """Why a trajectory cannot be judged."""
    if member.failed:
        return f"it failed ({member.failure.cause if member.failure else 'unknown cause'})"
    if member.status is not RolloutStatus.FINISHED:
        return "it has not ended"
    return None


def _scored(score: float, verdicts: Sequence[Verdict]) -> Scored:
    nearest = min(verdicts, key=lambda verdict: abs(verdict.score - score))
    return Scored(score, tuple(verdict.score for verdict in verdicts), nearest.explanation)


def _contents(item: Entries) -> str:
    return json.dumps([(entry.where, entry.what) for entry in item])


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as broken:
        raise broken.exceptions[0] from None
    return [task.result() for task in tasks]

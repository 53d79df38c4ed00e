"""The calls of a judge: asked again, given up, cancelled, repeated as votes, kept in a cache."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.judges import QUALITIES, FunctionJudge, perfect, quality_group, quality_run, scores, told, truth

from art_core.errors import ConfigError, RewardError
from art_core.rewards.cache import VerdictCache
from art_core.rewards.judge import Answer, JudgeError, Usage
from art_core.rewards.ruler import Ruler
from art_core.types import Message


async def test_a_bad_answer_is_asked_again_once_with_what_was_wrong() -> None:
    """C30."""
    seen: list[Sequence[Message]] = []

    def first_bad(messages: Sequence[Message]) -> str:
        seen.append(messages)
        found = truth(messages)
        return told(found[1:]) if len(seen) == 1 else told(found)

    judgement = await Ruler(FunctionJudge(first_bad)).ascore(quality_group("g", QUALITIES))
    assert scores(judgement) == list(QUALITIES)
    assert judgement.problems == ("missing: id 1",)
    assert judgement.usage == Usage(2, 200, 20)
    assert [m["role"] for m in seen[1]] == ["system", "user", "assistant", "user"]
    assert "missing: id 1" in seen[1][-1]["content"]


async def test_two_bad_answers_leave_the_group_without_scores_and_with_the_reasons() -> None:
    """C30, C33."""
    group = quality_group("g", QUALITIES)
    judge = FunctionJudge(lambda messages: told([(name, 7) for name, _ in truth(messages)]))
    judgement = await Ruler(judge).ascore(group)
    assert judge.calls == 2
    assert judgement.scores == {}
    assert judgement.unscored is not None
    assert "not from 0 to 1" in judgement.unscored
    applied = judgement.apply(group)
    assert [t.reward for t in applied] == [None] * 4
    assert not any(t.failed for t in applied)
    assert all("not from 0 to 1" in t.metadata["ruler"]["unscored"] for t in applied)
    with pytest.raises(RewardError, match="not from 0 to 1"):
        judgement.reward(group.trajectories[0].id)


class Stubborn:
    """A judge that never answers and does not let itself be cancelled."""

    name = "stubborn"

    async def ask(self, messages: Sequence[Message], schema: Any) -> Answer:
        while not self.free.is_set():
            try:
                await self.free.wait()
            except asyncio.CancelledError:
                continue
        return Answer("")

    def __init__(self) -> None:
        self.free = asyncio.Event()


async def test_a_judge_that_never_returns_is_given_up_and_others_are_not_held() -> None:
    """C32."""
    judge = Stubborn()
    judgement = await asyncio.wait_for(
        Ruler(judge, timeout=0.05).ascore(quality_group("g", QUALITIES)), timeout=60
    )
    judge.free.set()
    assert judgement.unscored is not None
    assert "no answer within 0.05 s" in judgement.unscored
    assert judgement.usage == Usage(calls=2, untold=2)


async def test_cancelling_a_judgement_cancels_its_calls() -> None:
    cancelled = asyncio.Event()
    asked = asyncio.Event()

    class Slow:
        name = "slow"

        async def ask(self, messages: Sequence[Message], schema: Any) -> Answer:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

    ruler = Ruler(Slow())
    work = asyncio.create_task(ruler.ascore(quality_group("g", QUALITIES)))
    await asked.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await asyncio.wait_for(cancelled.wait(), 60)
    assert ruler.usage == Usage(calls=1, untold=1)


async def test_votes_are_in_orders_of_their_own_and_the_median_counts() -> None:
    def by_place(messages: Sequence[Message]) -> str:
        """Perfect, but for a bonus on the first place."""
        found = truth(messages)
        return told([(name, min(score + 0.3 * (i == 0), 1)) for i, (name, score) in enumerate(found)])

    group = quality_group("g", (0.10, 0.15, 0.20, 0.25))
    biased = await Ruler(FunctionJudge(by_place)).ascore(group)
    voted = await Ruler(FunctionJudge(by_place), votes=4).ascore(group)
    assert max(abs(s - q) for s, q in zip(scores(biased), (0.10, 0.15, 0.20, 0.25), strict=True)) > 0.29
    # Four places, four votes: each run was first exactly once, and the median passes over it.
    assert scores(voted) == pytest.approx([0.10, 0.15, 0.20, 0.25])
    assert all(len(s.votes) == 4 for s in voted.scores.values())
    assert voted.reward("g-0").metrics["ruler_spread"] == pytest.approx(0.3)


@pytest.mark.parametrize(("bad", "scored"), [(1, True), (2, False)])
async def test_more_than_half_of_the_votes_must_be_valid(bad: int, scored: bool) -> None:
    calls: list[str] = []

    def some_silent(messages: Sequence[Message]) -> str:
        key = messages[1]["content"].splitlines()[0]
        if key not in calls:
            calls.append(key)
        return "" if calls.index(key) < bad else perfect(messages)

    judgement = await Ruler(FunctionJudge(some_silent), votes=3).ascore(quality_group("g", QUALITIES))
    assert bool(judgement.scores) is scored
    assert len(judgement.problems) == 2 * bad
    if not scored:
        assert "1 of 3 votes are valid" in (judgement.unscored or "")


async def test_the_same_question_is_asked_once_and_another_one_again() -> None:
    judge = FunctionJudge(perfect)
    ruler = Ruler(judge)
    group = quality_group("g", QUALITIES)
    first = await ruler.ascore(group)
    again = await ruler.ascore(quality_group("other", QUALITIES[::-1]))
    assert judge.calls == 1
    assert sorted(scores(again)) == sorted(scores(first))
    assert again.usage == Usage()
    await ruler.ascore(quality_group("g", (*QUALITIES[:3], 0.31)))
    assert judge.calls == 2
    cached = VerdictCache()
    for rubric in ("be kind", "be quick"):
        await Ruler(judge, rubric=rubric, cache=cached).ascore(group)
    assert judge.calls == 4


async def test_a_question_that_is_being_asked_is_not_paid_for_again() -> None:
    """C31: members that did the same, each scored by itself (``agather(reward=ruler.ascore_one)``)."""
    runs = [quality_run(name, 0.7) for name in "abcd"]
    judge = FunctionJudge(perfect)
    ruler = Ruler(judge)
    found = await asyncio.gather(*(ruler.ascore_one(run) for run in runs))
    assert [reward.total for reward in found] == [0.7] * 4
    assert (judge.calls, ruler.usage.calls) == (1, 1)

    broken = FunctionJudge(lambda _: "no")
    ruler = Ruler(broken)
    every = await asyncio.gather(*(ruler.ascore_one(run) for run in runs), return_exceptions=True)
    assert all(isinstance(one, JudgeError) for one in every)
    assert broken.calls == 2


async def test_who_waits_for_a_question_whose_asker_was_cancelled_asks_it() -> None:
    """C35."""
    asked, go = asyncio.Event(), asyncio.Event()

    class Slow(FunctionJudge):
        async def ask(self, messages: Sequence[Message], schema: Any) -> Answer:
            asked.set()
            await go.wait()
            return await super().ask(messages, schema)

    judge = Slow(perfect)
    ruler = Ruler(judge)
    first, second = (asyncio.create_task(ruler.ascore_one(quality_run(name, 0.7))) for name in "ab")
    await asked.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    go.set()
    assert (await second).total == 0.7
    assert judge.calls == 1


async def test_failures_are_not_cached() -> None:
    answers = iter(["", ""])

    def later(messages: Sequence[Message]) -> str:
        said = next(answers, None)
        return perfect(messages) if said is None else said

    ruler = Ruler(FunctionJudge(later))
    group = quality_group("g", QUALITIES)
    assert (await ruler.ascore(group)).unscored is not None
    assert (await ruler.ascore(group)).unscored is None


async def test_a_cache_file_outlives_its_process_and_a_torn_line(tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "cache" / "verdicts.jsonl"
    judge = FunctionJudge(perfect)
    group = quality_group("g", QUALITIES)
    await Ruler(judge, cache=VerdictCache(file)).ascore(group)
    with file.open("a") as open_file:
        open_file.write('{"key": "torn, "verd')
    cache = VerdictCache(file)
    assert "1 damaged lines" in caplog.text
    assert scores(await Ruler(judge, cache=cache).ascore(group)) == list(QUALITIES)
    assert judge.calls == 1
    await Ruler(judge, rubric="other", cache=cache).ascore(group)
    assert len(VerdictCache(file)) == 2


def test_a_cache_keeps_the_latest() -> None:
    cache = VerdictCache(size=2)
    for key in ("a", "b", "a", "c"):
        if cache.get(key) is None:
            cache.put(key, {})
    assert [cache.get(key) is None for key in ("a", "b", "c")] == [False, True, False]


async def test_a_verdict_that_the_disk_refuses_to_keep_is_used_all_the_same(
    tmp_path: Path, caplog: Any
) -> None:
    """C31: it was paid for; what is lost is only that the next process asks again."""
    blocked = tmp_path / "a file"
    blocked.write_text("")
    judge = FunctionJudge(perfect)
    ruler = Ruler(judge, cache=VerdictCache(blocked / "verdicts.jsonl"))
    for _ in range(2):
        groups = [quality_group("g", QUALITIES), quality_group("h", QUALITIES[:3])]
        judgements = await ruler.ascore_groups(groups)
        assert [scores(judgement) for judgement in judgements] == [list(QUALITIES), list(QUALITIES[:3])]
    assert judge.calls == 2
    assert [r.message.count("cannot be written") for r in caplog.records] == [1]


def test_a_cache_that_cannot_be_read_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: it cannot be read")):
        VerdictCache(tmp_path)


@pytest.mark.parametrize("given", ["a text", None, Answer(None, Usage(1, 0, 0))])  # type: ignore[arg-type]
async def test_a_judge_that_gives_no_answer_object_leaves_its_group_unscored_and_says_what_it_gave(
    given: Any,
) -> None:
    class Plain:
        name = "plain"

        async def ask(self, messages: Sequence[Message], schema: Any) -> Any:
            return given

    judgement = await Ruler(Plain()).ascore(quality_group("g", QUALITIES))
    assert judgement.scores == {}
    assert "expected Answer(text, usage)" in (judgement.unscored or "")

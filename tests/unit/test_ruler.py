"""RULER with judges in process: what is asked, what is made of the answers."""

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.judges import FunctionJudge, a_run, perfect, quality_group, quality_run, runs, told, truth
from helpers.trajectories import a_step

from art_core.errors import ConfigError, RewardError
from art_core.rewards.cache import VerdictCache
from art_core.rewards.judge import Answer, JudgeError, Usage
from art_core.rewards.ruler import Ruler
from art_core.rewards.scales import one_scale, overlapping_sets
from art_core.rewards.shape import Price
from art_core.store import Store
from art_core.types import Failure, Message, RolloutStatus, Scenario, TrajectoryGroup

QUALITIES = (0.1, 0.9, 0.5, 0.3)


def scores(judgement: Any) -> list[float]:
    return [scored.score for scored in judgement.scores.values()]


async def test_scores_land_on_their_trajectories_whatever_the_order() -> None:
    group = quality_group("g", QUALITIES)
    judgement = await Ruler(FunctionJudge(perfect)).ascore(group)
    assert judgement.unscored is None
    assert list(judgement.scores) == [t.id for t in group]
    assert scores(judgement) == list(QUALITIES)


async def test_the_order_of_the_question_follows_the_seed_and_the_contents_alone() -> None:
    orders: list[list[str]] = []

    def look(messages: Sequence[Message]) -> str:
        orders.append(re.findall(r"quality=[\d.]+", messages[1]["content"]))
        return perfect(messages)

    qualities = [i / 10 for i in range(8)]
    for seed, given in ((0, qualities), (0, qualities[::-1]), (1, qualities)):
        await Ruler(FunctionJudge(look), seed=seed).ascore(quality_group("g", given))
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


async def test_members_that_did_the_same_are_judged_once_and_get_the_same_score() -> None:
    asked: list[int] = []

    def look(messages: Sequence[Message]) -> str:
        asked.append(len(runs(messages)))
        return perfect(messages)

    judgement = await Ruler(FunctionJudge(look)).ascore(quality_group("g", (0.2, 0.7, 0.2, 0.7, 0.2)))
    assert asked == [2]
    assert scores(judgement) == [0.2, 0.7, 0.2, 0.7, 0.2]


async def test_failed_members_are_not_judged_and_never_scored() -> None:
    """C33."""
    group = quality_group("g", QUALITIES)
    failed = replace(
        group.trajectories[1], status=RolloutStatus.FAILED, failure=Failure("timeout", "60 s are over")
    )
    running = replace(group.trajectories[2], status=RolloutStatus.RUNNING)
    group = group.with_trajectories([group.trajectories[0], failed, running, a_run("empty")])
    judgement = await Ruler(FunctionJudge(perfect)).ascore(group)
    assert list(judgement.scores) == [group.trajectories[0].id]
    assert judgement.left_out == {
        failed.id: "it failed (timeout)",
        running.id: "it has not ended",
        "empty": "it has no steps to judge",
    }
    applied = judgement.apply(group)
    assert [t.reward for t in applied] == [0.1, None, None, None]
    assert applied.rewards == (0.1,)


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


async def test_an_unscored_group_loses_an_earlier_reward_too() -> None:
    """C33: half of a group on the old scale would be compared with nothing."""
    group = quality_group("g", (0.1, 0.2))
    group = group.with_trajectories([t.with_reward(0.5) for t in group])
    applied = (await Ruler(FunctionJudge(lambda _: "")).ascore(group)).apply(group)
    assert applied.rewards == ()


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


async def test_a_group_too_large_for_the_judge_is_judged_in_sets_on_one_scale() -> None:
    sizes: list[int] = []

    def relative(messages: Sequence[Message]) -> str:
        """Spreads whatever it sees over the whole scale, as judges that compare do."""
        found = truth(messages)
        sizes.append(len(found))
        values = [score for _, score in found]
        low, high = min(values), max(values)
        return told([(name, (score - low) / (high - low)) for name, score in found])

    qualities = [round(0.02 + 0.06 * i, 2) for i in range(16)]
    random.Random(3).shuffle(qualities)
    group = TrajectoryGroup(
        Scenario("go"),
        tuple(long_run(f"t{i}", q) for i, q in enumerate(qualities)),
        "g",
    )
    ruler = Ruler(FunctionJudge(relative), token_budget=3600, least_tokens=300)
    judgement = await ruler.ascore(group)
    assert judgement.unscored is None
    assert len(sizes) > 1
    assert max(sizes) < 16
    ranked = sorted(zip(qualities, scores(judgement), strict=True))
    assert [s for _, s in ranked] == sorted(s for _, s in ranked)
    assert all(0 <= s <= 1 for _, s in ranked)


def long_run(name: str, quality: float) -> Any:
    step = a_step(
        name, response={"role": "assistant", "content": f"{quality} words " * 400 + f"quality={quality:.4f}"}
    )
    return a_run(name, step)


async def test_trajectories_that_no_question_has_room_for_leave_the_group_unscored() -> None:
    group = TrajectoryGroup(Scenario("go"), (long_run("a", 0.1), long_run("b", 0.2)), "g")
    judge = FunctionJudge(perfect)
    judgement = await Ruler(judge, token_budget=1000, least_tokens=5000).ascore(group)
    assert judge.calls == 0
    assert "token_budget=1000" in (judgement.unscored or "")


@pytest.mark.parametrize(("items", "size"), [(2, 2), (5, 2), (7, 3), (16, 8), (17, 8), (4, 9)])
def test_sets_hold_every_item_and_hang_together(items: int, size: int) -> None:
    sets = overlapping_sets(items, size, random.Random(0))
    assert all(len(set(s)) == len(s) <= size for s in sets)
    reached = set(sets[0])
    while more := [s for s in sets if reached & set(s) and not set(s) <= reached]:
        reached |= set(more[0])
    assert reached == set(range(items))


def test_strict_and_kind_sets_are_put_on_one_scale() -> None:
    true = [i / 15 for i in range(16)]
    sets = overlapping_sets(16, 8, random.Random(1))
    given = [
        {i: stretch * true[i] + offset for i in chosen}
        for chosen, (stretch, offset) in zip(
            sets, [(0.5, 0.0), (0.5, 0.4), (0.8, 0.1), (0.6, 0.2)], strict=True
        )
    ]
    found = one_scale(given)
    assert sorted(range(16), key=lambda i: found[i]) == list(range(16))


def test_as_much_strictness_as_kindness_leaves_the_level_where_it_is() -> None:
    true = [0.2 + 0.6 * i / 15 for i in range(16)]
    sets = overlapping_sets(16, 8, random.Random(1))
    given = [
        {i: true[i] + offset for i in chosen}
        for chosen, offset in zip(sets, (0.15, -0.15, 0.15, -0.15), strict=True)
    ]
    found = one_scale(given)
    assert [found[i] for i in range(16)] == pytest.approx(true, abs=0.02)


async def test_one_trajectory_is_judged_by_the_rubric_alone() -> None:
    ruler = Ruler(FunctionJudge(perfect))
    reward = await ruler.ascore_one(quality_run("a", 0.7))
    assert (reward.total, reward.components) == (0.7, {"ruler": 0.7})
    with pytest.raises(JudgeError, match=r"no score of ruler:function: .*said nothing"):
        await Ruler(FunctionJudge(lambda _: "")).ascore_one(quality_run("a", 0.7))


async def test_the_rubric_may_depend_on_the_scenario() -> None:
    seen: list[str] = []

    def look(messages: Sequence[Message]) -> str:
        seen.append(messages[0]["content"])
        return perfect(messages)

    await Ruler(FunctionJudge(look), rubric=lambda s: f"the answer to {s.id} is 42").ascore(
        quality_group("g", QUALITIES)
    )
    assert "the answer to go is 42" in seen[0]


async def test_scores_go_into_the_stores_history_with_author_and_explanation(tmp_path: Path) -> None:
    group = quality_group("g", QUALITIES)
    with Store.open("p", tmp_path) as store:
        store.save_group(group)
        judgement = await Ruler(FunctionJudge(perfect)).ascore(group)
        applied = judgement.save(store, group, combine=lambda t, score: score - 0.01 * len(t.steps))
        latest = store.scores("g-1")[-1]
        assert latest.author == "ruler:function"
        assert latest.explanation.startswith("run ")
        assert latest.components == {"ruler": 0.9}
        assert latest.reward == pytest.approx(0.89)
        assert store.group("g").rewards == applied.rewards == pytest.approx((0.09, 0.89, 0.49, 0.29))


async def test_a_judgement_is_not_applied_to_another_group() -> None:
    judgement = await Ruler(FunctionJudge(perfect)).ascore(quality_group("g", QUALITIES))
    with pytest.raises(RewardError, match="h-0 is not of the group"):
        judgement.apply(quality_group("h", QUALITIES))


async def test_a_trajectory_twice_in_a_group_is_an_error() -> None:
    run = quality_run("a", 0.5)
    with pytest.raises(RewardError, match="trajectory a twice"):
        await Ruler(FunctionJudge(perfect)).ascore(TrajectoryGroup(Scenario("go"), (run, run), "g"))


def test_sync_code_has_the_same() -> None:
    groups = [quality_group("g", QUALITIES), quality_group("h", QUALITIES[::-1])]
    ruler = Ruler(FunctionJudge(perfect))
    assert scores(ruler.score(groups[0])) == list(QUALITIES)
    assert [scores(j) for j in ruler.score_groups(groups)] == [list(QUALITIES), list(QUALITIES[::-1])]


def test_cost_is_of_the_tokens_told() -> None:
    usage = Usage(2, 1_000_000, 2000) + Usage(1, 0, 0, 1)
    assert usage == Usage(3, 1_000_000, 2000, 1)
    assert usage.cost(Price(0.5, 2.0)) == pytest.approx(0.504)


@pytest.mark.parametrize(
    "wrong", [{"votes": 0}, {"timeout": 0}, {"token_budget": 10}, {"least_tokens": 0}, {"concurrency": 0}]
)
def test_settings_out_of_range_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Ruler(FunctionJudge(perfect), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("judge", ["openai:gpt-5-mini", None, object()])
def test_what_cannot_be_asked_is_no_judge(judge: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no judge: .*LangChainJudge"):
        Ruler(judge)

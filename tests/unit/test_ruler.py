"""RULER with judges in process: what is asked, and what becomes of the scores."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.judges import QUALITIES, FunctionJudge, a_run, perfect, quality_group, quality_run, runs, scores

from art_core.errors import ConfigError, RewardError
from art_core.rewards.judge import JudgeError, Usage
from art_core.rewards.ruler import Ruler
from art_core.rewards.shape import Price
from art_core.store import Store
from art_core.types import Failure, Message, RolloutStatus, Scenario, TrajectoryGroup


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


async def test_an_unscored_group_loses_an_earlier_reward_too() -> None:
    """C33: half of a group on the old scale would be compared with nothing."""
    group = quality_group("g", (0.1, 0.2))
    group = group.with_trajectories([t.with_reward(0.5) for t in group])
    applied = (await Ruler(FunctionJudge(lambda _: "")).ascore(group)).apply(group)
    assert applied.rewards == ()


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
    "wrong",
    [
        *({"votes": wrong} for wrong in (0, "3", 1.5, True)),
        *({"timeout": wrong} for wrong in (0, None, "3", float("nan"))),
        *({"token_budget": wrong} for wrong in (10, None)),
        {"least_tokens": 0},
        {"concurrency": 0},
        {"seed": "x"},
        *({"rubric": wrong} for wrong in (None, " ", ["short"], {"short": 1})),
        {"count_tokens": 5},
        {"cache": "verdicts.jsonl"},
        {"price": (1, 2)},
    ],
    ids=repr,
)
def test_settings_out_of_range_or_of_another_kind_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Ruler(FunctionJudge(perfect), **wrong)


async def _in_time(scenario: Scenario) -> str:
    return f"the answer to {scenario.id} is 42"


@pytest.mark.parametrize(
    ("rubric", "says"),
    [
        (lambda scenario: scenario.metadata["answer"], r"raised KeyError for scenario 'go': 'answer'"),
        (lambda scenario: 42, r"gave int for scenario 'go', expected a text"),
        (_in_time, r"gave coroutine for scenario 'go', expected a text"),
    ],
)
async def test_a_rubric_that_a_scenario_breaks_leaves_its_group_unscored_and_the_others_as_they_are(
    rubric: Any, says: str
) -> None:
    """C33: other groups' verdicts were paid for."""
    groups = [quality_group("g", QUALITIES), quality_group("h", QUALITIES[::-1])]
    other = replace(groups[1], scenario=Scenario("other"))
    ruler = Ruler(FunctionJudge(perfect), rubric=lambda s: "be right" if s.id == "other" else rubric(s))
    broken, sound = await ruler.ascore_groups([groups[0], other])
    assert broken.unscored is not None
    assert re.search(says, broken.unscored)
    assert scores(sound) == list(QUALITIES[::-1])


def test_one_group_and_several_are_not_taken_for_each_other() -> None:
    ruler, group = Ruler(FunctionJudge(perfect)), quality_group("g", QUALITIES)
    with pytest.raises(ConfigError, match=r"was given Trajectory, expected several groups; score\(group\)"):
        ruler.score_groups(group)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"was given list, expected a group; score_groups\(groups\)"):
        ruler.score([group])  # type: ignore[arg-type]


@pytest.mark.parametrize("judge", ["openai:gpt-5-mini", None, object()])
def test_what_cannot_be_asked_is_no_judge(judge: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no judge: .*LangChainJudge"):
        Ruler(judge)

"""Groups too large for one question: sets that hang together, put on one scale."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.judges import FunctionJudge, a_run, perfect, scores, told, truth
from helpers.trajectories import a_step

from art_core.rewards.ruler import Ruler
from art_core.rewards.scales import one_scale, overlapping_sets
from art_core.types import Message, Scenario, TrajectoryGroup


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

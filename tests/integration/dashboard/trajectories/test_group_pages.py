"""The pages of groups and of scenarios."""

import re
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from helpers.page_texts import page, visible
from helpers.synthetic_store import HOSTILE
from helpers.trajectories import a_step, a_trajectory

from art_core.store import Store
from art_core.store.browse import TrajectoryFilter, list_trajectories
from art_core.types import Scenario, StepIdentity, TrajectoryGroup


def test_a_groups_members_stand_side_by_side_with_the_judges_words_and_their_differences(
    empty: Store,
) -> None:
    def member(name: str, reward: float, said: str, node: str = "player") -> Any:
        where = StepIdentity(node=node)
        step = a_step(name, response={"role": "assistant", "content": said}, identity=where)
        return replace(a_trajectory(name), steps=(step,), reward=reward)

    members = (
        member("one", 0.2, "tea is green"),
        member("two", 0.9, "tea is mostly black"),
        member("three", 0.1, "tea is mostly black", node="coach"),
    )
    group = empty.save_group(TrajectoryGroup(Scenario("board-1"), members))
    empty.score("one", 0.25, author="ruler:judge", explanation="Only <half> of it.")
    text = page(empty, f"/groups/{group}")
    assert "Only &lt;half&gt; of it." in text
    assert "ruler:judge" in text

    def marks(text: str) -> list[str]:
        return [visible(mark).strip() for mark in re.findall(r"<mark>(.*?)</mark>", text)][
            1:
        ]  # after the key

    assert marks(text) == ["green", "coach"]  # the best one is what others are compared with
    against_one = page(empty, f"/groups/{group}?reference=one")
    assert marks(against_one) == ["mostly black", "coach", "mostly black"]


def test_a_scenario_is_shown_version_by_version(hostile: Store) -> None:
    text = page(hostile, f"/scenarios?scenario_id={quote(HOSTILE[0])}&run_id=r-0000")
    shown = [int(n) for n in re.findall(r">version (\d+)</a>", text)]
    assert shown == sorted(shown)
    listed = list_trajectories(hostile, TrajectoryFilter(scenario_id=HOSTILE[0], run_id="r-0000"), 500).items
    assert shown == sorted({row.policy_number for row in listed if row.policy_number is not None})

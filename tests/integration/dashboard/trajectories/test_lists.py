"""Lists of trajectories and of groups: narrowed down, page by page."""

import html
import re
from dataclasses import replace

import pytest
from helpers.page_texts import client, page, visible
from helpers.trajectories import a_step, a_trajectory

from art_core.store import Store
from art_core.store.browse import TrajectoryFilter, list_trajectories
from art_core.types import Failure, RolloutStatus, StepIdentity, Trajectory, TrajectoryGroup


def test_the_list_of_trajectories_is_narrowed_by_its_address_and_leads_to_the_next_page(
    hostile: Store,
) -> None:
    everything = page(hostile, "/trajectories")
    assert "161 found" in visible(everything)
    failed = page(hostile, "/trajectories?status=failed")
    names = set(re.findall(r'href="/trajectories/(t-\d+)"', failed))
    assert names == {r.id for r in list_trajectories(hostile, TrajectoryFilter(status="failed")).items}
    best = page(hostile, "/trajectories?order=best&run_id=r-0001&node=writer&reward_min=0.1")
    assert 'value="r-0001" selected' in best
    assert 'value="writer" selected' in best


def test_pages_of_a_long_list_follow_each_other(empty: Store) -> None:
    for n in range(120):
        empty.save_trajectory(a_trajectory(f"t-{n:03}", steps=0))
    seen: list[str] = []
    address = "/trajectories"
    while address:
        text = page(empty, address)
        seen += re.findall(r'<th scope="row"><a class="mono" href="/trajectories/(t-\d+)"', text)
        following = re.search(r'rel="next" href="([^"]+)"', text)
        address = html.unescape(following[1]) if following else ""
    assert seen == [f"t-{n:03}" for n in reversed(range(120))]


@pytest.mark.parametrize(
    ("address", "status", "said"),
    [
        ("/trajectories?reward_min=high", 400, "reward_min='high': expected a number"),
        ("/trajectories?order=random", 400, "order='random'"),
        ("/trajectories?policy_number=-1", 400, "policy_number='-1'"),
        ("/groups?spread=much", 400, "spread='much': expected none or some"),
        ("/groups?reward_max=low", 400, "reward_max='low': expected a number"),
        ("/trajectories?after=nowhere", 400, "there is no page after"),
        ("/trajectories/nobody", 404, "has no trajectory nobody"),
        ("/groups/nobody", 404, "has no group nobody"),
        ("/groups/nobody/tree", 404, "has no group nobody"),
        ("/scenarios", 400, "scenario_id is missing"),
        ("/trajectories/nobody/tokens?step=s", 404, "has no step s"),
    ],
)
def test_what_cannot_be_shown_is_said_with_what_was_asked(
    empty: Store, address: str, status: int, said: str
) -> None:
    answer = client(empty).get(address)
    assert answer.status_code == status
    assert said in visible(answer.text)


def test_an_empty_store_says_so(empty: Store) -> None:
    assert "No trajectory is like that" in page(empty, "/trajectories")
    assert "No group is like that" in page(empty, "/groups")


def test_the_best_and_worst_of_a_step_are_shown_when_a_run_and_a_step_are_chosen(hostile: Store) -> None:
    first = list_trajectories(hostile, TrajectoryFilter(run_id="r-0000", policy_number=0, order="best")).items
    text = page(hostile, "/groups?run_id=r-0000&policy_number=0")
    assert "Best of step 0" in text
    best, worst = text.index("Best of step"), text.index("Worst of step")
    assert best < text.index(f"/trajectories/{first[0].id}") < worst
    assert f"/trajectories/{first[-1].id}" in text[worst:]


def test_groups_are_narrowed_down_by_what_a_member_did_got_or_failed_by(empty: Store) -> None:
    def save(name: str, *members: Trajectory) -> None:
        empty.save_group(TrajectoryGroup(members[0].scenario, members, name))

    timeout = {"status": RolloutStatus.FAILED, "failure": Failure("timeout", "too long")}
    call = a_step("s", identity=StepIdentity(node="search"))
    failed = replace(a_trajectory("late"), reward=None, **timeout)
    searched = replace(a_trajectory("s", reward=0.9), steps=(call,))
    save("g-mixed", failed, searched, a_trajectory("bad", reward=0.1))
    save("g-flat", a_trajectory("x", reward=0.5), a_trajectory("y", reward=0.5))
    for asked, found in {
        "node=search": ["g-mixed"],
        "cause=timeout": ["g-mixed"],
        "reward_min=0.4&reward_max=0.6": ["g-flat"],
        "spread=none": ["g-flat"],
        "spread=some": ["g-mixed"],
        "spread=none&node=search": [],
        "": ["g-flat", "g-mixed"],
    }.items():
        text = page(empty, f"/groups?{asked}")
        assert re.findall(r'href="/groups/(g-[^"]+)"', text) == found, asked
    assert text.count(">flat</span>") == 1

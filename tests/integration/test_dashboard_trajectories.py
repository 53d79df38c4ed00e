"""Pages of groups, trajectories, token trees and scenarios, over real HTTP requests, from recorded runs."""

import html
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from helpers.branching_run import branching_graph, record, write_byte_tokenizer
from helpers.synthetic_store import HOSTILE, fill
from helpers.trajectories import a_span, a_step, a_trajectory

from art_core.observe.dashboard.app import create_app
from art_core.store import Store
from art_core.store.browse import TrajectoryFilter, TrajectoryRow, graph_shapes, list_trajectories
from art_core.types import Failure, RolloutStatus, Scenario, StepIdentity, Trajectory, TrajectoryGroup

PART = {"X-ART-Part": "1"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Two runs of a real LangGraph agent: one with spans and a tokenizer, one with neither."""
    root = tmp_path_factory.mktemp("recorded")
    with Store.open("branching", root) as store:
        record(store, scenarios=1, group_size=3, base_model=str(write_byte_tokenizer(root / "tokenizer")))
        record(store, scenarios=1, group_size=2, spans=False)
        yield store


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open("hostile", tmp_path_factory.mktemp("hostile")) as store:
        fill(store, run_count=2, rollouts=160, scenario_count=6, hostile=True, long_tokens=60_000)
        yield store


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Store]:
    with Store.open("empty", tmp_path) as store:
        yield store


def client(store: Store, *, control: bool = False) -> TestClient:
    return TestClient(create_app(store, control=control))


def rows(store: Store, run: int) -> tuple[TrajectoryRow, ...]:
    run_id = store.runs()[run].id
    return list_trajectories(store, TrajectoryFilter(run_id=run_id, order="oldest")).items


def page(store: Store, address: str, **headers: str) -> str:
    answer = client(store).get(address, headers=headers)
    assert answer.status_code == 200, answer.text[-2000:]
    return answer.text


def states(text: str) -> dict[str, str]:
    """The state of each node of the graph that a page has drawn."""
    found = re.finditer(r'<g class="node \w+ (\w+)">.*?<title>([^:]+):', text)
    return {html.unescape(node[2]): node[1] for node in found}


def visible(text: str) -> str:
    """What a reader sees of a page, roughly."""
    return html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)))


# -- lists -------------------------------------------------------------------------------------------


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


# -- one trajectory ----------------------------------------------------------------------------------


def test_a_trajectory_of_a_real_graph_is_drawn_with_its_way_its_retry_and_what_it_did_not_visit(
    recorded: Store,
) -> None:
    text = page(recorded, f"/trajectories/{rows(recorded, 0)[0].id}")
    seen = visible(text)
    drawn = states(text)
    assert drawn["plan"] == drawn["desk > write"] == drawn["edit"] == "visited"
    assert drawn["scrap"] == "unvisited"
    assert drawn["search"] == "retried"
    assert "attempt 2" in seen
    assert "superseded" in seen
    assert "ConnectionError: the library is closed" in seen
    way = re.search(r"The way through the graph: ([^\"]+)", text)
    assert way is not None
    stops = re.findall(r"\d+ ([a-z &;]+?)[,.]", way[1])
    assert stops[0] == "plan"
    assert stops.count("search") == 7  # three in each of two rounds, and a retry
    assert stops.count("edit") == 2


def test_nodes_that_left_no_record_but_must_have_been_passed_are_drawn_as_such(recorded: Store) -> None:
    """Without spans, nodes that call no model are seen only by the shape of the graph."""
    text = page(recorded, f"/trajectories/{rows(recorded, 1)[0].id}")
    drawn = states(text)
    assert drawn["edit"] == "passed"
    assert drawn["scrap"] == "unvisited"
    assert drawn["search"] == "retried"


def test_a_graphs_shape_is_recorded_once_for_a_run(recorded: Store) -> None:
    for run in recorded.runs():
        (shape,) = graph_shapes(recorded, run.id)
        assert {"plan", "scrap", "desk:write"} <= set(shape["nodes"])
        assert ["plan", "search", True] in shape["edges"]


def test_everything_that_was_said_is_on_the_page_once_or_one_click_away(recorded: Store) -> None:
    row = rows(recorded, 0)[0]
    shown = page(recorded, f"/trajectories/{row.id}")
    text = visible(shown)
    trajectory = recorded.trajectory(row.id)
    for step in trajectory.steps:
        assert step.message() in text
    assert shown.count(">You plan.</div>") == 1
    last = trajectory.steps[-1]
    whole = visible(page(recorded, f"/trajectories/{row.id}/request?step={last.id}", **PART))
    for message in last.messages:
        assert str(message["content"]) in whole
    with_tools = next(step for step in trajectory.steps if step.tools)
    whole = visible(page(recorded, f"/trajectories/{row.id}/request?step={with_tools.id}", **PART))
    assert "Look something up." in whole


def test_what_training_did_is_said_at_each_call(recorded: Store) -> None:
    row = rows(recorded, 0)[0]
    text = visible(page(recorded, f"/trajectories/{row.id}"))
    trained = recorded.trained(row.id)[0]
    assert "trained in step 1" in text
    assert f"{sum(trained.trained)} of {len(trained.trained)} tokens" in text


def test_a_trajectory_without_a_graph_shows_its_calls(empty: Store) -> None:
    steps = tuple(a_step("plain", n, identity=StepIdentity()) for n in range(3))
    empty.save_trajectory(replace(a_trajectory("plain"), steps=steps))
    text = page(empty, "/trajectories/plain")
    assert "Way through the graph" not in text
    assert len(re.findall(r'id="visit-\d+"', text)) == 3


def test_a_trajectory_of_many_visits_is_shown_page_by_page(empty: Store) -> None:
    steps = tuple(a_step("long", n, identity=StepIdentity(node="n", namespace=f"n:{n}")) for n in range(130))
    empty.save_trajectory(replace(a_trajectory("long"), steps=steps))
    found = [
        n
        for start in (0, 60, 120)
        for n in re.findall(r'id="visit-(\d+)"', page(empty, f"/trajectories/long?from={start}"))
    ]
    assert found == [str(n) for n in range(1, 131)]


def test_ids_with_slashes_and_spaces_have_pages(empty: Store) -> None:
    odd = "run/../1 of 2?#%"
    made = replace(a_trajectory(odd), steps=(a_step(odd),))
    empty.save_group(TrajectoryGroup(made.scenario, (made,), "g/1"))
    listed = page(empty, "/trajectories")
    address = re.search(r'href="(/trajectories/run[^"]+)"', listed)
    assert address is not None
    assert odd in visible(page(empty, address[1]))
    assert "/" not in address[1].removeprefix("/trajectories/")  # a browser would follow the dots
    assert odd in visible(page(empty, "/groups/g/1"))
    assert "Token tree" in page(empty, "/groups/g/1/tree")


# -- tokens ------------------------------------------------------------------------------------------


def tokens_of(text: str) -> list[tuple[str, str, str]]:
    """Classes, title and text of each token on a page."""
    part = text[text.index('aria-label="Sampled tokens') if "Sampled tokens" in text else 0 :]
    found = re.findall(
        r'<span class="(tok[^"]*)" title="([^"]*)">(.*?)</span>(?=<span class="tok|</div>)', part, re.S
    )
    return [(classes, title, html.unescape(re.sub(r"<[^>]+>", "", shown))) for classes, title, shown in found]


def test_tokens_are_spelled_by_the_runs_own_tokenizer_with_what_training_did(recorded: Store) -> None:
    row = rows(recorded, 0)[0]
    step = recorded.trajectory(row.id).steps[0]
    trained = next(t for t in recorded.trained(row.id) if t.step_id == step.id)
    found = tokens_of(page(recorded, f"/trajectories/{row.id}/tokens?step={step.id}", **PART))
    assert step.tokens is not None
    assert "".join(shown for _, _, shown in found) == step.message() + "<|end|>"
    assert len(found) == len(step.tokens.completion)
    for i, (classes, title, _) in enumerate(found):
        assert f"id {step.tokens.completion[i]}," in title
        assert f"logprob {step.tokens.logprobs[i]:.3f}" in title
        assert f"advantage {trained.advantage:+.3f}" in title
        assert ("untrained" in classes) == (not trained.trained[i])


def test_without_a_tokenizer_tokens_are_shown_by_their_ids(recorded: Store) -> None:
    row = rows(recorded, 1)[0]
    step = recorded.trajectory(row.id).steps[0]
    text = page(recorded, f"/trajectories/{row.id}/tokens?step={step.id}&part=prompt", **PART)
    assert "tokenizer is not on this machine" in text
    assert step.tokens is not None
    assert f"#{step.tokens.prompt[0]}<" in text


def test_a_long_steps_tokens_come_page_by_page_and_each_once(hostile: Store) -> None:
    step = next(s for s in hostile.trajectory("long-rollout").steps if s.tokens)
    long = replace(step, id="longer", rollout_id="longer", tokens=None)
    assert step.tokens is not None
    tokens = replace(step.tokens, completion=tuple(range(4000)), logprobs=(-0.5,) * 4000)
    hostile.save_trajectory(
        replace(hostile.trajectory("long-rollout"), id="longer", steps=(replace(long, tokens=tokens),))
    )
    shown = [
        re.findall(r"token (\d+): id", page(hostile, f"/trajectories/longer/tokens?step=longer&page={n}"))
        for n in range(3)
    ]
    assert [int(n) for numbers in shown for n in numbers] == list(range(4000))


# -- groups, trees, scenarios ------------------------------------------------------------------------


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


def test_the_token_tree_of_a_group_counts_what_is_shared_as_training_does(recorded: Store) -> None:
    from art_core.training.samples import trajectory_samples
    from art_core.training.token_tree import build_tree

    row = rows(recorded, 0)[0]
    assert row.group_id is not None
    group = recorded.group(row.group_id)
    samples = [s for t in group for s in trajectory_samples(t, include_superseded=True)[0]]
    tree = build_tree(samples)
    text = visible(page(recorded, f"/groups/{row.group_id}/tree"))
    assert f"{len(tree):,} tokens stand for {tree.tokens_total:,}" in text
    stretch = visible(page(recorded, f"/groups/{row.group_id}/stretch?number=0", **PART))
    assert "All 3 rollouts" in stretch or "all 3 rollouts" in stretch


def test_a_group_without_tokens_has_no_tree_and_says_so(empty: Store) -> None:
    made = replace(a_trajectory("texts"), steps=(a_step("texts", tokens=None, policy=None),))
    group = empty.save_group(TrajectoryGroup(made.scenario, (made,)))
    assert "No call of this group has tokens" in page(empty, f"/groups/{group}/tree")


def test_a_scenario_is_shown_version_by_version(hostile: Store) -> None:
    text = page(hostile, f"/scenarios?scenario_id={quote(HOSTILE[0])}&run_id=r-0000")
    shown = [int(n) for n in re.findall(r">version (\d+)</a>", text)]
    assert shown == sorted(shown)
    listed = list_trajectories(hostile, TrajectoryFilter(scenario_id=HOSTILE[0], run_id="r-0000"), 500).items
    assert shown == sorted({row.policy_number for row in listed if row.policy_number is not None})


# -- text that nobody should trust -------------------------------------------------------------------


ADDRESSES = ("/trajectories", "/groups", "/trajectories/{id}", "/groups/{group}", "/groups/{group}/tree")


@pytest.mark.parametrize("address", ADDRESSES)
def test_what_a_run_recorded_is_never_markup_nor_moves_what_is_around_it(
    hostile: Store, address: str
) -> None:
    nasty = 0
    for row in list_trajectories(hostile, TrajectoryFilter(), 500).items[::8]:
        text = page(hostile, address.format(id=row.id, group=row.group_id or "g-000000"))
        assert "<script>document" not in text
        assert "<img" not in text
        assert "49" not in re.findall(r"\{\{ 7 \* 7 \}\}|49 \{%", text)
        assert not set(text) & {"\x1b", "\u202e", "\x00", "\x07"}
        assert len(text) < 400_000
        nasty += "document.title" in text
        if "{" not in address:
            break
    assert nasty


def test_a_line_of_a_megabyte_is_cut_in_the_middle_and_fetched_whole_when_asked(empty: Store) -> None:
    long = "a" * 500_000 + "\u202e\x1b[31mMIDDLE" + "z" * 500_000
    step = a_step("huge", response={"role": "assistant", "content": long})
    span = a_span(1, outputs=long, namespace="player:1")
    empty.save_trajectory(replace(a_trajectory("huge"), steps=(step,), spans=(span,)))
    text = page(empty, "/trajectories/huge")
    assert len(text) < 60_000
    assert "MIDDLE" not in text
    links = [html.unescape(a) for a in re.findall(r'<a class="rest" href="([^"]+)"', text)]
    assert len(links) == 2
    for link in links:
        whole = page(empty, link, **PART)
        assert "U+202E" in whole
        assert "right-to-left override" in whole
        assert "[31mMIDDLE" in whole
        assert "\x1b" not in whole
        assert len(whole) > 1_000_000
    assert "MIDDLE" in page(empty, links[0])  # without a script: a page of its own


def test_parts_are_whole_pages_without_a_script(recorded: Store) -> None:
    row = rows(recorded, 0)[0]
    step = recorded.trajectory(row.id).steps[0].id
    for kind in ("tokens", "request"):
        text = page(recorded, f"/trajectories/{row.id}/{kind}?step={step}")
        assert text.startswith("<!doctype html>")
        assert not page(recorded, f"/trajectories/{row.id}/{kind}?step={step}", **PART).startswith(
            "<!doctype"
        )


# -- feedback ----------------------------------------------------------------------------------------


def token_of(web: TestClient, address: str) -> dict[str, str]:
    found = re.search(r'data-token="([^"]+)"', web.get(address).text)
    assert found is not None
    return {"X-ART-Control": found[1]}


def test_thumbs_scores_and_choices_of_people_are_kept_beside_the_reward(empty: Store) -> None:
    members = a_trajectory("one"), a_trajectory("two")
    group = empty.save_group(TrajectoryGroup(members[0].scenario, members))
    web = client(empty, control=True)
    token = token_of(web, "/trajectories/one")
    assert token_of(web, f"/groups/{group}") == token
    given = {"trajectory_id": "one", "author": "ann"}
    for body in (
        {**given, "kind": "thumb", "value": -1},
        {**given, "kind": "score", "value": 0.25, "comment": "too <short>"},
        {**given, "kind": "choice", "value": 0, "over": "two"},
        {**given, "kind": "choice", "value": 0.5, "over": "two"},
    ):
        answer = web.post("/feedback", json=body, headers=token)
        assert answer.status_code == 200, answer.text
        assert "ann" in answer.json()["said"]
    kept = [(f.trajectory_id, f.kind, f.value, f.over) for f in empty.feedback()]
    assert kept == [
        ("one", "thumb", -1.0, None),
        ("one", "score", 0.25, None),
        ("two", "choice", 1.0, "one"),  # the second was better
        ("one", "choice", 0.5, "two"),
    ]
    assert empty.trajectory("one").reward == 0.5
    text = web.get("/trajectories/one").text
    assert "too &lt;short&gt;" in text
    assert "thumb down" in text


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"value": 3}, 422, "value"),
        ({"author": ""}, 422, "author"),
        ({"trajectory_id": "nobody"}, 404, "nobody"),
        ({"kind": "choice"}, 422, "choice"),
        ({"reward": 1.0}, 422, "reward"),
        ({"comment": "x" * 40_000}, 413, "bytes"),
    ],
)
def test_feedback_that_says_nothing_is_refused_by_name_and_keeps_nothing(
    empty: Store, change: dict[str, Any], status: int, said: str
) -> None:
    empty.save_trajectory(a_trajectory("one"))
    web = client(empty, control=True)
    body = {"trajectory_id": "one", "author": "ann", "kind": "thumb", "value": 1} | change
    answer = web.post("/feedback", json=body, headers=token_of(web, "/trajectories/one"))
    assert answer.status_code == status
    assert said in str(answer.json()["errors"])
    assert empty.feedback() == []


def test_feedback_needs_control_and_a_page_of_this_server(empty: Store) -> None:
    empty.save_trajectory(a_trajectory("one"))
    body = {"trajectory_id": "one", "author": "ann", "kind": "thumb", "value": 1}
    assert '<form class="feedback' not in page(empty, "/trajectories/one")
    assert client(empty).post("/feedback", json=body).status_code == 403
    web = client(empty, control=True)
    assert web.post("/feedback", json=body).status_code == 403
    assert web.post("/feedback", json=body, headers={"X-ART-Control": "é".encode()}).status_code == 403
    assert empty.feedback() == []


def test_the_graph_of_these_tests_is_one_that_langgraph_can_draw() -> None:
    """Else the tests of its shape would test nothing."""
    from art_core.inference.endpoint import StaticEndpoint

    shape = branching_graph(StaticEndpoint("http://127.0.0.1:9/v1", "agent@0")).get_graph(xray=True)
    assert "desk:check" in shape.nodes

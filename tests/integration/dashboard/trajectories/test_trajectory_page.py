"""The page of one trajectory: its way through the graph, what was said, what training did."""

import re
from dataclasses import replace

from helpers.branching_run import branching_graph
from helpers.page_texts import PART, page, rows, states, visible
from helpers.trajectories import a_step, a_trajectory

from art_core.store import Store
from art_core.store.browse import graph_shapes
from art_core.types import StepIdentity, TrajectoryGroup


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


def test_parts_are_whole_pages_without_a_script(recorded: Store) -> None:
    row = rows(recorded, 0)[0]
    step = recorded.trajectory(row.id).steps[0].id
    for kind in ("tokens", "request"):
        text = page(recorded, f"/trajectories/{row.id}/{kind}?step={step}")
        assert text.startswith("<!doctype html>")
        assert not page(recorded, f"/trajectories/{row.id}/{kind}?step={step}", **PART).startswith(
            "<!doctype"
        )


def test_the_graph_of_these_tests_is_one_that_langgraph_can_draw() -> None:
    """Else the tests of its shape would test nothing."""
    from art_core.inference.endpoint import StaticEndpoint

    shape = branching_graph(StaticEndpoint("http://127.0.0.1:9/v1", "agent@0")).get_graph(xray=True)
    assert "desk:check" in shape.nodes

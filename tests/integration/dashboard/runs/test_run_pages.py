"""The pages of runs and of comparisons: what is on them, and how a run stands."""

import json
import math
import re
import subprocess
import sys

import pytest
from fastapi.routing import APIRoute
from helpers.page_documents import page
from starlette.testclient import TestClient

from art_core.observe.dashboard.app import create_app
from art_core.store import Store


def test_all_runs_are_listed_newest_first_with_what_they_came_to(client: TestClient, store: Store) -> None:
    document = page(client, "/")
    listed = [a["value"] for a in document.all("input") if a.get("name") == "run"]
    assert listed == [run.id for run in reversed(store.runs())]
    assert len(document.all("polyline")) == 4
    last = store.metrics("r-0000", "reward_mean")[-1].value
    assert f"{last:.3f}" in document.text


def test_a_project_without_runs_says_how_one_begins(empty: Store) -> None:
    client = TestClient(create_app(empty))
    assert "No runs yet" in page(client, "/").text
    run = empty.begin_run("agent")
    document = page(client, f"/runs/{run}")
    assert "No training step yet" in document.text
    assert "No groups yet" in page(client, f"/runs/{run}/audit").text


def test_a_run_shows_every_metric_once_and_the_important_ones_first(client: TestClient, store: Store) -> None:
    document = page(client, "/runs/r-0000")
    charts = [json.loads(a["data-chart"]) for a in document.all("figure")]
    drawn = [name for chart in charts for name in [*chart["names"], *filter(None, [chart["spread"]])]]
    assert sorted(drawn) == sorted({metric.name for metric in store.metrics("r-0000")})
    assert charts[0] | {"kind": "lines"} == {
        "names": ["reward_mean"],
        "spread": "reward_std",
        "kind": "lines",
        "wide": True,
    }
    bars = next(chart for chart in charts if chart["kind"] == "bars")
    assert bars["names"] == [f"time/{phase}" for phase in ("rollout", "judge", "train", "publish", "wait")]
    assert "Mean reward of the rollouts that have one." in document.text  # the catalogue explains
    assert "It learns." in document.text
    assert "learning rate lowered to 0.5" in document.text


def test_runs_are_compared_by_curves_and_by_the_settings_in_which_they_differ(client: TestClient) -> None:
    document = page(client, "/compare?run=r-0000&run=r-0001")
    assert {a["data-run"] for a in document.all("tr") if "data-run" in a} == {"r-0000", "r-0001"}
    assert "train.learning_rate" in document.text
    assert "train.loss" not in document.text  # equal in both
    metrics = [a["data-metric"] for a in document.all("figure")]
    assert metrics[0] == "reward_mean"
    assert len(metrics) == len(set(metrics))


def test_series_are_numbers_steps_and_times_and_gaps_are_null(empty: Store) -> None:
    run = empty.begin_run("agent")
    for step, value in enumerate((0.5, math.nan, math.inf, 1.0), 1):
        empty.log_metrics(run, step, {"reward_mean": value})
    found = TestClient(create_app(empty)).get(f"/runs/{run}/series?name=reward_mean&name=nothing").json()
    assert list(found["series"]) == ["reward_mean"]
    assert found["series"]["reward_mean"]["steps"] == [1, 2, 3, 4]
    assert found["series"]["reward_mean"]["values"] == [0.5, None, None, 1.0]
    assert found["series"]["reward_mean"]["times"] == sorted(found["series"]["reward_mean"]["times"])


@pytest.mark.parametrize(
    ("show", "place"),
    [
        ("best", "/trajectories?run_id=r-0000&policy_number=6&order=best"),
        ("worst", "/trajectories?run_id=r-0000&policy_number=6&order=worst"),
        ("groups", "/groups?run_id=r-0000&policy_number=6"),
    ],
)
def test_a_step_leads_to_the_rollouts_that_it_was_made_of(client: TestClient, show: str, place: str) -> None:
    answer = client.get(f"/runs/r-0000/step?step=7&show={show}", follow_redirects=False)
    assert answer.headers["location"] == place
    assert client.get(place).status_code == 200


def test_head_is_answered_as_get_is_on_every_page_without_the_body(client: TestClient, store: Store) -> None:
    trajectory = next(iter(store.trajectories()))
    known = {"run_id": "r-0000", "group_id": trajectory.group_id, "trajectory_id": trajectory.id}
    paths = {
        re.sub(r"\{(\w+)(?::\w+)?\}", lambda found: str(known[found[1]]), route.path)
        for route in client.app.routes  # type: ignore[attr-defined]
        if isinstance(route, APIRoute) and "GET" in route.methods
    }
    assert {"/", "/runs/r-0000", "/runs/r-0000/live", "/trajectories", "/vendor/plotly.min.js"} <= paths
    for path in sorted(paths):
        head = client.head(path)  # also what follows a run for ever: its answer ends with its headers
        assert head.content == b""
        if not path.endswith("/live"):
            got = client.get(path)
            assert (head.status_code, head.headers) == (got.status_code, got.headers), path
    assert client.head("/nowhere").status_code == 404
    assert client.head("/feedback").status_code == 405


def run_of_process(store: Store, pid: int) -> str:
    import socket

    return store.begin_run("agent", {"process": {"host": socket.gethostname(), "pid": pid}})


def test_a_run_whose_process_is_gone_is_silent_and_one_whose_process_is_there_goes_on(empty: Store) -> None:
    import os

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, alive = run_of_process(empty, gone.pid), run_of_process(empty, os.getpid())
    client = TestClient(create_app(empty))
    assert "its process is gone" in page(client, f"/runs/{dead}").text
    document = page(client, f"/runs/{alive}")
    assert "running" in document.text
    assert "its process is gone" not in document.text
    empty.end_run(alive, "stopped")
    assert "stopped" in page(client, f"/runs/{alive}").text


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/runs/nothing", 404, "there is no run 'nothing'"),
        ("/compare", 400, "select 2 to 16"),
        ("/compare?run=nothing", 404, "there is no run"),
        ("/runs/r-0000/audit?groups=0", 422, "groups='0'"),
        ("/runs/r-0000/live?after=then", 400, "'then' is no position"),
        ("/nowhere", 404, "There is no such page"),
    ],
)
def test_what_cannot_be_shown_is_a_page_that_says_why(
    client: TestClient, path: str, status: int, said: str
) -> None:
    assert said in page(client, path, status).text


def test_a_run_with_more_events_than_anybody_reads_shows_the_newest_and_counts_all(empty: Store) -> None:
    run = empty.begin_run("agent")
    for n in range(510):
        empty.add_event(run, "noted", f"event {n}")
    document = page(TestClient(create_app(empty)), f"/runs/{run}")
    assert "Events 510" in document.text
    assert "event 509" in document.text
    assert "event 9 " not in document.text
    assert sum(word == "noted" for word in document.words) == 500

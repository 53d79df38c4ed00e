"""The pages of runs, of comparisons and of audits, asked over HTTP."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.routing import APIRoute
from helpers.synthetic_store import fill
from helpers.trajectories import a_trajectory
from starlette.testclient import TestClient

from art_core.config import TrainableModelConfig, TrainConfig
from art_core.observe.dashboard.app import create_app
from art_core.observe.dashboard.page import plotly_url
from art_core.observe.dashboard.pages_audit import Audits
from art_core.store import Store
from art_core.training.knobs import KnobBoard


class Document(HTMLParser):
    """A page taken apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for found, attributes in self.elements if found == tag]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open("pages", tmp_path_factory.mktemp("pages")) as opened:
        fill(opened, run_count=4, rollouts=160)
        yield opened


@pytest.fixture
def client(store: Store) -> TestClient:
    return TestClient(create_app(store), base_url="http://127.0.0.1")


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Store]:
    with Store.open("empty", tmp_path) as opened:
        yield opened


def page(client: TestClient, path: str, status: int = 200) -> Document:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    return Document(answer.text)


def finished_audit(client: TestClient, path: str) -> Document:
    for _ in range(100):
        document = page(client, path)
        waiting = [a["data-working"] for _, a in document.elements if "data-working" in a]
        if not waiting:
            return document
        path = path.partition("?")[0] + waiting[0]
    raise AssertionError("the audit never ended")


# -- what is on them -----------------------------------------------------------------------------------


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


def test_an_audit_shows_its_findings_with_the_rollouts_to_read(client: TestClient, store: Store) -> None:
    document = finished_audit(client, "/runs/r-0000/audit?groups=5")
    assert "do rewards differ within groups?" in document.text
    read = [a["href"] for a in document.all("a") if a.get("href", "").startswith("/trajectories/")]
    assert read
    for path in read:
        store.trajectory(path.rpartition("/")[2])  # it is there
        assert client.get(path).status_code == 200


def test_an_audit_is_made_again_only_when_something_was_added(empty: Store) -> None:
    fill(empty, run_count=1, rollouts=40)
    app = create_app(empty)
    client = TestClient(app)
    finished_audit(client, "/runs/r-0000/audit")
    finished_audit(client, "/runs/r-0000/audit")
    assert len(app.state.audits._jobs) == 1
    empty.add_feedback("t-0000001", kind="thumb", value=1.0, author="ana")
    finished_audit(client, "/runs/r-0000/audit")
    assert len(app.state.audits._jobs) == 2


def test_a_page_that_waits_for_an_audit_gets_that_one_although_the_run_goes_on(empty: Store) -> None:
    fill(empty, run_count=1, rollouts=40)
    app = create_app(empty)
    client = TestClient(app)
    app.state.audits = Audits()
    with app.state.audits._turn:  # another audit is under way
        document = page(client, "/runs/r-0000/audit")
        (waiting,) = [a["data-working"] for _, a in document.elements if "data-working" in a]
        empty.add_feedback("t-0000001", kind="thumb", value=1.0, author="ana")
        page(client, f"/runs/r-0000/audit{waiting}")
    finished_audit(client, f"/runs/r-0000/audit{waiting}")
    assert len(app.state.audits._jobs) == 1


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


# -- how a run stands ----------------------------------------------------------------------------------


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


# -- safety --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open("hostile", tmp_path_factory.mktemp("hostile")) as opened:
        fill(opened, run_count=6, rollouts=96, scenario_count=6, hostile=True)
        opened.log_metrics("r-0000", 1, {"<img src=x onerror=alert(1)>": 1.0, "'\"><b>": 2.0})
        yield opened


PAGES_OF_HOSTILE = (
    "/",
    *(f"/runs/r-{n:04}" for n in range(6)),
    "/compare?run=r-0000&run=r-0001&run=r-0002",
    "/runs/r-0000/audit",
    "/trajectories",
    "/groups",
    "/runs/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
    "/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
)


@pytest.mark.parametrize("path", PAGES_OF_HOSTILE)
def test_what_a_run_recorded_is_text_on_every_page_whatever_it_says(hostile: Store, path: str) -> None:
    client = TestClient(create_app(hostile))
    answer = client.get(path)
    if path.endswith("/audit"):
        finished_audit(client, path)
        answer = client.get(path)
    document = Document(answer.text)
    assert len(answer.text) < 400_000  # although there are lines of a million characters
    assert not {"img", "iframe", "object", "b"} & {tag for tag, _ in document.elements}
    for script in document.all("script"):
        assert script.get("src", "").startswith(("/static/", "/vendor/")), script
    for tag, attributes in document.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert not value.lower().startswith("javascript:"), (tag, name)
    assert not any(c in answer.text for c in "\u202a\u202b\u202d\u202e\u2066\u2067\x1b\x07\x00")


@pytest.mark.parametrize(
    "path", ["/", "/runs/r-0000", "/compare?run=r-0000", "/runs/r-0000/audit", "/nowhere"]
)
def test_pages_load_nothing_from_elsewhere(client: TestClient, path: str) -> None:
    document = Document(client.get(path).text)
    for tag, attributes in document.elements:
        for name in ("src", "href", "action", "poster", "data"):
            if value := attributes.get(name):
                assert urlsplit(value).netloc == "", (tag, value)
                assert urlsplit(value).scheme == "", (tag, value)


@pytest.mark.parametrize("path", ["/", "/runs/r-0000", "/nowhere", "/static/page.css", "/runs/r-0000/series"])
def test_every_answer_forbids_inline_scripts_and_those_of_others(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["script-src"] == "'self'"
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"


def test_a_name_that_is_not_this_machine_is_refused_against_dns_rebinding(store: Store) -> None:
    app = create_app(store, hosts=("127.0.0.1", "localhost"))
    assert TestClient(app, base_url="http://127.0.0.1").get("/").status_code == 200
    refused = TestClient(app, base_url="http://evil.example").get("/")
    assert refused.status_code == 400
    assert "agent" not in refused.text


def test_files_whose_address_names_their_version_are_kept_and_pages_are_asked_for_again(
    client: TestClient,
) -> None:
    script = client.get(plotly_url())
    assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert len(script.content) > 1_000_000
    style = page(client, "/").all("link")[1]["href"]
    assert "immutable" in client.get(style).headers["cache-control"]
    assert client.get("/").headers["cache-control"] == "no-cache"
    again = client.get("/static/charts.js")
    assert (
        client.get("/static/charts.js", headers={"if-none-match": again.headers["etag"]}).status_code == 304
    )


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


# -- knobs ---------------------------------------------------------------------------------------------


class Control:
    """A dashboard that may turn the knobs of one run."""

    def __init__(self, store: Store, directory: Path) -> None:
        self.directory = directory
        model = TrainableModelConfig(base_model="any", train=TrainConfig(learning_rate=2e-5))
        self.config = model.train_config
        # As a registration writes it.
        self.run = store.begin_run("agent", {**model.model_dump(mode="json"), "checkpoints": str(directory)})
        self.client = TestClient(create_app(store, control=True))
        document = page(self.client, f"/runs/{self.run}")
        self.token = next(a["data-token"] for _, a in document.elements if "data-token" in a)

    def turn(self, body: str, token: str | None = None) -> tuple[int, dict[str, Any]]:
        headers = {"x-art-control": self.token if token is None else token}
        answer = self.client.post(f"/runs/{self.run}/knobs", content=body, headers=headers)
        return answer.status_code, answer.json()

    @property
    def file(self) -> Path:
        return self.directory / "knobs.json"


@pytest.fixture
def control(empty: Store, tmp_path: Path) -> Control:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    return Control(empty, directory)


def test_a_knob_that_is_turned_on_the_page_is_what_the_run_reads(control: Control) -> None:
    run = KnobBoard(control.directory, control.config)  # as the run has it
    assert control.turn('{"learning_rate": 3e-5, "temperature": 0.5}')[0] == 200
    assert [(t.name, t.before, t.after) for t in run.read()] == [
        ("learning_rate", None, 3e-5),
        ("temperature", None, 0.5),
    ]
    assert control.turn('{"temperature": null}') == (200, {"knobs": {"learning_rate": 3e-5}})
    assert run.read()[0].after is None
    assert run.config.learning_rate == 3e-5
    fields = page(control.client, f"/runs/{control.run}").all("input")
    shown = next(a for a in fields if a.get("name") == "learning_rate")
    assert (shown["value"], shown["placeholder"]) == ("3e-05", "2e-05")


def test_weights_of_the_rewards_components_are_knobs_where_they_can_be_turned(
    empty: Store, control: Control
) -> None:
    told = {"reward": 0.9, "components": {"right, or <b>not</b>": 1.0, "steps": 10.0, "steps/late": 1.0}}
    recorded = {"weight/right, or <b>not</b>": 1.0, "weight/steps": -0.01, "moves": 3.0}
    rows = [
        a_trajectory("sum", metrics=recorded, **told),
        a_trajectory("by hand", metrics={"weight/polite": 1.0}, reward=0.5, components={"polite": 1.0}),
        a_trajectory("elsewhere", metrics={"weight/other": 1.0}, reward=1.0, components={"other": 1.0}),
    ]
    for row, run in zip(rows, (control.run, control.run, empty.begin_run("other")), strict=True):
        empty.save_trajectory(row, run_id=run)
    fields = page(control.client, f"/runs/{control.run}").all("input")
    weights = {a["name"]: a["placeholder"] for a in fields if a.get("name", "").startswith("reward_weights/")}
    assert weights == {"reward_weights/right, or <b>not</b>": "1", "reward_weights/steps": "-0.01"}
    status, said = control.turn('{"reward_weights": {"steps": "few", "right, or <b>not</b>": 2}}')
    assert (status, list(said["errors"])) == (422, ["reward_weights/steps"])
    assert not control.file.exists()
    assert control.turn('{"reward_weights": {"steps": -0.05}}') == (
        200,
        {"knobs": {"reward_weights/steps": -0.05}},
    )
    assert control.turn('{"reward_weights": {"gone": 1}}')[0] == 200
    run = KnobBoard(control.directory, control.config)
    assert {t.name: t.after for t in run.read()} == {
        "reward_weights/steps": -0.05,
        "reward_weights/gone": 1.0,
    }
    fields = page(control.client, f"/runs/{control.run}").all("input")
    shown = {a["name"]: a["value"] for a in fields if a.get("name", "").startswith("reward_weights/")}
    assert shown == {
        "reward_weights/right, or <b>not</b>": "",
        "reward_weights/steps": "-0.05",
        "reward_weights/gone": "1",
    }
    assert control.turn('{"reward_weights": {"gone": null}}')[0] == 200
    assert run.read()[0].after is None


def test_a_run_that_goes_on_from_another_has_fields_for_what_that_one_was_scored_with(
    empty: Store, control: Control
) -> None:
    scored = a_trajectory("t", reward=-0.5, components={"steps": 5.0}, metrics={"weight/steps": -0.1})
    empty.save_trajectory(scored, run_id=control.run)
    after = empty.begin_run("agent", {"checkpoints": str(control.directory)}, continues=control.run)
    fields = page(control.client, f"/runs/{after}").all("input")
    assert [a["placeholder"] for a in fields if a.get("name") == "reward_weights/steps"] == ["-0.1"]


def test_a_weight_that_was_turned_is_shown_with_what_it_was_scored_with(empty: Store) -> None:
    run = empty.begin_run("agent", {"checkpoints": "/not/on/this/machine"})
    scored = a_trajectory("t", reward=-0.5, components={"steps": 5.0}, metrics={"weight/steps": -0.1})
    empty.save_trajectory(scored, run_id=run)
    for before, after in ((None, -0.25), (-0.25, None), (None, -0.75)):
        data = {"name": "reward_weights/steps", "before": before, "after": after}
        empty.add_event(run, "knob_turned", "reward_weights/steps turned", data)
    text = page(TestClient(create_app(empty)), f"/runs/{run}").text
    assert "reward_weights/steps -0.1 -0.75" in text
    assert "reward_weights/steps -0.25 → as scored" in text


def test_every_turn_of_a_knob_is_on_its_page(empty: Store, control: Control) -> None:
    for before, after in ((None, 3e-5), (3e-5, None)):
        data = {"name": "learning_rate", "before": before, "after": after}
        empty.add_event(control.run, "knob_turned", "learning_rate turned", data)
    text = page(control.client, f"/runs/{control.run}").text
    assert "learning_rate 3e-05 → as configured" in text
    assert "learning_rate as configured → 3e-05" in text


def test_a_run_with_more_events_than_anybody_reads_shows_the_newest_and_counts_all(empty: Store) -> None:
    run = empty.begin_run("agent")
    for n in range(510):
        empty.add_event(run, "noted", f"event {n}")
    document = page(TestClient(create_app(empty)), f"/runs/{run}")
    assert "Events 510" in document.text
    assert "event 509" in document.text
    assert "event 9 " not in document.text
    assert sum(word == "noted" for word in document.words) == 500


def test_a_knob_that_does_not_go_there_is_refused_beside_it_and_nothing_is_turned(control: Control) -> None:
    status, said = control.turn('{"learning_rate": -1, "temperature": 0.5}')
    assert status == 422
    assert list(said["errors"]) == ["learning_rate"]
    assert "greater than 0" in said["errors"]["learning_rate"]
    status, said = control.turn('{"kl_target": 0.1}')
    assert (status, list(said["errors"])) == (422, [""])
    assert "give kl_coef > 0" in said["errors"][""]
    assert "no such setting" in control.turn('{"speed": 1}')[1]["errors"]["speed"]
    for body in ("[1]", "{", "", "{}"):
        assert control.turn(body)[0] == 422
    assert control.turn('{"learning_rate": 1' + " " * 20_000 + "}")[0] == 413
    assert not control.file.exists()


def test_only_the_servers_own_pages_turn_knobs(control: Control) -> None:
    """A form or a script of another site can send neither the header nor the token."""
    for token in ("", "guess", "é"):
        headers = {"x-art-control": token.encode()}
        answer = control.client.post(
            f"/runs/{control.run}/knobs", content='{"temperature": 1}', headers=headers
        )
        assert answer.status_code == 403
    assert not control.file.exists()


def test_a_read_only_dashboard_turns_nothing_and_tells_no_token(empty: Store, control: Control) -> None:
    client = TestClient(create_app(empty))
    assert not any("data-token" in a for _, a in page(client, f"/runs/{control.run}").elements)
    answer = client.post(
        f"/runs/{control.run}/knobs", content='{"temperature": 1}', headers={"x-art-control": control.token}
    )
    assert answer.status_code == 403
    assert "--control" in answer.json()["errors"][""]
    assert not control.file.exists()


def test_a_file_of_knobs_that_cannot_be_used_is_not_written_over(control: Control) -> None:
    control.file.write_text("{broken")
    status, said = control.turn('{"temperature": 1}')
    assert status == 422
    assert "mend or remove" in said["errors"][""]
    assert control.file.read_text() == "{broken"
    assert "mend or remove" in page(control.client, f"/runs/{control.run}").text


def test_knobs_of_a_run_on_another_machine_are_shown_as_recorded(empty: Store) -> None:
    run = empty.begin_run("agent", {"checkpoints": "/not/on/this/machine"})
    data = {"name": "temperature", "before": None, "after": 0.25}
    empty.add_event(run, "knob_turned", "temperature turned", data)
    document = page(TestClient(create_app(empty, control=True)), f"/runs/{run}")
    assert "is not on this machine" in document.text
    assert "0.25" in document.text

"""The dashboard as its users start it: a process of its own, followed while a run goes on."""

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.dashboard_server import Server
from helpers.trajectories import a_trajectory
from starlette.testclient import TestClient

from art_core.errors import ConfigError
from art_core.observe.dashboard.app import create_app
from art_core.observe.dashboard.series import (
    Position,
    Series,
    changes_since,
    read_series,
    sampled_series,
)
from art_core.observe.dashboard.serve import is_loopback, listen, run
from art_core.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("live", tmp_path) as opened:
        yield opened


@pytest.fixture
def server(store: Store, tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    if made.process.poll() is None:
        made.kill()


class Follower:
    """A page that follows a run, as a browser does: it says the id of its last message when it comes back."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.last_id = ""
        self.metrics: dict[tuple[str, int], Any] = {}
        self.received = 0
        self.events: list[str] = []
        self.state: dict[str, Any] = {}

    @contextmanager
    def connected(self, server: Server) -> Iterator[Iterator[str]]:
        """A stream of the names of its messages."""
        headers = {"last-event-id": self.last_id} if self.last_id else {}
        with httpx.stream(
            "GET", f"{server.url}/runs/{self.run_id}/live", headers=headers, timeout=120
        ) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield self._messages(answer.iter_lines())

    def _messages(self, lines: Iterator[str]) -> Iterator[str]:
        message: dict[str, str] = {}
        for line in lines:
            if line:
                name, _, value = line.partition(":")
                message[name] = value.removeprefix(" ")
                continue
            if "data" in message:
                self._take(message)
                yield message["event"]
            message = {}

    def _take(self, message: dict[str, str]) -> None:
        if message["event"] != "change":
            return
        self.last_id = message["id"]
        data = json.loads(message["data"])
        for name, step, value, _ in data["metrics"]:
            self.metrics[name, step] = value
            self.received += 1
        self.events += [event["message"] for event in data["events"]]
        self.state = data["run"]


def test_what_a_run_writes_reaches_its_page_within_two_seconds(store: Store, server: Server) -> None:
    run_id = store.begin_run("agent")
    follower = Follower(run_id)
    with follower.connected(server) as messages:
        next(messages)
        assert follower.state["word"] == "running"
        lags: list[float] = []
        for step in range(1, 6):
            written = time.monotonic()
            store.log_metrics(run_id, step, {"reward_mean": step / 10, "loss": float("nan")})
            store.add_event(run_id, "update_skipped", f"update {step} skipped\u202e")
            while len(follower.events) < step or ("loss", step) not in follower.metrics:
                next(messages)
            lags.append(time.monotonic() - written)
        assert statistics.median(lags) < 2
        assert follower.metrics["reward_mean", 3] == 0.3
        assert follower.metrics["loss", 3] is None
        assert "\u202e" not in follower.events[0]
        store.end_run(run_id)
        next(messages)
        assert follower.state["word"] == "finished"
        assert not follower.state["going"]


def test_a_page_that_comes_back_is_told_all_that_it_missed_once_also_by_another_server(
    store: Store, server: Server, tmp_path: Path
) -> None:
    run_id = store.begin_run("agent")
    other_run = store.begin_run("other")
    follower = Follower(run_id)
    store.log_metrics(run_id, 1, {"reward_mean": 0.1})
    with follower.connected(server) as messages:
        next(messages)
    store.log_metrics(run_id, 2, {"reward_mean": 0.2})
    store.log_metrics(other_run, 2, {"reward_mean": 9.0})
    server.kill()
    store.log_metrics(run_id, 3, {"reward_mean": 0.3})
    store.add_event(run_id, "engine_restarted", "it died")
    second = Server(tmp_path, server.port)
    try:
        with follower.connected(second) as messages:
            next(messages)
    finally:
        second.kill()
    assert follower.metrics == {("reward_mean", 1): 0.1, ("reward_mean", 2): 0.2, ("reward_mean", 3): 0.3}
    assert follower.received == 3
    assert follower.events == ["it died"]


def test_a_step_that_is_logged_again_makes_the_page_begin_again(store: Store, server: Server) -> None:
    """The rows of the step before may get the very numbers that the page has seen."""
    run_id = store.begin_run("agent")
    store.log_metrics(run_id, 1, {"reward_mean": 0.1, "loss": 1.0})
    follower = Follower(run_id)
    with follower.connected(server) as messages:
        next(messages)
        store.log_metrics(run_id, 1, {"reward_mean": 0.9, "loss": 2.0})
        assert next(messages) == "again"


def test_ctrl_c_ends_the_server_although_pages_are_open(store: Store, server: Server) -> None:
    run_id = store.begin_run("agent")
    with Follower(run_id).connected(server) as messages:
        next(messages)
        began = time.monotonic()
        assert server.interrupt() == 0
        assert time.monotonic() - began < 60, "it waited for the page to leave"
    assert server.process.stdout is not None
    assert "Traceback" not in server.process.stdout.read()


def test_head_leaves_no_byte_of_a_body_on_the_connection(store: Store, server: Server) -> None:
    run_id = store.begin_run("agent")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for path in ("/", f"/runs/{run_id}", f"/runs/{run_id}/live", "/static/page.css"):
        connection.request("HEAD", path)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
        connection.request("GET", "/")  # a stray byte would be taken for the beginning of this answer
        assert connection.getresponse().read().startswith(b"<!doctype html>")
    connection.close()


def test_it_says_where_it_is_and_that_it_is_read_only(server: Server, store: Store) -> None:
    assert store.location in server.said
    assert "read-only" in server.said
    assert httpx.get(server.url).status_code == 200
    assert httpx.get(server.url, headers={"host": "evil.example"}).status_code == 400


def test_it_may_be_started_before_anything_is_recorded_and_tells_a_program_its_address(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "art_core.cli", "dashboard", "--port", "0", "--json"]
    environment = {**os.environ, "ART_ROOT": str(tmp_path / "later"), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as started:
        killer = threading.Timer(120, started.kill)
        killer.start()
        try:
            assert started.stdout is not None
            assert "waiting for a run to begin there" in started.stdout.readline()
            with Store.open("p", tmp_path / "later") as store:
                run_id = store.begin_run("agent")
                told = json.loads(started.stdout.readline())
                assert (told["project"], told["control"]) == ("p", False)
                assert run_id in httpx.get(told["url"]).text
        finally:
            killer.cancel()
            started.kill()


def test_other_machines_are_let_in_only_when_that_was_asked_for(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"without a login.*--public"):
        run(store, "0.0.0.0")
    with pytest.raises(ConfigError, match="without a login"):
        run(store, "build-server")
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert is_loopback("::1")


def test_a_port_that_is_taken_is_an_error_that_says_so(store: Store) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*or 0 for a free one"):
            run(store, port=port)
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))  # it was let go of


def test_changes_since_a_position_are_those_of_the_run_alone(store: Store) -> None:
    run_id, other = store.begin_run("agent"), store.begin_run("other")
    store.log_metrics(other, 1, {"a": 1.0})
    assert not changes_since(store, run_id, Position()).metrics
    store.log_metrics(run_id, 1, {"a": 2.0})
    found = changes_since(store, run_id, Position())
    assert [metric.value for metric in found.metrics] == [2.0]
    assert not changes_since(store, run_id, found.position).metrics
    assert Position.parse(str(found.position)) == found.position


def test_a_long_series_is_thinned_without_losing_its_extremes_and_ends() -> None:
    values: list[float | None] = [0.5] * 10_000
    values[1234], values[7777], values[5000] = 9.0, -9.0, None
    whole = Series("a", list(range(10_000)), values, [float(n) for n in range(10_000)])
    thin = whole.thinned(500)
    assert len(thin.steps) <= 500
    assert {9.0, -9.0} <= set(thin.values)
    assert (thin.steps[0], thin.steps[-1]) == (0, 9_999)
    assert list(thin.steps) == sorted(set(thin.steps))
    assert all(whole.values[step] == value for step, value in zip(thin.steps, thin.values, strict=True))


def test_a_sample_of_a_long_run_has_its_last_steps_and_is_short(store: Store) -> None:
    run_id = store.begin_run("agent")
    for step in range(1, 1001):
        store.log_metrics(run_id, step, {"a": float(step), "b": 0.0})
    with store.read() as connection:
        found = sampled_series(connection, [run_id], ["a", "nothing"], 1000, lately=5)
        whole = read_series(connection, [run_id], ["a", "b"])
    assert list(found) == ["a"]
    assert list(found["a"].steps[-5:]) == [996, 997, 998, 999, 1000]
    assert len(found["a"].steps) < 210
    assert found["a"].values == [float(step) for step in found["a"].steps]
    assert len(whole["a"].steps) == 1000


def test_a_rollout_that_has_ended_is_told_so_once_and_not_followed(store: Store) -> None:
    store.save_trajectory(a_trajectory("over/there", steps=2))
    client = TestClient(create_app(store))
    followed = client.get("/trajectories/over%2Fthere/live?after=running~1")
    assert followed.headers["content-type"].startswith("text/event-stream")
    assert followed.text.count("event: change") == 1
    assert '{"status": "finished", "calls": 2}' in followed.text
    assert client.get("/trajectories/nothing/live").status_code == 404
    assert "data-live" not in client.get("/trajectories/over%2Fthere").text

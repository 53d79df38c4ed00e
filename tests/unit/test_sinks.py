"""Sinks: each step once and in order, whatever a sink does; training never waits and never fails."""

import json
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from art_core import LocalBackend
from art_core.errors import ConfigError, SinkError, StoreError
from art_core.observe.sinks import (
    SINKS,
    Delivery,
    JSONLSink,
    MetricSink,
    MLflowSink,
    PrometheusSink,
    SinkRun,
    WandbSink,
    as_sinks,
    export_metrics,
)
from art_core.store import RunState, Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("games", tmp_path) as store:
        yield store


class Memory:
    """A user's own sink, which can be told to fail or to hang."""

    name = "memory"

    def __init__(self) -> None:
        self.runs: list[SinkRun] = []
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.closed: list[RunState | None] = []
        self.last_step = 0
        self.broken = False
        self.free = threading.Event()
        self.free.set()
        self.entered = threading.Event()

    def open(self, run: SinkRun) -> "Memory":
        self.runs.append(run)
        return self

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self.entered.set()
        self.free.wait(30)
        if self.broken:
            raise ConnectionError("no route to the tracker")
        self.steps.append((step, dict(values)))

    def close(self, state: RunState | None) -> None:
        self.closed.append(state)


def logged(store: Store, *steps: int, run: str | None = None) -> str:
    run = run or store.begin_run("agent", {"seed": 1})
    for step in steps:
        store.log_metrics(run, step, {"reward_mean": step / 10, "loss": float(step)})
    return run


def numbers(sink: Memory) -> list[int]:
    return [step for step, _ in sink.steps]


def kinds(store: Store, run: str) -> list[str]:
    return [event.kind for event in store.events(run)]


def test_a_sink_gets_what_was_logged_before_and_after_it_was_attached(store: Store, tmp_path: Path) -> None:
    run, sink = logged(store, 1, 2), Memory()
    delivery = Delivery(store, run, [sink], tmp_path)
    for step in (3, 4):
        logged(store, step, run=run)
        delivery.notify()
    assert delivery.close(RunState.FINISHED) == []
    assert sink.steps == [(n, {"reward_mean": n / 10, "loss": float(n)}) for n in (1, 2, 3, 4)]
    assert sink.closed == [RunState.FINISHED]
    (opened,) = sink.runs
    assert (opened.id, opened.project, opened.model, opened.config) == (run, "games", "agent", {"seed": 1})
    assert kinds(store, run) == []


def test_a_run_that_continues_others_is_one_run_to_a_sink(store: Store, tmp_path: Path) -> None:
    first = logged(store, 1, 2)
    second = store.begin_run("agent", continues=first)
    logged(store, 3, run=second)
    stranger = logged(store, 7)
    sink = Memory()
    sink.last_step = 1  # it has this one from before
    assert export_metrics(store, second, sink) == 2
    assert numbers(sink) == [2, 3]
    assert [run.id for run in sink.runs] == [first]
    assert store.lineage(stranger) == [stranger]


def test_a_sink_that_fails_is_told_once_gets_the_rest_later_and_stops_nobody(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, broken, sound = logged(store), Memory(), Memory()
    broken.broken = True
    with caplog.at_level(logging.WARNING):
        delivery = Delivery(store, run, [broken, sound], tmp_path)
        for step in (1, 2, 3):
            broken.entered.clear()
            logged(store, step, run=run)
            delivery.notify()
            assert broken.entered.wait(60)  # it is tried at every step
        broken.entered.clear()
        broken.broken = False
        logged(store, 4, run=run)
        delivery.notify()
        assert delivery.close(RunState.FINISHED) == []
    assert numbers(broken) == numbers(sound) == [1, 2, 3, 4]
    assert kinds(store, run) == ["metrics_sink_failed", "metrics_sink_works_again"]
    told = [record.message for record in caplog.records if "no route to the tracker" in record.message]
    assert len(told) == 1


def test_what_a_sink_never_took_is_told_with_the_way_out(store: Store, tmp_path: Path) -> None:
    run, sink = logged(store, 1, 2), Memory()
    sink.broken = True
    (missed,) = Delivery(store, run, [sink], tmp_path).close(RunState.FINISHED)
    assert (missed.sink, missed.steps) == ("memory", (1, 2))
    assert "no route to the tracker" in missed.reason
    undelivered = store.events(run, "metrics_undelivered")[0]
    assert undelivered.data["steps"] == [1, 2]
    assert "export_metrics(store" in undelivered.message
    sink.broken = False
    assert export_metrics(store, run, sink) == 2
    assert numbers(sink) == [1, 2]


def test_a_slow_sink_holds_nobody_up_and_loses_nothing_that_is_not_told(store: Store, tmp_path: Path) -> None:
    run, slow, sound = logged(store), Memory(), Memory()
    slow.free.clear()
    delivery = Delivery(store, run, [slow, sound], tmp_path)
    for step in range(1, 6):
        logged(store, step, run=run)
        delivery.notify()  # returns at once, although the first step is still being written
    assert slow.entered.wait(60)
    until = time.monotonic() + 60
    while numbers(sound) != [1, 2, 3, 4, 5]:  # the deadline below is the slow one's
        assert time.monotonic() < until, numbers(sound)
        time.sleep(0.01)
    (missed,) = delivery.close(RunState.FINISHED, timeout=0.2)
    assert missed.steps == (1, 2, 3, 4, 5)
    assert "within 0.2 seconds" in missed.reason
    assert numbers(sound) == [1, 2, 3, 4, 5]
    slow.free.set()


def test_a_step_that_is_logged_again_is_delivered_again(store: Store, tmp_path: Path) -> None:
    run, sink = logged(store, 1), Memory()
    delivery = Delivery(store, run, [sink], tmp_path)
    assert sink.entered.wait(60)
    store.log_metrics(run, 1, {"eval": 0.5})
    delivery.notify()
    delivery.close(None)
    assert sink.steps == [(1, {"reward_mean": 0.1, "loss": 1.0}), (1, {"eval": 0.5})]


def test_an_export_of_no_run_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no run r-9"):
        export_metrics(store, "r-9", Memory())


def test_lines_of_json_go_on_after_a_crash(store: Store, tmp_path: Path) -> None:
    run = store.begin_run("agent")
    store.log_metrics(run, 1, {"reward_mean": 0.5, "kl_old_new": math.nan})
    assert export_metrics(store, run, JSONLSink(tmp_path)) == 1
    path = tmp_path / f"{run}.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "ti')  # the process died here
    logged(store, 2, run=run)
    assert export_metrics(store, run, JSONLSink(tmp_path)) == 1
    assert export_metrics(store, run, JSONLSink(tmp_path)) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["metrics"] == {"reward_mean": 0.5, "kl_old_new": None}
    assert rows[0]["time"] == pytest.approx(store.metrics(run)[0].created_at)


def series(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_sees_the_newest_step_with_nodes_as_labels(store: Store, tmp_path: Path) -> None:
    run = store.begin_run("agent")
    store.log_metrics(run, 1, {"reward_mean": 0.25})
    store.log_metrics(run, 2, {"reward_mean": 0.5, "node/a/b/calls": 3.0, "node/c/calls": 1.0, "mine": 7.0})
    sink = PrometheusSink(0)
    delivery = Delivery(store, run, [sink], tmp_path)
    until, url, seen = time.monotonic() + 120, None, {}
    while ("art_step", "agent", "games") not in seen:
        assert time.monotonic() < until
        time.sleep(0.02)
        url = sink.url
        seen = {} if url is None else series(httpx.get(url).text)
    assert url is not None
    assert seen["art_step", "agent", "games"] == 2
    assert seen["art_reward_mean", "agent", "games"] == 0.5
    assert seen["art_node_calls", "agent", "a/b", "games"] == 3
    assert seen["art_node_calls", "agent", "c", "games"] == 1
    assert seen["art_other", "agent", "mine", "games"] == 7
    assert delivery.close(RunState.FINISHED) == []
    assert sink.url is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_sinks_are_named_or_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str | MetricSink] = ["jsonl", JSONLSink(tmp_path)]
    assert [sink.name for sink in as_sinks(given)] == ["jsonl", "jsonl"]
    with pytest.raises(ConfigError, match=f"no sink 'tensorbord'; there are {', '.join(SINKS)}"):
        LocalBackend(sinks=["tensorbord"])
    with pytest.raises(ConfigError, match=r"give a list, as in sinks=\['jsonl'\]"):
        LocalBackend(sinks="jsonl")
    nothing: Any = 7
    with pytest.raises(ConfigError, match="'jsonl' is named twice"):
        as_sinks(["jsonl", "jsonl"])
    with pytest.raises(ConfigError, match=r"mode='offlien'\): expected 'online' or 'offline'"):
        WandbSink(mode="offlien")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="7 is no sink"):
        LocalBackend(sinks=[nothing])
    monkeypatch.setattr("art_core.observe.sinks.base.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'art-langgraph\[wandb\]'"):
        LocalBackend(sinks=["wandb"])


def test_a_tracking_server_that_is_down_is_told_of_at_once_and_stops_nobody(
    store: Store, tmp_path: Path
) -> None:
    with socket.socket() as taken:  # nobody listens there
        taken.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        run, sound = logged(store, 1), Memory()
        delivery = Delivery(store, run, [MLflowSink(uri), sound], tmp_path)
        (missed,) = delivery.close(RunState.FINISHED)
        with pytest.raises(SinkError, match=f"MLflow server at {uri} does not answer .*refused"):
            export_metrics(store, run, MLflowSink(uri))
    assert (missed.sink, missed.steps) == ("mlflow", (1,))
    assert numbers(sound) == [1]
    assert kinds(store, run) == ["metrics_sink_failed", "metrics_undelivered"]
    assert "give MLflowSink(tracking_uri=...) another one" in missed.reason


def test_a_tracking_server_that_hangs_is_not_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art_core.observe.sinks.mlflow._ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # takes connections and says nothing
        sink = MLflowSink(f"http://127.0.0.1:{hangs.getsockname()[1]}")
        with pytest.raises(SinkError, match="timed out"):
            export_metrics(store, logged(store, 1), sink)
        assert only_question(hangs).startswith("GET /health ")


def only_question(server: socket.socket) -> str:
    """What was asked on the first connection; there is no second one."""
    connection, _ = server.accept()
    with connection:
        asked = connection.recv(1000).decode()
    server.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        server.accept()
    return asked


@pytest.mark.parametrize("status", [502, 503])
def test_a_proxy_without_a_tracking_server_behind_it_is_no_tracking_server(store: Store, status: int) -> None:
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(status)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            with pytest.raises(SinkError, match=f"status {status}"):
                export_metrics(
                    store, logged(store, 1), MLflowSink(f"http://127.0.0.1:{proxy.server_port}/ml/")
                )
        finally:
            proxy.shutdown()
            thread.join()
    assert asked == ["/ml/health"]

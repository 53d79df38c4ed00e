"""A run watched live from another process."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.synthetic_store import HOSTILE, fill
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from art_core.cli.app import app
from art_core.cli.exits import ExitCode
from art_core.cli.watch import picture
from art_core.errors import UnknownRunError
from art_core.observe.run_view import view_run
from art_core.store import Store
from art_core.store.following import Place, news
from art_core.store.records import RunState


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path) as store:
        yield store


@contextmanager
def watching(root: Path, *options: str, stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A watch in a process of its own, and its lines."""
    command = [sys.executable, "-m", "art_core.cli", "watch", "--every", "0.1", *options]
    environment = {**os.environ, "ART_ROOT": str(root)}
    # A shell's background jobs ignore Ctrl-C, and so does what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    with process as started:
        killer = threading.Timer(60, started.kill)
        killer.start()
        try:
            yield started
        finally:
            killer.cancel()
            started.kill()


def documents(started: subprocess.Popen[str]) -> Iterator[Any]:
    assert started.stdout is not None
    for line in started.stdout:
        yield json.loads(line)


def test_a_run_is_followed_from_its_beginning_to_its_end(store: Store, tmp_path: Path) -> None:
    run = store.begin_run("agent", {})
    store.log_metrics(run, 1, {"reward_mean": 0.25})
    with watching(tmp_path, "--json") as started:
        said = documents(started)
        first = next(said)
        assert (first["type"], first["run"]["id"], first["run"]["state"]) == ("run", run, "running")
        told = next(said)
        assert (told["type"], told["step"], told["values"]) == ("metrics", 1, {"reward_mean": 0.25})
        store.log_metrics(run, 2, {"reward_mean": 0.5, "entropy": float("nan")})
        told = next(said)
        assert (told["step"], told["values"]) == (2, {"reward_mean": 0.5, "entropy": None})
        store.add_event(run, "update_skipped", "KL was 2.0", {"value": 2.0})
        told = next(said)
        assert (told["type"], told["kind"], told["data"]) == ("event", "update_skipped", {"value": 2.0})
        store.end_run(run)
        assert next(said)["run"]["state"] == "finished"
        assert next(said, None) is None
        assert started.wait(timeout=120) == ExitCode.OK


def test_a_run_that_fails_ends_the_watch_with_1(store: Store, tmp_path: Path) -> None:
    run = store.begin_run("agent", {})
    with watching(tmp_path, "--json") as started:
        said = documents(started)
        next(said)
        store.end_run(run, RunState.FAILED)
        assert [d["run"]["state"] for d in said] == ["failed"]
        assert started.wait(timeout=120) == ExitCode.FINDING


def test_a_run_whose_process_died_is_followed_into_the_run_that_goes_on_from_it(
    store: Store, tmp_path: Path
) -> None:
    died = store.begin_run("agent", {})
    store.begin_run("another", {})
    with watching(tmp_path, died, "--json") as started:
        said = documents(started)
        assert next(said)["run"]["id"] == died
        resumed = store.begin_run("agent", {}, continues=died)
        seen = [next(said), next(said)]
        assert [d["run"]["id"] for d in seen] == [died, resumed]
        restart = next(said)
        assert (restart["kind"], restart["data"]) == ("run_continued", {"continues": died})
        store.end_run(resumed)
        assert [d["run"]["state"] for d in said] == ["finished"]


def test_with_follow_the_next_run_is_waited_for(store: Store, tmp_path: Path) -> None:
    with watching(tmp_path, "--follow", "--json") as started:
        said = documents(started)
        run = store.begin_run("agent", {})
        assert next(said)["run"]["id"] == run
        store.end_run(run)
        assert next(said)["run"]["state"] == "finished"
        later = store.begin_run("agent", {})
        while (document := next(said))["run"]["id"] != later:
            assert document["run"]["id"] == run


def test_a_watch_that_follows_may_begin_before_anything_is_recorded(tmp_path: Path) -> None:
    with watching(tmp_path / "later", "--follow", "--json", stderr=subprocess.PIPE) as started:
        assert started.stderr is not None
        assert "waiting for a run to begin there" in started.stderr.readline()
        with Store.open("p", tmp_path / "later") as store:
            run = store.begin_run("agent", {})
            assert next(documents(started))["run"]["id"] == run


def test_a_pipe_gets_a_line_for_each_step_and_event_in_the_order_of_time(
    store: Store, tmp_path: Path
) -> None:
    run = store.begin_run("agent", {})
    for step in (1, 2):
        store.log_metrics(run, step, {"reward_mean": step / 4})
        store.add_event(run, "knob_turned", f"turn {step}")
    store.end_run(run)
    with watching(tmp_path) as started:
        assert started.stdout is not None
        lines = started.stdout.read().splitlines()
    assert [" ".join(line.split()[1:3]) for line in lines[1:]] == [
        "step 1",
        "knob_turned turn",
        "step 2",
        "knob_turned turn",
    ]
    assert "reward_mean 0.500" in lines[3]


def test_ctrl_c_ends_a_watch_quietly(store: Store, tmp_path: Path) -> None:
    store.begin_run("agent", {})
    with watching(tmp_path, "--json") as started:
        next(documents(started))
        started.send_signal(signal.SIGINT)
        assert started.wait(timeout=120) == ExitCode.INTERRUPTED


# -- what is new ---------------------------------------------------------------------------------------


def test_news_tells_everything_once_and_numbers_that_were_written_again_again(store: Store) -> None:
    run = store.begin_run("agent", {})
    assert news(store, run).place == Place()
    store.log_metrics(run, 1, {"a": 1.0, "b": 2.0})
    store.add_event(run, "x", "one")
    first = news(store, run)
    assert {(m.name, m.value) for m in first.metrics} == {("a", 1.0), ("b", 2.0)}
    assert [e.message for e in first.events] == ["one"]
    nothing = news(store, run, first.place)
    assert (nothing.metrics, nothing.events, nothing.place) == ((), (), first.place)
    store.log_metrics(run, 1, {"a": 3.0})
    again = news(store, run, first.place)
    assert [(m.name, m.value) for m in again.metrics] == [("a", 3.0)]
    with pytest.raises(UnknownRunError, match="has no run r-gone any more"):
        news(store, "r-gone")


# -- on a screen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (60, 20)])
@pytest.mark.parametrize("hostile", [False, True])
def test_the_picture_fits_the_screen(store: Store, width: int, height: int, hostile: bool) -> None:
    (run,) = fill(store, run_count=1, rollouts=16, train_steps=30, hostile=hostile)
    store.add_event(run, HOSTILE[3], HOSTILE[5])
    console = Console(width=width, height=height, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(picture(view_run(store, run), width, height))
    lines = captured.get().splitlines()
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert any("reward_mean" in line for line in lines)
    assert "\x1b" not in captured.get()


def test_a_run_whose_process_died_ends_the_watch_and_is_said_to_be_silent(
    store: Store, tmp_path: Path
) -> None:
    died = subprocess.Popen([sys.executable, "-c", ""])
    died.wait()
    run = store.begin_run("agent", {"process": {"host": socket.gethostname(), "pid": died.pid}})
    with watching(tmp_path) as started:
        assert started.stdout is not None
        said = started.stdout.read()
        assert started.wait(timeout=120) == ExitCode.FINDING
    assert "silent" in said
    assert "its process has gone" in said
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(picture(view_run(store, run), 100, 24))
    assert "its process has gone" in captured.get()
    assert "no training step yet" in captured.get()
    listed = CliRunner().invoke(app, ["runs"], env={"ART_ROOT": str(tmp_path), "COLUMNS": "80"})
    assert "silent" in listed.stdout


def test_a_terminal_gets_one_picture_that_is_redrawn_and_stays_at_the_end(
    store: Store, tmp_path: Path
) -> None:
    (run,) = fill(store, run_count=1, rollouts=8, train_steps=3, live=True)
    here, there = os.openpty()
    command = [sys.executable, "-m", "art_core.cli", "watch", "--every", "0.1"]
    environment = {
        **os.environ,
        "ART_ROOT": str(tmp_path),
        "TERM": "xterm-256color",
        "COLUMNS": "80",
        "LINES": "30",
    }
    with subprocess.Popen(command, stdout=there, env=environment) as started:
        os.close(there)
        drawn = b""
        while drawn.count(b"step 3") < 2:  # drawn, and drawn again
            drawn += os.read(here, 65536)
        store.log_metrics(run, 4, {"reward_mean": 0.75})
        store.end_run(run)
        with suppress(OSError):  # how a terminal's end is read
            while more := os.read(here, 65536):
                drawn += more
        assert started.wait(timeout=120) == ExitCode.OK
    os.close(here)
    last = drawn.decode().rpartition("agent-0")[2]
    assert "finished" in last
    assert "step 4" in last
    assert "0.750" in last

"""Servers that fail, refuse, are slow or ask to wait, and keys that are wrong."""

import email.utils
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fakes.langfuse_server import LangfuseServer
from helpers.langfuse_rollouts import connection, played
from helpers.trajectories import a_span, a_step, a_trajectory

from art_core.errors import ConfigError
from art_core.recording import Rollout
from art_core.store import Store
from art_langgraph.langfuse.client import LangfuseClient, LangfuseRefusedError
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.export import ExportOptions, export_to_langfuse
from art_langgraph.langfuse.ids import trace_id


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500, "times": 2},
        {"status": 503, "times": 1, "retry_after": "0"},
        {"status": 0, "times": 2},
        {"status": 500, "times": 1, "applied": True},
        {"status": 0, "times": 1, "applied": True},
    ],
    ids=["errors", "busy", "cut", "taken, but answered with an error", "taken, but cut"],
)
@pytest.mark.parametrize("path", ["/api/public/otel", "/api/public/scores"])
def test_what_fails_for_a_while_is_sent_again_and_is_there_once(
    server: LangfuseServer, store: Store, client: LangfuseClient, path: str, fault: dict[str, Any]
) -> None:
    """C60: a failing endpoint loses nothing."""
    store.save_trajectory(played())
    server.break_(path=path, **fault)
    result = export_to_langfuse(store, client=client)
    assert (result.confirmed, result.complete) == (1, True)
    assert (len(server.observations), len(server.scores)) == (8, 1)


def test_a_server_that_says_how_long_to_wait_is_waited_for(server: LangfuseServer, store: Store) -> None:
    store.save_trajectory(played())
    server.break_(path="/api/public/otel", status=429, retry_after="1", times=1)
    with LangfuseClient(connection(server, attempts=1)) as client:
        assert export_to_langfuse(store, client=client).confirmed == 1
    first, second = (a.at for a in server.requests("/api/public/otel"))
    assert second - first >= 1.0


def test_a_server_that_asks_for_more_patience_than_there_is_ends_the_export_at_once(
    server: LangfuseServer, store: Store
) -> None:
    store.save_trajectory(played())
    tomorrow = email.utils.format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)
    server.break_(path="/api/public/otel", status=429, retry_after=tomorrow, times=None)
    with LangfuseClient(connection(server, patience=240)) as client:
        began = time.monotonic()
        result = export_to_langfuse(store, client=client)
    assert (result.left, result.requests) == (1, 1)
    assert "answers 429" in (result.stopped or "")
    assert time.monotonic() - began < 120


def test_a_dead_server_leaves_what_was_confirmed_and_says_what_is_left(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    """C60: it says what was not delivered, and the next time sends just that."""
    for number in range(6):
        store.save_trajectory(a_trajectory(f"t-{number}"))
    server.break_(path="/api/public/otel", after=1, times=None, status=500)
    options = ExportOptions(batch=2)
    seen: list[tuple[int, int]] = []
    result = export_to_langfuse(
        store, client=client, options=options, progress=lambda done, total: seen.append((done, total))
    )
    assert (result.confirmed, result.left, result.complete) == (2, 4, False)
    assert "answers 500" in (result.stopped or "")
    assert "4 left" in str(result)
    assert seen == [(0, 6), (2, 6)]
    server.mend()
    rest = export_to_langfuse(store, client=client, options=options)
    assert (rest.confirmed, rest.unchanged, rest.left) == (4, 2, 0)
    assert server.trace_ids == {trace_id(f"t-{n}") for n in range(6)}


def test_one_refused_trajectory_does_not_keep_the_others(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    store.save_trajectory(a_trajectory("t-1"))
    bad = a_span(0, name="bad", parent_id=None)
    store.save_trajectory(a_trajectory("t-2", spans=(bad,)))
    store.save_trajectory(a_trajectory("t-3", components={"odd": 1.0}))
    server.refused_observations, server.refused_scores = {"bad"}, {"reward/odd"}
    result = export_to_langfuse(store, client=client)
    assert (result.confirmed, result.left, set(result.failed)) == (1, 0, {"t-2", "t-3"})
    assert "refused: bad" in result.failed["t-2"]
    assert "'reward/odd'" in result.failed["t-3"]
    server.refused_observations, server.refused_scores = set(), set()
    assert export_to_langfuse(store, client=client).confirmed == 2


def test_wrong_keys_are_an_error_at_once(server: LangfuseServer, store: Store) -> None:
    store.save_trajectory(a_trajectory("t-1"))
    wrong = connection(server).replace(secret_key="sk-wrong")
    with (
        LangfuseClient(wrong) as client,
        pytest.raises(LangfuseRefusedError, match="check the public") as told,
    ):
        export_to_langfuse(store, client=client)
    assert len(server.asked) == 1
    assert "sk-wrong" not in f"{told.value!r} {wrong!r}"


def test_no_keys_are_an_error_that_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LANGFUSE_PUBLIC_KEY", raising=False)
    with pytest.raises(ConfigError, match="LANGFUSE_PUBLIC_KEY"):
        LangfuseConnection.from_env({})
    found = LangfuseConnection.from_env(
        {"LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk", "LANGFUSE_HOST": "http://h:3000/"}
    )
    assert found.base_url == "http://h:3000"


def test_a_slow_server_does_not_slow_a_rollout(server: LangfuseServer, store: Store) -> None:
    """C60: it never blocks a rollout."""
    store.save_trajectory(a_trajectory("t-1"))
    answer = threading.Event()
    server.break_(path="/api/public/otel", until=answer, status=200, times=1)
    with LangfuseClient(connection(server)) as client:
        exporting = threading.Thread(target=lambda: export_to_langfuse(store, client=client))
        exporting.start()
        while not server.asked:
            time.sleep(0.005)
        rollout = Rollout(sink=store.sink())
        rollout.record(a_step(rollout.id))
        rollout.finish(1.0)
        assert exporting.is_alive(), "the rollout ended first"
        answer.set()
        exporting.join()
    assert server.trace_ids == {trace_id("t-1")}

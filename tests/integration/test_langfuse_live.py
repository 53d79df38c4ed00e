import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.langfuse_server import SECRET_KEY, LangfuseServer
from fakes.vllm_server import FakeVLLM
from helpers.trajectories import a_step, a_trajectory
from langfuse import Langfuse
from langfuse.langchain import CallbackHandler
from langgraph.graph import END, START, MessagesState, StateGraph
from opentelemetry.sdk.trace import TracerProvider

from art_core.errors import ConfigError, UnknownRunError
from art_core.inference.endpoint import StaticEndpoint
from art_core.recording import Rollout
from art_core.store import Store
from art_langgraph import ChatART, capture
from art_langgraph.langfuse.client import LangfuseClient
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.export import export_to_langfuse
from art_langgraph.langfuse.ids import trace_id
from art_langgraph.langfuse.live import LangfuseLive


@pytest.fixture
def server() -> Iterator[LangfuseServer]:
    with LangfuseServer(public_key=f"pk-{uuid.uuid4()}") as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path) as store:
        yield store


def connection(server: LangfuseServer, **changes: Any) -> LangfuseConnection:
    settings = {"requests_per_minute": 60_000, "timeout": 60, "attempts": 2, "patience": 5} | changes
    return LangfuseConnection(
        public_key=server.public_key,
        secret_key=SECRET_KEY,  # type: ignore[arg-type]
        base_url=server.base_url,
        **settings,
    )


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def test_a_rollout_is_there_moments_after_its_end_and_its_score_follows(
    server: LangfuseServer, store: Store
) -> None:
    with LangfuseLive(store, connection=connection(server), interval=0.05) as live:
        rollout = Rollout(sink=store.sink(), rollout_id="t-1")
        rollout.record(a_step("t-1"))
        until(lambda: live.state.running == 1)
        assert not server.observations
        rollout.finish()
        until(lambda: trace_id("t-1") in server.trace_ids)
        assert not server.scores
        store.score("t-1", 0.5, author="judge", explanation="so so")
        until(lambda: server.scores)
        store.add_feedback("t-1", kind="thumb", value=1, author="ada")
        until(lambda: len(server.scores) == 2)
    assert len(server.observations) == 4  # the rollout, two nodes, the call
    assert len(server.requests("/api/public/otel")) == 1
    assert (live.state.observations, live.state.scores) == (4, 2 + 1)  # the reward went again with the thumb
    assert live.state.seconds > 0
    assert (live.state.left, live.state.running, live.state.complete) == (0, 0, True)


def test_leaving_sends_what_is_left(server: LangfuseServer, store: Store) -> None:
    with LangfuseLive(store, connection=connection(server), interval=3600):
        for number in range(20):
            store.save_trajectory(a_trajectory(f"t-{number}"))
    assert len(server.trace_ids) == 20


def test_only_the_run_that_was_asked_for_is_sent(server: LangfuseServer, store: Store) -> None:
    mine, other = store.begin_run("agent"), store.begin_run("agent")
    with LangfuseLive(store, mine, connection=connection(server), interval=0.05):
        store.save_trajectory(a_trajectory("t-other"), run_id=other)
        store.save_trajectory(a_trajectory("t-mine"), run_id=mine)
        store.score("t-other", 1.0, author="ada")
    assert server.trace_ids == {trace_id("t-mine")}


def test_a_dead_server_costs_rollouts_nothing_and_a_later_export_sends_the_rest(
    server: LangfuseServer, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """C60: nothing is lost, no rollout is blocked, and what was not delivered is said."""
    server.break_(path="/api/public/otel", times=None, status=0)
    live = LangfuseLive(store, connection=connection(server), interval=0.05, grace=0.5)
    with live, caplog.at_level(logging.WARNING):
        took: list[float] = []
        for number in range(5):
            began = time.monotonic()
            rollout = Rollout(sink=store.sink(), rollout_id=f"t-{number}")
            rollout.record(a_step(rollout.id))
            rollout.finish(1.0)
            took.append(time.monotonic() - began)
        assert min(took) < 1
        until(lambda: live.state.stopped)
        asked = len(server.asked)
        until(lambda: len(server.asked) > asked + 2)
    assert (live.state.left, live.state.complete) == (5, False)
    assert "5 left" in caplog.text
    assert caplog.text.count("Langfuse is not kept up to date") == 1
    assert "art-langgraph langfuse export" in caplog.text
    server.mend()
    with LangfuseClient(connection(server)) as client:
        assert export_to_langfuse(store, client=client).confirmed == 5
    assert server.trace_ids == {trace_id(f"t-{n}") for n in range(5)}


def test_it_catches_up_by_itself_when_the_server_is_back(server: LangfuseServer, store: Store) -> None:
    server.break_(path="/api/public", times=4, status=503)
    with LangfuseLive(store, connection=connection(server, attempts=1), interval=0.05) as live:
        store.save_trajectory(a_trajectory("t-1"))
        until(lambda: live.state.stopped)
        until(lambda: live.state.confirmed == 1)
        until(lambda: live.state.stopped is None)


def test_what_is_refused_is_not_sent_again_and_again_but_when_it_changes(
    server: LangfuseServer, store: Store
) -> None:
    store.save_trajectory(a_trajectory("t-1", components={"odd": 1.0}))
    server.refused_scores = {"reward/odd"}
    with LangfuseLive(store, connection=connection(server), interval=0.02) as live:
        until(lambda: live.state.failed)
        asked = len(server.asked)
        store.save_trajectory(a_trajectory("t-2"))
        until(lambda: live.state.confirmed == 1)
        assert len(server.asked) == asked + 2  # the other one's observations and scores
        server.refused_scores = set()
        store.score("t-1", 1.0, author="ada")
        until(lambda: live.state.confirmed == 2)
        assert not live.state.failed


def test_wrong_keys_are_said_once_and_stop_nothing(
    server: LangfuseServer, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.save_trajectory(a_trajectory("t-1"))
    wrong = connection(server).replace(secret_key="sk-wrong")
    with LangfuseLive(store, connection=wrong, interval=0.02, grace=0.1) as live:
        until(lambda: live.state.stopped)
        until(lambda: len(server.asked) > 3)
    assert caplog.text.count("Langfuse is not kept up to date") == 1
    assert "sk-wrong" not in caplog.text


def test_chat_art_and_langfuses_own_handler_work_side_by_side_in_one_graph(
    server: LangfuseServer, store: Store
) -> None:
    """Both see every call: one keeps exact tokens, the other its own trace."""
    sdk = Langfuse(
        public_key=server.public_key,
        secret_key=SECRET_KEY,
        base_url=server.base_url,
        tracer_provider=TracerProvider(),
    )
    handler = CallbackHandler(public_key=server.public_key)
    with FakeVLLM(lambda _: "centre") as llm, capture(sink=store.sink()) as rollout:
        model = ChatART(StaticEndpoint(llm.base_url, "agent@3"))

        def play(state: MessagesState) -> dict[str, Any]:
            return {"messages": [model.invoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("play", play)
        graph.add_edge(START, "play")
        graph.add_edge("play", END)
        graph.compile().invoke({"messages": [("user", "move")]}, config={"callbacks": [handler]})
    sdk.flush()
    sdk.shutdown()
    trajectory = store.trajectory(rollout.id)
    (step,) = trajectory.steps
    assert (step.trainable, step.identity.node) == (True, "play")
    assert not trajectory.faults
    (theirs,) = server.trace_ids
    assert theirs == handler.last_trace_id
    with LangfuseClient(connection(server)) as client:
        assert export_to_langfuse(store, client=client).confirmed == 1
    ours = server.trace(trace_id(rollout.id))
    assert {o["type"] for o in ours.values()} == {"AGENT", "CHAIN", "GENERATION"}
    (call,) = (o for o in ours.values() if o["type"] == "GENERATION")
    (their_call,) = (o for o in server.of_trace(theirs) if o["type"] == "GENERATION")
    assert call["version"] == "agent@3"
    assert call["usageDetails"]["output"] == their_call["usageDetails"]["output"]
    checkpoint = "langgraph_checkpoint_ns"
    assert call["metadata"][checkpoint] == their_call["metadata"][checkpoint]


def test_what_cannot_be_is_refused_before_anything_starts(server: LangfuseServer, store: Store) -> None:
    with pytest.raises(ConfigError, match="interval=0"):
        LangfuseLive(store, connection=connection(server), interval=0)
    with pytest.raises(UnknownRunError):
        LangfuseLive(store, "r-none", connection=connection(server))


def test_no_thread_is_left_behind(server: LangfuseServer, store: Store) -> None:
    with LangfuseLive(store, connection=connection(server), interval=0.05):
        assert any(thread.name == "langfuse-live" for thread in threading.enumerate())
    assert not any(thread.name == "langfuse-live" for thread in threading.enumerate())

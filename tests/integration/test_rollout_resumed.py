"""A rollout that waits for a person: paused in one process, and gone on with in another."""

import subprocess
import sys
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from fakes.vllm_server import FakeVLLM
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt

from art_core.capture import superseded
from art_core.errors import UnknownTrajectoryError
from art_core.inference.endpoint import StaticEndpoint
from art_core.recording import Rollout
from art_core.store import Store
from art_core.types import RolloutStatus, Scenario
from art_langgraph import ChatART, capture


class State(TypedDict, total=False):
    said: Annotated[list[str], add]
    topic: str


def agent(base_url: str, saver: Any) -> Any:
    """Two branches that each ask a person, and an end."""
    chat = ChatART(StaticEndpoint(base_url, "m@1"))

    def ask(state: State) -> State:
        topic = state.get("topic", "")
        chat.invoke(f"draft {topic}")
        answer = interrupt(topic)
        return {"said": [chat.invoke(f"{topic}: {answer}").text]}

    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_node("end", lambda state: {"said": [chat.invoke("end").text]}, defer=True)
    graph.add_conditional_edges(START, lambda _: [Send("ask", {"topic": t}) for t in ("a", "b")], ["ask"])
    graph.add_edge("ask", "end")
    return graph.compile(checkpointer=saver)


def go_on(root: str, base_url: str, rollout_id: str) -> None:
    """Begin, or answer one question; end when none is left."""
    thread: Any = {"configurable": {"thread_id": rollout_id}}
    with (
        Store.open("people", root) as store,
        SqliteSaver.from_conn_string(f"{root}/threads.db") as saver,
    ):
        graph = agent(base_url, saver)
        questions = [i for t in graph.get_state(thread).tasks for i in t.interrupts]
        if questions:
            rollout = Rollout.resume(store.trajectory(rollout_id), sink=store.sink())
        else:
            rollout = Rollout(Scenario("people"), rollout_id=rollout_id, sink=store.sink())
        with capture(rollout=rollout):
            graph.invoke(Command(resume={questions[0].id: "yes"}) if questions else {"said": []}, thread)
        waits = [i for t in graph.get_state(thread).tasks for i in t.interrupts]
        rollout.pause() if waits else rollout.finish(1.0)


def test_branches_answered_one_by_one_in_other_processes_make_one_trajectory(
    fake: FakeVLLM, tmp_path: Path
) -> None:
    """C11."""
    program = f"import sys; sys.path[:0] = {sys.path!r}; from {__name__} import go_on; go_on(*sys.argv[1:])"
    for _ in range(3):
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), fake.base_url, "t-people"], check=True, timeout=120
        )
    with Store.open("people", tmp_path) as store:
        (trajectory,) = store.trajectories()
    assert (trajectory.status, trajectory.reward) == (RolloutStatus.FINISHED, 1.0)
    gone = superseded(trajectory.steps)
    counts = sorted(s.messages[-1]["content"] for s in trajectory.steps if s.id not in gone)
    assert counts == ["a: yes", "b: yes", "draft a", "draft b", "end"]
    left = sorted(s.messages[-1]["content"] for s in trajectory.steps if s.id in gone)
    assert left == ["draft a", "draft b", "draft b"]
    assert len(fake.bodies) == len(trajectory.steps)
    spans = [s for s in trajectory.spans if s.name == "ask"]
    assert sorted(s.status for s in spans) == ["interrupted"] * 3 + ["ok"] * 2
    assert len({s.id for s in trajectory.spans}) == len(trajectory.spans)


def test_what_a_resumed_rollout_counts_goes_on_where_it_was(fake: FakeVLLM, tmp_path: Path) -> None:
    chat = ChatART(StaticEndpoint(fake.base_url, "m@1"))
    with Store.open("people", tmp_path) as store:
        first = Rollout(Scenario("a"), sink=store.sink(), metadata={"seed": 7}, max_calls=3)
        with capture(rollout=first):
            chat.invoke("one")
        paused = first.pause()
        with pytest.raises(UnknownTrajectoryError, match=r"Rollout\.resume goes on"):
            first.finish()
        second = Rollout.resume(store.trajectory(first.id), sink=store.sink(), max_calls=3)
        with capture(rollout=second):
            chat.invoke("two")
        ended = second.finish(0.5)
        assert second.count_call() == 3
        with pytest.raises(UnknownTrajectoryError, match="has ended"):
            Rollout.resume(store.trajectory(first.id))
        kept = store.trajectory(first.id)
    assert (paused.status, len(paused.steps)) == (RolloutStatus.RUNNING, 1)
    assert [s.identity.call_index for s in ended.steps] == [0, 1]
    assert len({body["seed"] for body in fake.bodies}) == 2
    assert kept.steps == ended.steps
    assert [s.id for s in kept.spans] == [s.id for s in ended.spans]
    assert kept.duration is not None
    assert kept.duration >= ended.steps[-1].started_at - paused.started_at

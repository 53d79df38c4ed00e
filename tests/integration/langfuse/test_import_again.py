"""Which traces come, and what becomes of those that came before: nothing twice, nothing lost."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fakes.langfuse_server import SECRET_KEY
from helpers.langfuse_app import App, only
from langchain_openai import ChatOpenAI
from langfuse import Langfuse
from langfuse.langchain import CallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from art_core.errors import ConfigError
from art_core.store import Store
from art_core.types import RolloutStatus
from art_langgraph.langfuse.client import LangfuseClient, LangfuseError
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.export import export_to_langfuse
from art_langgraph.langfuse.traces import TraceFilter


def test_importing_again_brings_what_is_new_and_nothing_twice(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    first = app.run("one")
    bring()
    asked = len(app.server.asked)
    again = bring()
    assert (again.imported, again.updated, again.unchanged) == ((), (), 1)
    assert len(app.server.asked) - asked == 2  # its root and its scores
    app.score(first, "reward", 1.0)
    app.run("two")
    third = bring()
    assert (len(third.imported), len(third.updated)) == (1, 1)
    assert sorted(t.reward or 0.0 for t in store.trajectories()) == [0.0, 1.0]
    app.run("three")
    newer = bring(only_new=True)
    assert len(newer.imported) == 1
    assert newer.unchanged == 1  # the one that the last import ended with
    assert len(list(store.trajectories())) == 3


def test_what_is_said_here_stands_until_something_new_is_said_there(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    trace = app.run("one")
    app.score(trace, "reward", 0.25)
    app.score(trace, "other", 0.5)
    bring()
    name = only(store).id
    store.score(name, 0.75, author="ada")
    assert bring().unchanged == 1
    assert only(store).reward == 0.75
    app.score(trace, "reward", 1.0)
    assert bring().updated == (name,)
    assert [s.reward for s in store.scores(name)] == [0.25, 0.75, 1.0]
    assert bring(reward="other").updated == (name,)  # another score is the reward
    assert (only(store).reward, only(store).components) == (0.5, {"reward": 1.0})


def test_filters_choose_by_tag_name_session_time_and_score(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    tagged = app.run("a", langfuse_tags=["prod", "eu"], langfuse_session_id="s-1")
    named = app.run("b", langfuse_tags=["prod"], langfuse_trace_name="checkout")
    app.score(tagged, "quality", 0.9)
    app.score(named, "quality", 0.2)

    def found(**filters: Any) -> set[str]:
        bring(**filters)
        ids = {t.metadata["langfuse"]["trace_id"] for t in store.trajectories()}
        for name in list(brought):
            ids.discard(name)
        brought.update(ids)
        return ids

    brought: set[str] = set()
    now = datetime.now(UTC)
    assert found(tags=("eu",), name="checkout") == set()
    assert found(since=now + timedelta(minutes=1)) == set()
    assert found(until=now - timedelta(minutes=10)) == set()
    assert found(score="quality", score_min=0.95) == set()
    assert found(session_id="s-1", tags=("prod", "eu"), score="quality", score_min=0.5) == {tagged}
    assert found(name="checkout", since=now - timedelta(minutes=10), score="quality", score_max=0.5) == {
        named
    }
    with pytest.raises(ConfigError, match="score_min and score_max are bounds of a score"):
        TraceFilter(score_min=0.5)


def test_traces_of_many_pages_come_whole(app: App, store: Store, bring: Callable[..., Any]) -> None:
    app.server.page = 3
    for number in range(5):
        app.run(f"question {number}")
    assert len(bring().imported) == 5
    assert {len(t.steps) for t in store.trajectories()} == {4}
    assert len({t.scenario.id for t in store.trajectories()}) == 5


def test_a_trace_that_was_interrupted_and_resumed_is_one_trajectory_that_grows(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    model = ChatOpenAI(model="gpt-x", base_url=app.llm.base_url, api_key="k")  # type: ignore[arg-type]

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def approve(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([("system", interrupt("go on?"))])]}

    builder = StateGraph(MessagesState).add_node("ask", ask).add_node("approve", approve)
    builder.add_edge(START, "ask").add_edge("ask", "approve").add_edge("approve", END)
    waiting = builder.compile(checkpointer=InMemorySaver())
    # As an application does that wants both halves in one trace.
    trace = Langfuse.create_trace_id(seed="thread-1")
    handler = CallbackHandler(public_key=app.server.public_key, trace_context={"trace_id": trace})
    config: Any = {"callbacks": [handler], "configurable": {"thread_id": "1"}}
    waiting.invoke({"messages": [("user", "hi")]}, config=config)
    app.sdk.flush()
    assert len(bring().imported) == 1
    before = only(store)
    assert (len(before.steps), before.status) == (1, RolloutStatus.FINISHED)
    waiting.invoke(Command(resume="yes"), config=config)
    app.sdk.flush()
    app.score(trace, "reward", 0.5)
    again = bring()
    assert (again.imported, again.updated) == ((), (before.id,))
    after = only(store)
    assert [(s.identity.node, s.identity.attempt) for s in after.steps] == [("ask", 1), ("approve", 2)]
    assert (after.reward, after.duration) > (0.4, before.duration)
    assert bring().unchanged == 1


def test_a_server_that_fails_keeps_what_came_before_and_goes_on_the_next_time(
    app: App, store: Store, bring: Callable[..., Any]
) -> None:
    app.run("one")
    app.run("two")
    app.server.break_(path="/api/public/v2/observations", after=2, times=None, status=503)
    with pytest.raises(LangfuseError, match="do it again later"):
        bring()
    assert len(list(store.trajectories())) == 1
    app.server.mend()
    assert (len(bring(only_new=True).imported), len(list(store.trajectories()))) == (1, 2)


def test_what_was_exported_from_here_is_left_out_and_survives_the_way_there_and_back(
    app: App, store: Store, bring: Callable[..., Any], tmp_path: Path
) -> None:
    app.run("hi")
    bring()
    imported = only(store)
    settings = LangfuseConnection(
        public_key=app.server.public_key,
        secret_key=SECRET_KEY,  # type: ignore[arg-type]
        base_url=app.server.base_url,
    )
    with LangfuseClient(settings) as client:
        assert export_to_langfuse(store, client=client).confirmed == 1
    again = bring()
    assert (again.imported, again.own) == ((), 1)
    generations = [o for o in app.server.observations.values() if o["type"] == "GENERATION"]
    assert len(generations) == 2 * len(imported.steps)

"""RolloutNode, one rollout of the graph: done once, cut off, tried again; agents that wait for people."""

from typing import Any

import pytest
from fakes.vllm_server import FakeVLLM
from helpers.ruler_graphs import THREAD, a_ruler, an_agent, asked, chat
from langchain_core.callbacks import BaseCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from art_core.inference.endpoint import StaticEndpoint
from art_core.recording import Rollout
from art_core.store import Store
from art_core.types import Failure, Scenario
from art_langgraph import ChatART, ruler_graph
from art_langgraph.rollout_node import RolloutNode, RolloutTask


def a_task(**changes: Any) -> RolloutTask:
    place = {"run": "l-0123456789abff", "batch": 1, "place": 0, "member": 0, "places": 1, "of": 1}
    return {**place, "scenario": 0, "occurrence": 0, **changes}  # type: ignore[typeddict-item, return-value]


def a_node(server: FakeVLLM, store: Store, name: str = "a", **options: Any) -> RolloutNode:
    scenario = Scenario(name, {"messages": [("user", name)]})
    llm = ChatART(StaticEndpoint(server.base_url, "policy@1"), max_retries=0)
    return RolloutNode(an_agent(llm), store, scenario_of=lambda _: scenario, **options)


async def test_a_rollout_that_has_ended_is_not_made_again(server: FakeVLLM, store: Store) -> None:
    first = await a_node(server, store).ainvoke(a_task())
    assert await a_node(server, store).ainvoke(a_task()) == first
    assert len(server.bodies) == 1
    other = await a_node(server, store).ainvoke(a_task(member=1))
    assert other["rollouts"][0]["trajectory"] != first["rollouts"][0]["trajectory"]


@pytest.mark.parametrize("how", ["its process died", "it was cancelled"])
async def test_a_rollout_that_was_cut_off_is_sampled_again_from_the_same_seed(
    how: str, server: FakeVLLM, store: Store
) -> None:
    node = a_node(server, store)
    first = node._plan(a_task(), 1, 1)  # type: ignore[attr-defined]
    cut_off = Rollout(first.scenario, rollout_id=first.rollout_id)
    if "cancelled" in how:
        cut_off.fail(Failure("cancelled", "the rollout was cancelled from outside"))
    store.save_trajectory(cut_off.snapshot())
    (record,) = (await node.ainvoke(a_task()))["rollouts"]
    assert record["trajectory"] == first.rollout_id.removesuffix("-1") + "-2"
    kept = store.trajectory(record["trajectory"])
    assert kept.metadata["seed"] == first.metadata["seed"]
    assert kept.metadata["attempt"] == 1
    assert kept.steps[0].sampling["seed"] is not None


async def test_a_retry_of_a_failed_rollout_has_another_seed(server: FakeVLLM, store: Store) -> None:
    (record,) = (await a_node(server, store, "fail", retries=2).ainvoke(a_task()))["rollouts"]
    assert record["trajectory"].endswith("-3")
    assert record["reward"] is None
    found = list(store.trajectories(scenario_id="fail"))
    assert [t.metadata["attempt"] for t in found] == [1, 2, 3]
    assert len({t.metadata["seed"] for t in found}) == 3
    assert all(t.failed for t in found)


def asking_agent(checkpointer: Any) -> Any:
    def ask(state: MessagesState) -> Any:
        return {"messages": [("ai", f"{interrupt('may I?')}: quality=0.5000")]}

    graph = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").add_edge("ask", END)
    return graph.compile(checkpointer=checkpointer)


@pytest.mark.parametrize("outer", [None, InMemorySaver()])
async def test_a_rollout_that_waits_for_a_person_fails_and_the_graph_goes_on(
    outer: Any, server: FakeVLLM, store: Store
) -> None:
    agent = asking_agent(InMemorySaver())
    found = await ruler_graph(agent, a_ruler(server), store, n=1, checkpointer=outer).ainvoke(
        asked("a"), {"configurable": {"thread_id": f"{outer is None}"}}
    )
    assert "__interrupt__" not in found
    (rollout,) = found["rollouts"]
    assert "waits for a person ('may I?')" in rollout["failure"]
    failure = store.trajectory(rollout["trajectory"]).failure
    assert failure is not None
    assert failure.error_type == "art_core.errors.AgentInterruptedError"
    assert found["scores"][0]["reward"] is None


async def test_a_function_that_answers_for_the_person_is_an_agent(server: FakeVLLM, store: Store) -> None:
    agent = asking_agent(InMemorySaver())
    llm = chat(server)

    async def answering(scenario: Scenario) -> Any:
        await llm.ainvoke("begin")
        config = {"configurable": {"thread_id": scenario.id}}
        out = await agent.ainvoke(dict(scenario.inputs), config)
        while "__interrupt__" in out:
            out = await agent.ainvoke(Command(resume="yes"), config)
        return out["messages"][-1].text

    found = await ruler_graph(answering, a_ruler(server), store, n=1).ainvoke(asked("a"))
    assert store.trajectory(found["rollouts"][0]["trajectory"]).metadata["output"] == "yes: quality=0.5000"


async def test_a_rollout_is_no_subgraph_of_the_graph_around_it(server: FakeVLLM, store: Store) -> None:
    class Watcher(BaseCallbackHandler):
        models = 0

        def on_chat_model_start(self, *_: Any, **__: Any) -> None:
            self.models += 1

    watcher = Watcher()
    graph = ruler_graph(an_agent(chat(server)), a_ruler(server), store, n=1, checkpointer=InMemorySaver())
    modes = ["messages", "values"]
    config = {**THREAD, "callbacks": [watcher]}
    streamed = [(mode, what) async for mode, what in graph.astream(asked("a"), config, stream_mode=modes)]
    (record,) = streamed[-1][1]["rollouts"]
    (step,) = store.trajectory(record["trajectory"]).steps
    assert step.identity.namespace.startswith("act:")
    assert step.identity.enclosing == [step.identity.namespace]
    assert not server.bodies[0].get("stream"), (
        "asking for messages makes calls of the graph's own nodes stream"
    )
    assert watcher.models == 1, "the judge, which is a node of the graph"
    assert not any("I did it" in str(what) for mode, what in streamed if mode == "messages")

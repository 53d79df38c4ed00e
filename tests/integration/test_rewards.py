"""Rewards of real graphs: LangGraph's own tool node, ChatART over HTTP, worker processes."""

import pytest
from fakes.vllm_server import FakeVLLM, Reply, ToolCall
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from art_core.errors import ConfigError
from art_core.inference.endpoint import StaticEndpoint
from art_core.rewards import (
    Adaptive,
    Cost,
    ExactMatch,
    FuzzyMatch,
    Grounding,
    Latency,
    PerStep,
    Price,
    Steps,
    ToolArguments,
    ToolChoice,
    ToolErrors,
    ValidToolCalls,
    reweighted,
)
from art_core.types import Scenario
from art_langgraph import ChatART, agather

CALLS = [{"name": "read", "arguments": {"mail": 7}}]
SCENARIO = Scenario(
    "mail", {"messages": [("user", "When is the trip?")]}, {"answer": "May [m7]", "tool_calls": CALLS}
)


@tool
def read(mail: int) -> str:
    """Read a mail."""
    if mail != 7:
        raise KeyError(mail)
    return "m7: the trip is in May"


def reading_agent(server: FakeVLLM) -> CompiledStateGraph:
    llm = ChatART(StaticEndpoint(server.base_url, "agent@1")).bind_tools([read])

    async def agent(state: MessagesState):
        return {"messages": [await llm.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode([read], handle_tool_errors=True))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    return graph.compile()


def turns(*said: Reply):
    """Answers by how many the conversation has already."""
    return lambda request: said[sum(m["role"] == "assistant" for m in request["messages"])]


REWARD = (
    ExactMatch()
    + ToolChoice(ordered=True)
    + ToolArguments()
    + ValidToolCalls()
    + Grounding()
    - PerStep(ToolErrors()).named("bad_steps")
    - ToolErrors()
    - 0.01 * Steps()
    - 0.001 * Latency()
    - Cost({"agent": Price(1, 2)})
)


async def test_an_agent_that_uses_its_tools_well_earns_every_part() -> None:
    script = turns(Reply(tool_calls=(ToolCall("read", '{"mail": 7}'),)), Reply("May [m7]"))
    with FakeVLLM(script) as server:
        [group] = await agather(
            reading_agent(server), [SCENARIO], group_size=2, reward=REWARD, progress=False
        )
    for member in group:
        parts = member.components
        assert member.failure is None
        for name in ("exact_match", "tool_choice", "tool_arguments", "valid_tool_calls", "grounding"):
            assert parts[name] == 1.0, name
        assert (parts["tool_errors"], parts["steps"]) == (0.0, 2.0)
        assert parts["latency"] > 0
        assert parts["cost"] > 0
        weights = {
            name: member.metrics[f"weight/{name}"] for name in parts if f"weight/{name}" in member.metrics
        }
        assert member.reward == pytest.approx(sum(w * parts[name] for name, w in weights.items()))


async def test_errors_that_langgraphs_tool_node_answers_are_seen() -> None:
    script = turns(
        Reply(tool_calls=(ToolCall("read", '{"mail": 1}', "a"),)),  # raises
        Reply(tool_calls=(ToolCall("read", '{"mail": "x"}', "b"),)),  # against its schema
        Reply(tool_calls=(ToolCall("delete", "{}", "c"),)),  # not there
        Reply(tool_calls=(ToolCall("read", '{"mail": 7}', "d"),)),
        Reply("May [m7] [m8]"),
    )
    with FakeVLLM(script) as server:
        [group] = await agather(
            reading_agent(server), [SCENARIO], group_size=2, reward=REWARD, progress=False
        )
    for member in group:
        parts = member.components
        assert member.failure is None
        assert parts["tool_errors"] == 3 / 4
        assert parts["valid_tool_calls"] == 2 / 4
        assert parts["tool_arguments"] == 1.0
        assert parts["tool_choice"] == pytest.approx(2 / 5)
        assert parts["grounding"] == 1 / 2
        assert [
            member.step_rewards[s.id] < member.step_rewards[member.steps[3].id] for s in member.steps
        ] == [
            *[True] * 3,
            *[False] * 2,
        ]
        assert parts["bad_steps"] == pytest.approx(3 / 5)
    told = reweighted([group], {"bad_steps": -5.0})
    assert told.as_scored == told.unknown == {}
    for before, after in zip(group, told.groups[0], strict=True):
        bad, good = before.steps[0].id, before.steps[3].id
        assert before.step_rewards[bad] - before.step_rewards[good] == pytest.approx(-1.0)
        assert after.step_rewards[bad] - after.step_rewards[good] == pytest.approx(-5.0)


async def test_mixes_are_asked_in_worker_processes_and_what_has_a_memory_is_refused() -> None:
    topics = [Scenario(name, {"topic": name}, {"answer": "On a, part 1."}) for name in "ab"]
    mix = ExactMatch() + FuzzyMatch(by="characters").gated(ExactMatch()) - 0.1 * Steps().within(60)
    with FakeVLLM(lambda request: f"On {request['messages'][-1]['content']}.") as server:
        options = {"group_size": 2, "model": StaticEndpoint(server.base_url, "policy@3"), "progress": False}
        graph = "helpers.rollout_graphs:chat_graph"
        groups = await agather(graph, topics, reward=mix, workers=2, **options)
        with pytest.raises(ConfigError, match="without workers"):
            await agather(graph, topics, reward=Adaptive(mix), workers=2, **options)
    for group, reward in zip(groups, (1.8, -0.2), strict=True):
        assert not [t.failure for t in group if t.failed]
        assert group.rewards == pytest.approx((reward, reward))
        assert set(group.trajectories[0].components) >= {"exact_match", "fuzzy_match", "steps"}

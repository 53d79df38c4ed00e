"""What agents need from a rollout: runtime context, an end, outputs of any type, threads of an event loop."""

import asyncio
import threading
from dataclasses import dataclass, field
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from fakes.vllm_server import FakeVLLM
from langchain_core.messages import RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import interrupt
from pydantic import BaseModel, ConfigDict

from art_core.errors import ConfigError
from art_core.inference.endpoint import StaticEndpoint
from art_core.types import Scenario, Trajectory
from art_langgraph import ChatART, agather, arollout


class State(TypedDict, total=False):
    said: Annotated[list[Any], add]


@dataclass
class Shelf:
    """A context as nodes get it."""

    owner: str


@pytest.fixture
def model(fake: FakeVLLM) -> StaticEndpoint:
    return StaticEndpoint(fake.base_url, "policy@1")


def one_node(node: Any, *, context_schema: Any = None, **compile_options: Any) -> Any:
    graph = StateGraph(State, context_schema=context_schema)
    graph.add_node("ask", node)
    graph.add_edge(START, "ask")
    return graph.compile(**compile_options)


def asked(trajectory: Trajectory) -> list[str]:
    return [step.messages[-1]["content"] for step in trajectory.steps]


@pytest.mark.parametrize("context", [Shelf("ann"), lambda scenario: Shelf(scenario.id)])
async def test_a_graphs_context_reaches_its_nodes(model: StaticEndpoint, context: Any) -> None:
    chat = ChatART(model)

    def ask(state: State, runtime: Runtime[Shelf]) -> State:
        return {"said": [chat.invoke(f"for {runtime.context.owner}").text]}

    graph = one_node(ask, context_schema=Shelf)
    (group,) = await agather(graph, [Scenario("ann")], group_size=2, context=context, progress=False)
    assert [asked(t) for t in group] == [["for ann"], ["for ann"]]
    assert asked(await arollout(graph, Scenario("ann"), context=context)) == ["for ann"]


async def test_context_is_refused_where_nobody_takes_it() -> None:
    with pytest.raises(ConfigError, match="context is for graphs"):
        await agather(lambda scenario: None, [Scenario("a")], group_size=1, context=Shelf("ann"))


@pytest.mark.parametrize("saver", [None, InMemorySaver()])
async def test_a_graph_that_waits_for_a_person_has_not_ended_and_is_not_scored(
    model: StaticEndpoint, saver: Any
) -> None:
    chat = ChatART(model)

    def ask(state: State) -> State:
        chat.invoke("before")
        return {"said": [interrupt("may I?")]}

    graph = one_node(ask, checkpointer=saver)
    groups = await agather(
        graph, [Scenario("a")], group_size=2, reward=lambda t: 1.0, min_group_size=0, progress=False
    )
    assert [t.reward for t in groups.failed] == [None, None]
    assert [asked(t) for t in groups.failed] == [["before"], ["before"]]
    failure = groups.failed[0].failure
    assert failure is not None
    assert failure.error_type == "art_core.errors.AgentInterruptedError"
    assert "waits for a person ('may I?')" in failure.message
    newer = await arollout(
        lambda _: graph.invoke({}, {"configurable": {"thread_id": "v2"}}, version="v2"), {}
    )
    assert newer.failure is not None
    assert "'may I?'" in newer.failure.message


async def test_a_graph_that_stops_at_a_breakpoint_has_not_ended(model: StaticEndpoint) -> None:
    chat = ChatART(model)
    graph = StateGraph(State)
    graph.add_node("plan", lambda state: {"said": [chat.invoke("plan").text]})
    graph.add_node("delete", lambda state: {"said": [chat.invoke("delete").text]})
    graph.add_edge(START, "plan")
    graph.add_conditional_edges("plan", lambda state: "delete" if len(state["said"]) > 1 else "__end__")
    stops = graph.compile(checkpointer=InMemorySaver(), interrupt_before=["delete"])

    reached = await arollout(stops, {"said": ["danger"]}, reward=lambda t: 1.0)
    assert reached.failure is not None
    assert "breakpoint before 'delete'" in reached.failure.message
    assert asked(reached) == ["plan"]
    assert (await arollout(stops, {"said": []}, reward=lambda t: 1.0)).reward == 1.0
    with pytest.raises(ConfigError, match="compile it without"):
        await arollout(graph.compile(interrupt_before=["delete"]), {})


async def test_an_output_that_json_cannot_hold_fails_nobody(model: StaticEndpoint) -> None:
    class Odd:
        pass

    class Answer(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        odd: Odd

    @dataclass
    class Client:
        lock: Any = field(default_factory=threading.Lock)

    for output in (Answer(odd=Odd()), Client(), RemoveMessage(id="1")):
        chat = ChatART(model)

        def ask(state: State, chat: ChatART = chat, output: Any = output) -> State:
            chat.invoke("hello")
            return {"said": [output]}

        trajectory = await arollout(one_node(ask), {}, reward=lambda t, out: float(len(out["said"])))
        assert (trajectory.failure, trajectory.reward) == (None, 1.0)
        assert "output" not in trajectory.metadata


async def test_calls_in_an_event_loops_executor_belong_to_their_rollouts(model: StaticEndpoint) -> None:
    chat = ChatART(model)

    async def ask(state: State) -> State:
        loop = asyncio.get_running_loop()
        said = await asyncio.gather(*(loop.run_in_executor(None, chat.invoke, f"{i}") for i in range(2)))
        return {"said": [message.text for message in said]}

    (group,) = await agather(one_node(ask), [Scenario("a")], group_size=3, progress=False)
    assert [sorted(asked(t)) for t in group] == [["0", "1"]] * 3
    assert all(step.identity.node == "ask" for t in group for step in t.steps)
    assert all(t.faults == {} for t in group)


async def test_inputs_that_cannot_be_copied_fail_their_rollout_with_the_way_out(
    model: StaticEndpoint,
) -> None:
    trajectory = await arollout(one_node(lambda state: state), Scenario("a", {"said": [threading.Lock()]}))
    assert trajectory.failure is not None
    assert trajectory.failure.error_type == "art_core.errors.ConfigError"
    assert "scenario 'a'" in trajectory.failure.message
    assert "context=" in trajectory.failure.message


async def test_what_is_neither_a_scenario_nor_a_mapping_is_refused(model: StaticEndpoint) -> None:
    given: Any = "a question"
    with pytest.raises(ConfigError, match="neither a Scenario nor a mapping"):
        await arollout(one_node(lambda state: state), given)

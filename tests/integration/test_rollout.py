"""Real LangGraph graphs, rolled out: identity, isolation, failures, checkpointers, threads."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from fakes.vllm_server import FakeVLLM, completion_ids, prompt_ids
from helpers.rollout_graphs import State, chat_graph
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.func import entrypoint
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from art_core.errors import ConfigError
from art_core.inference.endpoint import StaticEndpoint
from art_core.recording import current_rollout
from art_core.store import Store
from art_core.types import Scenario
from art_langgraph import ChatART, agather, arollout, gather, rollout
from art_langgraph.plain import plain


def answer(request) -> str:
    return f"On {request['messages'][-1]['content']}."


@pytest.fixture
def server():
    with FakeVLLM(answer) as fake:
        yield fake


@pytest.fixture
def model(server):
    return StaticEndpoint(server.base_url, "policy@1")


def one_node(node: Any, state: type = State, **compile_options: Any) -> Any:
    graph = StateGraph(state)
    graph.add_node("ask", node)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", END)
    return graph.compile(**compile_options)


def topics(count: int) -> list[Scenario]:
    return [Scenario(f"t{i}", {"topic": f"t{i}"}) for i in range(count)]


async def test_one_graph_shared_by_two_hundred_rollouts_keeps_their_steps_apart(
    server, tmp_path: Path
) -> None:
    """C05."""
    with Store.open("crowd", tmp_path) as store:
        model = StaticEndpoint(server.base_url, "policy@1", sink=store.sink())
        groups = await agather(chat_graph(model), topics(50), group_size=4, concurrency=200, model=model)
        kept = {t.id: t for t in store.trajectories()}
    assert not groups.failed
    for group in groups:
        for trajectory in group:
            asked = [s.messages[-1]["content"] for s in trajectory.steps]
            assert asked == [f"{group.scenario.id}, part {i}" for i in range(2)]
            for step in trajectory.steps:
                request = {"messages": [dict(m) for m in step.messages]}
                assert step.tokens is not None
                assert step.tokens.prompt == prompt_ids(request)
                assert step.tokens.completion == completion_ids(answer(request))
                assert (step.rollout_id, step.identity.node) == (trajectory.id, "ask")
            assert kept[trajectory.id] == trajectory


async def test_sync_nodes_run_side_by_side_and_record_into_their_own_rollout(model) -> None:
    """C05: LangGraph runs sync nodes in threads."""
    llm = ChatART(model, max_retries=0)
    together = threading.Barrier(24, timeout=120)  # more than the usual executor has threads

    def ask(state: State) -> State:
        together.wait()
        return {"said": [llm.invoke(state["topic"]).text]}

    groups = await agather(one_node(ask), topics(24), group_size=1)
    assert not groups.failed
    for group in groups:
        (step,) = group.trajectories[0].steps
        assert step.message() == f"On {group.scenario.id}."
        assert step.identity.node == "ask"


def test_gather_and_rollout_work_from_sync_code(model) -> None:
    """C09: one chat model, several calls, and an event loop of one's own besides."""
    graph = chat_graph(model)
    assert len(gather(graph, topics(3), group_size=2)) == 3
    assert not rollout(graph, {"topic": "x"}).failed
    groups = asyncio.run(agather(graph, topics(2), group_size=1))
    assert not groups.failed
    assert asyncio.run(arollout(graph, {"topic": "y"})).steps[0].message() == "On y, part 0."


async def test_entrypoints_runnables_and_functions_can_be_rolled_out(model) -> None:
    llm = ChatART(model, max_retries=0)

    @entrypoint(checkpointer=InMemorySaver())
    async def functional(inputs: State) -> str:
        return (await llm.ainvoke(inputs["topic"])).text

    async def async_function(scenario: Scenario) -> str:
        return (await llm.ainvoke(scenario.inputs["topic"])).text

    def sync_function(scenario: Scenario) -> str:
        return llm.invoke(scenario.inputs["topic"]).text

    runnable = RunnableLambda(lambda inputs: inputs["topic"]) | llm | RunnableLambda(lambda m: m.text)
    for agent in (functional, async_function, sync_function, runnable):
        groups = await agather(agent, topics(2), group_size=2, reward=lambda t, output: len(output))
        assert [g.rewards for g in groups] == [(6.0, 6.0)] * 2
        assert {t.metadata["output"] for t in groups[1]} == {"On t1."}


async def test_each_rollout_has_its_own_thread_of_the_checkpointer_and_the_users_config_is_untouched(
    model,
) -> None:
    saver = InMemorySaver()
    seen: list[dict[str, Any]] = []
    llm = ChatART(model, max_retries=0)

    async def ask(state: State, config) -> State:
        seen.append({**config["configurable"], "tags": config["tags"]})
        return {"said": [(await llm.ainvoke(state["topic"])).text]}

    config = {"configurable": {"user": "ann"}, "tags": ["mine"], "recursion_limit": 7}
    before = {"configurable": {"user": "ann"}, "tags": ["mine"], "recursion_limit": 7}
    groups = await agather(one_node(ask, checkpointer=saver), topics(2), group_size=3, config=config)
    assert config == before
    assert {s["user"] for s in seen} == {"ann"}
    assert all("mine" in s["tags"] for s in seen)
    threads = {t.id for g in groups for t in g}
    assert {s["thread_id"] for s in seen} == threads
    assert {c.config["configurable"]["thread_id"] for c in saver.list(None)} == threads


async def test_a_thread_that_all_rollouts_would_share_is_refused_and_one_rollout_may_have_it(model) -> None:
    config = {"configurable": {"thread_id": "mine"}}
    graph = chat_graph(model)
    with pytest.raises(ConfigError, match="thread_id='mine'"):
        await agather(graph, topics(1), group_size=2, config=config)
    await arollout(graph, {"topic": "x"}, config=config)
    assert graph.get_state(config).values["topic"] == "x"


async def test_rollouts_do_not_share_the_scenarios_inputs(model) -> None:
    class Chat(TypedDict):
        messages: Annotated[list, add_messages]
        board: list[int]

    llm = ChatART(model, max_retries=0)

    async def ask(state: Chat) -> dict[str, Any]:
        state["board"].append(1)
        return {"messages": [await llm.ainvoke(state["messages"])], "board": state["board"]}

    scenario = Scenario("s", {"messages": [HumanMessage("hello")], "board": []})
    (group,) = await agather(one_node(ask, Chat), [scenario], group_size=5)
    assert scenario.inputs["board"] == []
    assert scenario.inputs["messages"][0].id is None
    for trajectory in group:
        output = trajectory.metadata["output"]
        assert output["board"] == [1]
        assert [m["role"] for m in output["messages"]] == ["user", "assistant"]


# -- failures ----------------------------------------------------------------------------------------


async def test_a_graph_that_never_ends_runs_into_its_recursion_limit_and_keeps_its_steps(model) -> None:
    """C10."""
    graph = chat_graph(model, calls=100)
    (group,) = await agather(
        graph, topics(1), group_size=1, config={"recursion_limit": 3}, reward=lambda t: 1.0, min_group_size=0
    )
    (t,) = group
    assert (t.failed, t.reward, t.failure.cause) == (True, None, "exception")
    assert t.failure.error_type.endswith(GraphRecursionError.__name__)
    assert len(t.steps) == 3


async def test_a_tool_that_raises_and_a_node_that_hangs_fail_their_rollouts_alone(model) -> None:
    """C10, C32: an async node, and a sync one whose thread nobody can stop."""
    llm = ChatART(model, max_retries=0)
    released = threading.Event()

    async def ask(state: State) -> State:
        await llm.ainvoke(state["topic"])
        if state["topic"] == "t0":
            raise ZeroDivisionError("the tool broke")
        if state["topic"] == "t1":
            await asyncio.Event().wait()
        return {"said": []}

    def hang(state: State) -> State:
        if state["topic"] == "t2":
            released.wait(280)
        return {}

    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_node("hang", hang)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "hang")
    graph.add_edge("hang", END)
    for timeout in (3, 30):  # the longer one where the machine is too busy for the others to end in time
        started = time.perf_counter()
        groups = await agather(
            graph.compile(), topics(6), group_size=2, timeout=timeout, reward=lambda t: 1.0, min_group_size=0
        )
        assert time.perf_counter() - started < 60 + timeout
        if len(groups.failed) == 6:
            break
    released.set()
    causes = [[t.failure and t.failure.cause for t in g] for g in groups]
    assert causes == [["exception"] * 2, ["timeout"] * 2, ["timeout"] * 2, *[[None, None]] * 3]
    assert all(len(t.steps) == 1 for g in groups for t in g)
    assert [g.rewards for g in groups] == [()] * 3 + [(1.0, 1.0)] * 3


async def test_what_a_timed_out_node_says_later_lands_in_nobody_elses_rollout(model) -> None:
    """C05, C32: its thread lives on while another rollout is the only open one."""
    llm = ChatART(model, max_retries=0)
    go_on, said = threading.Event(), threading.Event()

    def ask(state: State) -> State:
        if state["topic"] == "t0":
            go_on.wait(120)
        text = llm.invoke(state["topic"]).text
        if state["topic"] == "t0":
            said.set()
        else:
            go_on.set()
            said.wait(60)
        return {"said": [text]}

    for timeout in (2, 30):  # the longer one where the machine is too busy for the other one's call
        go_on.clear()
        said.clear()
        groups = await agather(
            one_node(ask), topics(2), group_size=1, concurrency=1, timeout=timeout, min_group_size=0
        )
        if len(groups.failed) == 1:
            break
    late, other = (g.trajectories[0] for g in groups)
    assert late.failure.cause == "timeout"
    assert [s.message() for s in other.steps] == ["On t1."]


async def test_a_rollout_whose_calls_went_elsewhere_says_where(model) -> None:
    """C02: another model, and a bare thread while other rollouts are open."""
    llm = ChatART(model, max_retries=0)
    other = GenericFakeChatModel(messages=iter([AIMessage("hi")] * 10))
    both = asyncio.Barrier(2)

    def in_thread(topic: str) -> None:
        thread = threading.Thread(target=llm.invoke, args=(topic,))
        thread.start()
        thread.join()

    async def ask(state: State) -> State:
        await both.wait()
        if state["topic"] == "t0":
            await asyncio.to_thread(in_thread, "t0")
        else:
            await other.ainvoke("t1")
        await both.wait()
        return {}

    groups = await agather(one_node(ask), topics(2), group_size=1, reward=lambda t: 0.0, min_group_size=0)
    threaded, elsewhere = (g.trajectories[0].failure for g in groups)
    assert threaded.cause == elsewhere.cause == "no_policy_calls"
    assert "unattributed" in threaded.message
    assert "which is no policy of ours" in elsewhere.message
    assert all(g.trajectories[0].reward is None for g in groups)


async def test_a_graph_with_another_model_is_traced_when_no_policy_is_required() -> None:
    other = GenericFakeChatModel(messages=iter([AIMessage("hi")] * 10))

    async def ask(state: State) -> State:
        return {"said": [(await other.ainvoke("hello")).text]}

    t = await arollout(one_node(ask), {"topic": "x"}, require_policy_calls=False)
    assert not t.failed
    (step,) = t.steps
    assert step.message() == "hi"
    assert not step.trainable
    assert step.identity.node == "ask"
    assert any(span.name == "ask" for span in t.spans)


async def test_more_policy_calls_than_allowed_fail_the_rollout(model) -> None:
    t = await arollout(chat_graph(model, calls=5), {"topic": "x"}, max_calls=3)
    assert t.failed
    assert "RolloutTooLongError" in t.failure.error_type
    assert len(t.steps) == 3


async def test_a_seed_for_sampling_reaches_the_graph(server, model) -> None:
    llm = ChatART(model, max_retries=0)

    async def ask(state: State) -> State:
        await llm.ainvoke(state["topic"], seed=current_rollout().metadata["seed"])
        return {}

    (group,) = await agather(one_node(ask), topics(1), group_size=4, seed=3)
    sent = sorted(body["seed"] for body in server.bodies)
    assert sent == sorted(t.metadata["seed"] for t in group)
    assert len(set(sent)) == 4


@pytest.mark.parametrize("wrong", [StateGraph(State), 42, object()])
async def test_what_is_no_graph_is_refused(wrong) -> None:
    with pytest.raises(ConfigError, match=r"graph\.compile\(\)|can't be rolled out"):
        await agather(wrong, topics(1), group_size=1)


def test_outputs_become_what_json_can_hold() -> None:
    value = {"messages": [HumanMessage("hi")], "tags": {"a"}, 3: (1, None)}
    assert plain(value) == {"messages": [{"role": "user", "content": "hi"}], "tags": ["a"], "3": [1, None]}

"""RulerNode and the graph around it: real LangGraph, a scripted model and judge over real HTTP."""

import asyncio
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import pytest
from fakes.vllm_server import FakeVLLM
from helpers.judges import a_run, perfect, quality_group, quality_run
from helpers.tiny import tiny_model
from helpers.trajectories import a_step
from langchain_core.callbacks import BaseCallbackHandler
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from art_core import LocalBackend, TrainableModel
from art_core.errors import ConfigError, UnknownTrajectoryError
from art_core.inference.endpoint import StaticEndpoint
from art_core.recording import Rollout
from art_core.rewards import Ruler
from art_core.store import Store
from art_core.types import Failure, RolloutStatus, Scenario
from art_langgraph import ChatART, LangChainJudge, RulerNode, ruler_graph
from art_langgraph.graph_records import RolloutRecord, ScoreRecord, newest_batch
from art_langgraph.rollout_node import RolloutNode, RolloutTask

THREAD = {"configurable": {"thread_id": "1"}}


class State(TypedDict, total=False):
    trajectories: list[str]
    scores: list[ScoreRecord]


class Script:
    """Answers agents with a quality that counts up, and judges perfectly; ``told`` says what was asked."""

    def __init__(self) -> None:
        self._count = itertools.count(1)
        self._lock = threading.Lock()
        self.told: Counter[str] = Counter()
        self.silent = False

    def __call__(self, request: dict[str, Any]) -> str:
        with self._lock:
            if "<<<run" in str(request["messages"]):
                self.told["judge"] += 1
                return "I would rather not." if self.silent else perfect(request["messages"])
            self.told["agent"] += 1
            return f"I did it with quality={next(self._count) % 9 / 10:.4f}"


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def server(script: Script) -> Iterator[FakeVLLM]:
    with FakeVLLM(script) as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path) as store:
        yield store


def chat(server: FakeVLLM) -> ChatOpenAI:
    return ChatOpenAI(model="m", base_url=server.base_url, api_key="none", max_retries=0)  # type: ignore[arg-type]


def a_ruler(server: FakeVLLM, **options: Any) -> Ruler:
    return Ruler(LangChainJudge(chat(server), name="judge"), **options)


def an_agent(llm: Any, checkpointer: Any = None) -> Any:
    """One node that calls a model; it fails when it is told to."""

    async def act(state: MessagesState) -> Any:
        said = await llm.ainvoke(state["messages"])
        if "fail" in str(state["messages"][0].content):
            raise ValueError("no such mailbox")
        return {"messages": [said]}

    graph = StateGraph(MessagesState).add_node("act", act).add_edge(START, "act").add_edge("act", END)
    return graph.compile(checkpointer=checkpointer)


def one_node(node: RulerNode, schema: Any = State) -> Any:
    return (
        StateGraph(schema).add_node("judge", node).add_edge(START, "judge").add_edge("judge", END).compile()
    )


def asked(*names: str) -> dict[str, Any]:
    return {"scenarios": [{"id": name, "inputs": {"messages": [("user", name)]}} for name in names]}


def history(store: Store, trajectory_id: str) -> list[tuple[str, float]]:
    return [(score.author, score.reward) for score in store.scores(trajectory_id)]


# -- the node ------------------------------------------------------------------------------------------


async def test_trajectories_of_a_state_get_rewards_and_explanations(server: FakeVLLM, store: Store) -> None:
    """C31, C33: a failed member is left out with a reason, and has no reward anywhere."""
    group = quality_group("g", (0.2, 0.9))
    failed = replace(
        a_run("g-bad", a_step("g-bad")),
        status=RolloutStatus.FAILED,
        failure=Failure("timeout", "no result within 3 s"),
    )
    store.save_group(group.with_trajectories([*group, failed]))
    ids = [member.id for member in (*group, failed)]
    found = await one_node(RulerNode(a_ruler(server), store)).ainvoke({"trajectories": ids})
    scores = {score["trajectory"]: score for score in found["scores"]}
    assert [scores[name]["reward"] for name in ids] == [0.2, 0.9, None]
    assert scores["g-0"]["explanation"].startswith("run ")
    assert scores["g-0"]["group"] == "g"
    assert scores["g-bad"]["unscored"] == "it failed (timeout)"
    kept = store.trajectory("g-1")
    assert (kept.reward, kept.components) == (0.9, {"ruler": 0.9})
    (score,) = store.scores("g-1")
    assert (score.author, score.explanation) == ("ruler:judge", scores["g-1"]["explanation"])
    assert store.trajectory("g-bad").reward is None
    assert store.scores("g-bad") == []


def test_a_sync_graph_and_a_call_without_a_graph_judge_the_same(server: FakeVLLM, store: Store) -> None:
    store.save_group(quality_group("g", (0.2, 0.9)))
    node = RulerNode(a_ruler(server), store)
    in_graph = one_node(node).invoke({"trajectories": ["g-0", "g-1"]})
    assert node.invoke({"trajectories": ["g-0", "g-1"]})["scores"] == in_graph["scores"]


async def test_judging_again_changes_nothing(server: FakeVLLM, store: Store, script: Script) -> None:
    """A graph that is killed in the node runs it again: no score counts twice, nor does ``combine``."""
    members = [replace(m, reward=0.4) for m in quality_group("g", (0.2, 0.9))]
    group = quality_group("g", (0.2, 0.9)).with_trajectories(members)
    store.save_group(group)

    def half(trajectory: Any, score: float) -> float:
        return 0.5 * trajectory.reward + 0.5 * score

    for _ in range(2):  # a new ruler knows no verdict
        node = RulerNode(a_ruler(server), store, combine=half)
        found = await node.ainvoke({"trajectories": ["g-0", "g-1"]})
        assert [score["reward"] for score in found["scores"]] == [pytest.approx(0.3), pytest.approx(0.65)]
    assert script.told["judge"] == 2
    assert history(store, "g-0") == [("rollout", 0.4), ("ruler:judge", pytest.approx(0.3))]


async def test_a_group_that_the_judge_cannot_score_has_no_scores(
    server: FakeVLLM, store: Store, script: Script
) -> None:
    """C30, C33."""
    script.silent = True
    store.save_group(quality_group("g", (0.2, 0.9)))
    events: list[dict[str, Any]] = []
    graph = one_node(RulerNode(a_ruler(server), store))
    found: dict[str, Any] = {}
    async for mode, what in graph.astream({"trajectories": ["g-0", "g-1"]}, stream_mode=["custom", "values"]):
        if mode == "custom":
            events.append(what)
        else:
            found = what
    assert [score["reward"] for score in found["scores"]] == [None, None]
    assert all("no JSON object" in (score["unscored"] or "") for score in found["scores"]), found["scores"]
    assert store.trajectory("g-0").reward is None
    (event,) = events
    assert (event["event"], event["group"], event["scored"], event["calls"]) == ("judged", "g", 0, 2)


async def test_what_belongs_to_no_group_is_compared_with_its_scenario(
    server: FakeVLLM, store: Store, script: Script
) -> None:
    for name, scenario in (("a", "s"), ("b", "s"), ("c", "other")):
        run = quality_run(name, 0.3 if name == "a" else 0.7, scenario=Scenario(scenario), group_id=None)
        store.save_trajectory(run)
    node = RulerNode(a_ruler(server), store, key="runs", writes="judged")
    found = await node.ainvoke({"runs": ["a", "c", "b", "a"]})
    assert [(s["trajectory"], s["group"], s["reward"]) for s in found["judged"]] == [
        ("a", "s", 0.3),
        ("b", "s", 0.7),
        ("c", "other", 0.7),
    ]
    assert script.told["judge"] == 2


async def test_a_state_without_ids_is_refused_with_the_way_out(server: FakeVLLM, store: Store) -> None:
    node = RulerNode(a_ruler(server), store)
    with pytest.raises(ConfigError, match=r"state\['trajectories'\] is NoneType"):
        await node.ainvoke({})
    with pytest.raises(ConfigError, match="is str"):
        await node.ainvoke({"trajectories": "t-1"})
    with pytest.raises(ConfigError, match=r"holds Trajectory; .*sink=store.sink\(\)"):
        await node.ainvoke({"trajectories": [quality_run("a", 0.5)]})
    with pytest.raises(UnknownTrajectoryError, match="nobody"):
        await node.ainvoke({"trajectories": ["nobody"]})


# -- the graph -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [False, True])
async def test_a_scenario_fans_out_is_judged_and_comes_back_with_rewards(
    sync: bool, server: FakeVLLM, store: Store, script: Script
) -> None:
    graph = ruler_graph(an_agent(chat(server)), a_ruler(server), store, n=3)
    if sync:
        found = await asyncio.to_thread(graph.invoke, asked("a", "b"))
    else:
        found = await graph.ainvoke(asked("a", "b"))
    assert [(r["place"], r["member"], r["scenario"]) for r in found["rollouts"]] == [
        (place, member, name) for place, name in enumerate("ab") for member in range(3)
    ]
    assert script.told == {"agent": 6, "judge": 2}
    scores = {score["trajectory"]: score for score in found["scores"]}
    for rollout in found["rollouts"]:
        kept = store.trajectory(rollout["trajectory"])
        said = kept.steps[0].message()
        assert kept.reward == scores[kept.id]["reward"] == float(said.rpartition("=")[2])
        assert kept.group_id == rollout["group"] == scores[kept.id]["group"]
    assert {len(store.group(r["group"])) for r in found["rollouts"]} == {3}


async def test_failed_rollouts_are_told_apart_and_their_siblings_are_judged(
    server: FakeVLLM, store: Store
) -> None:
    """C33."""
    graph = ruler_graph(an_agent(chat(server)), a_ruler(server), store, n=2)
    found = await graph.ainvoke(asked("a", "fail"))
    failed = [r for r in found["rollouts"] if r["scenario"] == "fail"]
    assert [r["failure"] for r in failed] == ["exception: no such mailbox"] * 2
    reasons = {s["trajectory"]: s["unscored"] for s in found["scores"]}
    assert [reasons[r["trajectory"]] for r in failed] == ["it failed (exception)"] * 2
    assert all(s["reward"] is None for s in found["scores"] if s["scenario"] == "fail")
    assert all(s["reward"] is not None for s in found["scores"] if s["scenario"] == "a")


async def test_progress_is_streamed(server: FakeVLLM, store: Store) -> None:
    graph = ruler_graph(an_agent(chat(server)), a_ruler(server), store, n=2)
    events = [event async for event in graph.astream(asked("a", "b"), stream_mode="custom")]
    assert [event["event"] for event in events] == ["rollout"] * 4 + ["collected"] + ["judged"] * 2
    assert {event["of"] for event in events[:4]} == {4}
    assert sorted(event["done"] for event in events[:4]) == [1, 2, 3, 4]
    assert sum(event["calls"] for event in events[5:]) == 2


async def test_checkpoints_hold_ids_in_strict_msgpack_and_nothing_is_done_twice_after_a_stop(
    server: FakeVLLM, store: Store, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    strict = InMemorySaver(serde=JsonPlusSerializer(allowed_msgpack_modules=None))

    def graph() -> Any:
        return ruler_graph(an_agent(chat(server)), a_ruler(server), store, n=3, checkpointer=strict)

    with caplog.at_level(logging.WARNING, "langgraph"):
        await graph().ainvoke(asked("a", "b"), THREAD, interrupt_before=["collect"])
        assert script.told == {"agent": 6}
        await graph().ainvoke(None, THREAD, interrupt_before=["judge"])
        assert script.told == {"agent": 6}
        found = await graph().ainvoke(None, THREAD)
        assert script.told == {"agent": 6, "judge": 2}
        assert len(found["scores"]) == 6
        before = {r["trajectory"] for r in found["rollouts"]}
        again = await graph().ainvoke(asked("a"), THREAD)
    warned = [r for r in caplog.records if r.name.startswith("langgraph")]
    assert not warned, "LangGraph warns of types that it may not know"
    assert len(again["scores"]) == len(again["rollouts"]) == 3
    assert not before & {r["trajectory"] for r in again["rollouts"]}


async def test_a_graph_without_scenarios_or_runs_is_refused(server: FakeVLLM, store: Store) -> None:
    graph = ruler_graph(an_agent(chat(server)), a_ruler(server), store)
    with pytest.raises(ConfigError, match="nothing to run"):
        await graph.ainvoke({"scenarios": []})
    with pytest.raises(ConfigError, match="no 'input'; it has id, inputs"):
        await graph.ainvoke({"scenarios": [{"id": "a", "input": {}}]})
    with pytest.raises(ConfigError, match="n=0"):
        ruler_graph(an_agent(chat(server)), a_ruler(server), store, n=0)
    with pytest.raises(ConfigError, match="retries=-1"):
        ruler_graph(an_agent(chat(server)), a_ruler(server), store, retries=-1)
    with pytest.raises(ConfigError, match="thread_id"):
        ruler_graph(an_agent(chat(server)), a_ruler(server), store, config=THREAD)  # type: ignore[arg-type]


# -- one rollout ---------------------------------------------------------------------------------------


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


def test_only_the_newest_batch_stays_in_a_state_in_order() -> None:
    def record(batch: int, place: int, member: int) -> RolloutRecord:
        return {"batch": batch, "place": place, "member": member}  # type: ignore[typeddict-item, return-value]

    old = [record(1, 0, 0), record(1, 0, 1)]
    assert newest_batch(old, [record(1, 0, 2)]) == [*old, record(1, 0, 2)]
    assert newest_batch(old, [record(2, 1, 0), record(2, 0, 1)]) == [record(2, 0, 1), record(2, 1, 0)]
    assert newest_batch([], []) == []


# -- agents that wait for people -----------------------------------------------------------------------


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


# -- judges that are policies --------------------------------------------------------------------------


async def test_a_chat_art_that_judges_is_not_recorded_as_the_agent(server: FakeVLLM, store: Store) -> None:
    """The policy judges its own runs: nothing that it says as a judge is trained as what it did."""
    llm = ChatART(StaticEndpoint(server.base_url, "policy@1"), max_retries=0)
    ruler = Ruler(LangChainJudge(llm))
    graph = ruler_graph(an_agent(llm), ruler, store, n=2, reward=ruler.ascore_one, require_policy_calls=True)
    found = await graph.ainvoke(asked("a"))
    assert ruler.usage.calls == 3, "each by itself, then the group"
    assert [s["unscored"] for s in found["scores"]] == [None, None]
    for trajectory in store.trajectories():
        assert [step.identity.node for step in trajectory.steps] == ["act"]
        assert "<<<run" not in str(trajectory.steps)
        assert trajectory.faults == {}
    assert len(list(store.trajectories())) == 2


def test_our_own_engine_is_a_judge_and_its_calls_belong_to_no_trajectory(tmp_path: Path) -> None:
    """A random model judges nothing; that it was asked, twice, and said no score, is what is known."""
    base = str(tiny_model(tmp_path / "base"))
    model = TrainableModel(base_model=base, project="p", name="agent", lora_rank=4)
    model.register(LocalBackend(root=tmp_path, dtype="float32", max_model_len=2048))
    with model:
        ruler = Ruler(LangChainJudge(ChatART(model, max_tokens=8, temperature=0)), token_budget=1000)
        graph = ruler_graph(an_agent(ChatART(model, max_tokens=3)), ruler, model, n=2)
        found = graph.invoke(asked("yes or no"))
        trajectories = list(model.store.trajectories())
        assert len(trajectories) == 2
        for trajectory in trajectories:
            (step,) = trajectory.steps
            assert step.trainable
            assert step.identity.node == "act"
            assert trajectory.reward is None
    assert [r["failure"] for r in found["rollouts"]] == [None, None]
    assert ruler.usage.calls == 2
    assert ruler.usage.untold == 0
    assert ruler.usage.prompt_tokens > 100
    assert all("the answer" in (s["unscored"] or "") for s in found["scores"])

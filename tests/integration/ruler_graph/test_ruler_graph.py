"""The graph that runs scenarios and judges them: fan-out, checkpoints, progress, policies as judges."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from fakes.vllm_server import FakeVLLM
from helpers.ruler_graphs import THREAD, Script, a_ruler, an_agent, asked, chat
from helpers.tiny import tiny_model
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from art_core import LocalBackend, TrainableModel
from art_core.errors import ConfigError
from art_core.inference.endpoint import StaticEndpoint
from art_core.rewards import Ruler
from art_core.store import Store
from art_langgraph import ChatART, LangChainJudge, ruler_graph
from art_langgraph.graph_records import RolloutRecord, newest_batch


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
    with pytest.raises(ConfigError, match="'a' is no scenario; give Scenario"):
        await graph.ainvoke({"scenarios": ["a"]})
    for wrong in (0, "2", 1.5):
        with pytest.raises(ConfigError, match=f"n={wrong!r}"):
            ruler_graph(an_agent(chat(server)), a_ruler(server), store, n=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="retries=-1"):
        ruler_graph(an_agent(chat(server)), a_ruler(server), store, retries=-1)
    with pytest.raises(ConfigError, match="thread_id"):
        ruler_graph(an_agent(chat(server)), a_ruler(server), store, config=THREAD)  # type: ignore[arg-type]


def test_what_would_fail_when_the_rollouts_are_made_is_refused_before(server: FakeVLLM, store: Store) -> None:
    agent = an_agent(chat(server))
    with pytest.raises(ConfigError, match=r"str is no ruler: give Ruler\(LangChainJudge"):
        ruler_graph(agent, "openai:gpt-5-mini", store)  # type: ignore[arg-type]
    for wrong in ("capitals", None):
        with pytest.raises(ConfigError, match=rf"{wrong!r} is no record: give Store.open\(project\)"):
            ruler_graph(agent, a_ruler(server), wrong)  # type: ignore[arg-type]


def test_only_the_newest_batch_stays_in_a_state_in_order() -> None:
    def record(batch: int, place: int, member: int) -> RolloutRecord:
        return {"batch": batch, "place": place, "member": member}  # type: ignore[typeddict-item, return-value]

    old = [record(1, 0, 0), record(1, 0, 1)]
    assert newest_batch(old, [record(1, 0, 2)]) == [*old, record(1, 0, 2)]
    assert newest_batch(old, [record(2, 1, 0), record(2, 0, 1)]) == [record(2, 0, 1), record(2, 1, 0)]
    assert newest_batch([], []) == []


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

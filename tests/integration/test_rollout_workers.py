"""Graphs in many processes give what they give in one."""

import multiprocessing
import threading
from pathlib import Path

import pytest
from fakes.vllm_server import FakeVLLM, completion_ids
from helpers import rollout_graphs as graphs

from art_core.errors import ConfigError
from art_core.inference.endpoint import StaticEndpoint
from art_core.store import Store
from art_core.types import Scenario
from art_langgraph import Workers, agather, gather

PATH = "helpers.rollout_graphs:chat_graph"


async def test_two_processes_give_what_one_gives_and_write_to_the_same_store(tmp_path: Path) -> None:
    topics = [Scenario(f"t{i}", {"topic": f"t{i}"}) for i in range(10)]
    with (
        FakeVLLM(lambda request: f"On {request['messages'][-1]['content']}.") as server,
        Store.open("workers", tmp_path) as store,
    ):
        model = StaticEndpoint(server.base_url, "policy@3", sink=store.sink())
        options = {"group_size": 3, "seed": 5, "model": model}
        here = await agather(graphs.chat_graph(model), topics, reward=graphs.length, **options)
        there = await agather(PATH, topics, reward="helpers.rollout_graphs:length", workers=2, **options)
        recorded = {t.id: t for t in store.trajectories()}
    assert not multiprocessing.active_children()
    assert not there.failed
    assert [g.scenario for g in there] == [g.scenario for g in here]
    for ours, theirs in zip(here, there, strict=True):
        assert theirs.rewards == ours.rewards == (2.0,) * 3
        for mine, other in zip(ours, theirs, strict=True):
            assert other.metadata == mine.metadata
            assert [s.message() for s in other.steps] == [s.message() for s in mine.steps]
            for step in other.steps:
                assert step.tokens is not None
                assert step.tokens.completion == completion_ids(step.message())
                assert str(step.policy) == "policy@3"
                assert step.identity.node == "ask"
    assert all(recorded[t.id] == t for g in there for t in g)
    assert len(recorded) == 60


async def test_a_context_reaches_the_graphs_of_other_processes() -> None:
    readers = [Scenario("ann"), Scenario("bob")]
    with FakeVLLM(lambda request: request["messages"][-1]["content"]) as server, Workers(1) as workers:
        options = {"group_size": 1, "model": StaticEndpoint(server.base_url, "policy@3"), "workers": workers}
        for context, asked in ((graphs.reader_of, ["ann", "bob"]), (graphs.Reader("eve"), ["eve", "eve"])):
            found = await agather("helpers.rollout_graphs:reading_graph", readers, context=context, **options)
            assert [t.steps[0].message() for g in found for t in g] == [f"for {name}" for name in asked]


def test_processes_may_be_kept_between_calls_from_sync_code(tmp_path: Path) -> None:
    with FakeVLLM("yes") as server, Store.open("workers", tmp_path) as store:
        with Workers(2) as workers:
            for version in (1, 2):
                model = StaticEndpoint(server.base_url, f"policy@{version}", sink=store.sink())
                groups = gather(
                    PATH, [Scenario("s", {"topic": "t"})], group_size=4, model=model, workers=workers
                )
                assert {str(s.policy) for g in groups for t in g for s in t.steps} == {f"policy@{version}"}
        assert not multiprocessing.active_children()
        assert len(list(store.trajectories())) == 8


@pytest.mark.parametrize(
    ("graph", "options", "message"),
    [
        (graphs.agent, {}, "give its import path"),
        (PATH, {"reward": lambda t: 1.0}, "the reward function is sent"),
        (PATH, {"reward": "helpers.rollout_graphs:nothing"}, "has no 'nothing'"),
        (PATH, {"workers": 0}, "workers=0"),
        (PATH, {"context": lambda scenario: scenario.id}, "the context is sent"),
        (PATH, {"config": {"configurable": {"lock": threading.Lock()}}}, "the config is sent"),
    ],
)
async def test_what_other_processes_cannot_be_given_is_refused(graph, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        await agather(graph, [Scenario("s")], group_size=1, **{"workers": 2, **options})

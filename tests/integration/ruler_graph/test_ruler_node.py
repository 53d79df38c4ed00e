"""RulerNode, which judges the trajectories that a state names, asked by a real LangGraph over real HTTP."""

from dataclasses import replace
from typing import Any

import pytest
from fakes.vllm_server import FakeVLLM
from helpers.judges import a_run, quality_group, quality_run
from helpers.ruler_graphs import Script, a_ruler, history, one_node
from helpers.trajectories import a_step

from art_core.errors import ConfigError, UnknownTrajectoryError
from art_core.store import Store
from art_core.types import Failure, RolloutStatus, Scenario
from art_langgraph import RulerNode


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

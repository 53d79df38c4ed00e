"""What a rollout becomes in Langfuse: observations, scores, texts that are long or odd."""

import json
from dataclasses import replace

from fakes.langfuse_server import LangfuseServer
from helpers.langfuse_rollouts import GRAPH, played, scores, with_steps
from helpers.trajectories import a_step
from langfuse import Langfuse

from art_core.store import Store
from art_core.types import Failure, RolloutStatus, StepIdentity, TrajectoryGroup
from art_langgraph.langfuse.client import LangfuseClient
from art_langgraph.langfuse.export import ExportOptions, export_to_langfuse
from art_langgraph.langfuse.ids import trace_id


def test_a_rollout_becomes_a_trace_of_its_nodes_tools_retrievers_and_calls(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    run = store.begin_run("agent")
    group = TrajectoryGroup(played().scenario, (played(), played("t-2")), id="g-1")
    store.save_group(group, run_id=run)
    options = ExportOptions(tags=("nightly",), metadata={"team": "games"})
    result = export_to_langfuse(store, run, client=client, options=options)
    assert (result.confirmed, result.complete, result.observations) == (2, True, 16)
    found = {o["name"]: o for o in server.of_trace(trace_id("t-1")) if o["type"] != "GENERATION"}
    calls = sorted(
        (o for o in server.of_trace(trace_id("t-1")) if o["type"] == "GENERATION"),
        key=lambda o: o["startTime"],
    )
    root, node = found["rollout"], found["player"]
    assert {name: o["type"] for name, o in found.items()} == {
        "rollout": "AGENT",
        "LangGraph": "AGENT",
        "player": "CHAIN",
        "look": "TOOL",
        "books": "RETRIEVER",
    }
    parents = {o["name"]: o["parentObservationId"] for o in found.values()}
    assert parents == {
        "rollout": None,
        "LangGraph": root["id"],
        "player": found["LangGraph"]["id"],
        "look": node["id"],
        "books": node["id"],
    }
    assert [c["parentObservationId"] for c in calls] == [node["id"], node["id"], root["id"]]
    assert (root["startTime"], root["endTime"]) == ("1970-01-01T00:16:39Z", "1970-01-01T00:16:42Z")
    assert json.loads(root["input"]) == {"board": [0, 1, 2]}
    assert json.loads(root["output"]) == ["free"]
    assert (found["look"]["level"], found["look"]["statusMessage"]) == ("ERROR", "ValueError: no")
    assert (found["books"]["level"], found["books"]["statusMessage"]) == ("WARNING", "cancelled")
    first, stray, lost = calls
    assert (first["name"], first["model"], first["version"]) == ("ChatART", "agent", "agent@2")
    assert first["usageDetails"] == {"input": 3, "output": 2, "total": 5}
    assert first["modelParameters"] == {"temperature": 1.0}
    asked = json.loads(first["input"])
    assert asked["messages"] == [{"role": "user", "content": "move 0?"}]
    assert asked["tools"][0]["function"]["name"] == "look"
    assert json.loads(first["output"]) == {"role": "assistant", "content": "5"}
    assert first["metadata"]["finish_reason"] == "stop"
    assert first["metadata"]["langgraph_checkpoint_ns"] == "player:1"
    assert (lost["level"], lost["statusMessage"]) == ("ERROR", "APIError: down")
    assert stray["usageDetails"] == {"input": 3, "output": 2}
    for o in (*found.values(), *calls):
        assert o["sessionId"] == "g-1"
        assert {"art-langgraph", "nightly", f"run:{run}", "policy:agent@2", "step:2"} == set(o["tags"])
    about = root["metadata"]
    assert (about["seed"], about["team"], about["split"]) == (7, "games", "train")
    assert (about["art"]["trajectory_id"], about["art"]["run_id"]) == ("t-1", run)


def test_nodes_that_left_no_spans_are_known_by_their_calls(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    inner = {"node": "inner", "namespace": "work:1|inner:2"}
    steps = (
        a_step("t-1", 0, identity=StepIdentity(node="work", namespace="work:1")),
        a_step("t-1", 1, identity=StepIdentity(**inner)),
        a_step("t-1", 2, identity=StepIdentity(**inner, attempt=2)),
    )
    store.save_trajectory(with_steps("t-1", *steps, node_rewards={"inner": 0.5}))
    assert export_to_langfuse(store, client=client).confirmed == 1
    found = sorted(server.of_trace(trace_id("t-1")), key=lambda o: (o["startTime"], -len(o["endTime"])))
    chains = [o for o in found if o["type"] == "CHAIN"]
    root = next(o for o in found if o["type"] == "AGENT")
    work = next(o for o in chains if o["name"] == "work")
    first, second = (o for o in chains if o["name"] == "inner")
    assert [work["parentObservationId"], first["parentObservationId"], second["parentObservationId"]] == [
        root["id"], work["id"], work["id"],
    ]  # fmt: skip
    assert (work["startTime"], work["endTime"]) == ("1970-01-01T00:16:40Z", "1970-01-01T00:16:42.250000Z")
    calls = [o for o in found if o["type"] == "GENERATION"]
    assert [o["parentObservationId"] for o in calls] == [work["id"], first["id"], second["id"]]
    assert scores(server)["node_reward"]["observationId"] == second["id"]


def test_an_answer_that_could_not_be_used_is_an_error_with_its_answer(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    spans = [s if s.id != "l" else replace(s, status="error", error="ValueError: no JSON") for s in GRAPH]
    store.save_trajectory(played(spans=tuple(spans)))
    export_to_langfuse(store, client=client)
    call = server.trace(trace_id("t-1"))["ChatART"]
    assert (call["level"], call["statusMessage"]) == ("ERROR", "ValueError: no JSON")
    assert json.loads(call["output"])["content"] == "5"


def test_ids_are_those_that_the_sdk_would_make_of_ours(server: LangfuseServer) -> None:
    assert trace_id("t-1") == Langfuse.create_trace_id(seed="t-1")


def test_rewards_reasons_and_what_people_said_become_scores(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    store.save_trajectory(played(reward=None, step_rewards={"s-t-1-0": 0.5}, node_rewards={"player": 0.25}))
    store.save_trajectory(played("t-2"))
    store.score("t-1", 0.75, components={"legal": 1.0}, author="ruler:judge", explanation="it won")
    store.add_feedback("t-1", kind="thumb", value=-1, author="ada", comment="too slow")
    store.add_feedback("t-1", kind="score", value=0.5, author="bob")
    store.add_feedback("t-1", kind="choice", value=1, author="bob", over="t-2")
    result = export_to_langfuse(
        store, client=client, options=ExportOptions(score_configs={"feedback/score": "cfg-1"})
    )
    assert result.complete
    found = scores(server)
    observed = server.trace(trace_id("t-1"))
    values = {name: (s["value"], s["dataType"]) for name, s in found.items()}
    assert values == {
        "reward": (0.75, "NUMERIC"),
        "reward/legal": (1.0, "NUMERIC"),
        "step_reward": (0.5, "NUMERIC"),
        "node_reward": (0.25, "NUMERIC"),
        "feedback/thumb": (0, "BOOLEAN"),
        "feedback/score": (0.5, "NUMERIC"),
        "feedback/choice": ("preferred", "CATEGORICAL"),
    }
    assert (found["reward"]["comment"], found["reward"]["metadata"]["author"]) == ("it won", "ruler:judge")
    assert found["step_reward"]["observationId"] == observed["ChatART"]["id"]
    assert found["node_reward"]["observationId"] == observed["player"]["id"]
    assert (found["feedback/thumb"]["comment"], found["feedback/thumb"]["metadata"]["author"]) == (
        "too slow",
        "ada",
    )
    assert found["feedback/choice"]["metadata"]["over_trace_id"] == trace_id("t-2")
    assert (found["feedback/score"]["source"], found["feedback/score"]["configId"]) == ("ANNOTATION", "cfg-1")


def test_a_failed_rollout_is_an_error_and_has_no_score(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    failure = Failure("timeout", "took 60 s", "TimeoutError")
    store.save_trajectory(played(status=RolloutStatus.FAILED, failure=failure, reward=None))
    export_to_langfuse(store, client=client)
    root = server.trace(trace_id("t-1"))["rollout"]
    assert (root["level"], root["statusMessage"]) == ("ERROR", "timeout: took 60 s")
    assert "failed:timeout" in root["tags"]
    assert scores(server) == {}


def test_large_trajectories_are_sent_in_parts_and_long_texts_are_cut_and_say_so(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    long = "☂" * 30_000
    steps = tuple(a_step("t-1", n, messages=({"role": "user", "content": long},)) for n in range(5))
    store.save_trajectory(with_steps("t-1", *steps))
    server.largest = 150_000
    options = ExportOptions(max_request_bytes=120_000, max_text=20_000)
    assert export_to_langfuse(store, client=client, options=options).confirmed == 1
    found = [o for o in server.of_trace(trace_id("t-1")) if o["type"] == "GENERATION"]
    assert len(found) == 5
    assert len(server.requests("/api/public/otel")) > 1
    assert all(o["input"].endswith("characters in the store)") for o in found)


def test_text_that_is_no_utf_8_and_numbers_that_are_no_json_arrive(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    step = a_step("t-1", messages=({"role": "user", "content": "\ud83d \x00 <b>"},))
    store.save_trajectory(with_steps("t-1", step, metrics={"loss": float("nan")}))
    assert export_to_langfuse(store, client=client).confirmed == 1
    (call,) = (o for o in server.of_trace(trace_id("t-1")) if o["type"] == "GENERATION")
    assert json.loads(call["input"])[0]["content"] == "? \x00 <b>"

import email.utils
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fakes.langfuse_server import PUBLIC_KEY, SECRET_KEY, LangfuseServer
from helpers.trajectories import a_span, a_step, a_trajectory
from langfuse import Langfuse

from art_core.errors import ConfigError
from art_core.recording import Rollout
from art_core.store import Store
from art_core.types import Failure, RolloutStatus, StepIdentity, TrajectoryGroup
from art_langgraph.langfuse.client import LangfuseClient, LangfuseRefusedError
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.export import ExportOptions, export_to_langfuse
from art_langgraph.langfuse.ids import trace_id
from art_langgraph.langfuse.ledger import Ledger


@pytest.fixture
def server() -> Iterator[LangfuseServer]:
    with LangfuseServer() as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path) as store:
        yield store


def connection(server: LangfuseServer, **changes: Any) -> LangfuseConnection:
    settings = {"requests_per_minute": 60_000, "timeout": 60, "attempts": 3, "patience": 20} | changes
    return LangfuseConnection(
        public_key=PUBLIC_KEY, secret_key=SECRET_KEY, base_url=server.base_url, **settings
    )


@pytest.fixture
def client(server: LangfuseServer) -> Iterator[LangfuseClient]:
    with LangfuseClient(connection(server)) as client:
        yield client


GRAPH = (
    a_span(0, id="g", kind="chain", name="LangGraph", parent_id=None, node=None, namespace="", tags=()),
    a_span(1, id="n", kind="chain", name="player", parent_id="g", node="player", namespace="player:1"),
    a_span(2, id="l", kind="llm", name="ChatART", parent_id="n", node="player", namespace="player:1"),
    a_span(3, id="t", kind="tool", name="look", parent_id="n", status="error", error="ValueError: no"),
    a_span(4, id="r", kind="retriever", name="books", parent_id="n", status="cancelled"),
)


def with_steps(name: str, *steps: Any, **changes: Any) -> Any:
    return replace(a_trajectory(name, 0, **changes), steps=steps)


def played(name: str = "t-1", **changes: Any) -> Any:
    where = StepIdentity(node="player", namespace="player:1", run_id="l", parent_run_id="n", graph_step=1)
    step = a_step(
        name,
        0,
        identity=where,
        sampling={"temperature": 1.0, "logprobs": True},
        tools=({"type": "function", "function": {"name": "look"}},),
        usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    )
    stray = a_step(name, 1, identity=StepIdentity(node="player", namespace="player:1"), started_at=1001.5)
    lost = a_step(name, 2, identity=StepIdentity(), error="APIError: down", response=None, tokens=None)
    return with_steps(name, step, stray, lost, **({"spans": GRAPH, "metadata": {"seed": 7}} | changes))


def scores(server: LangfuseServer, name: str = "t-1") -> dict[str, dict[str, Any]]:
    return {s["name"]: s for s in server.scores_of(trace_id(name))}


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


def test_exporting_twice_changes_nothing_and_a_new_reward_replaces_the_old_one(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    """C60: it can be repeated without duplicates."""
    store.save_trajectory(played())
    assert export_to_langfuse(store, client=client).confirmed == 1
    before = dict(server.observations), dict(server.scores)
    asked = len(server.asked)
    again = export_to_langfuse(store, client=client)
    assert (again.confirmed, again.unchanged, again.requests, len(server.asked)) == (0, 1, 0, asked)

    def without_times(observations: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        return {k: {**o, "createdAt": 0, "updatedAt": 0} for k, o in observations.items()}

    forced = export_to_langfuse(store, client=client, again=True)
    assert forced.confirmed == 1
    assert without_times(server.observations) == without_times(before[0])
    assert server.scores == before[1]
    store.score("t-1", 0.9, author="ada")
    sent = len(server.requests("/api/public/otel"))
    assert export_to_langfuse(store, client=client).confirmed == 1
    assert len(server.requests("/api/public/otel")) == sent  # observations are final; the scores go alone
    assert len(server.scores) == len(before[1])
    assert scores(server)["reward"]["value"] == 0.9
    assert without_times(server.observations) == without_times(before[0])


def test_what_is_recorded_after_the_end_is_sent_too(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    rollout = Rollout(sink=store.sink(), rollout_id="t-1")
    rollout.record(a_step("t-1", 0))
    rollout.finish(1.0)
    export_to_langfuse(store, client=client)
    rollout.record(a_step("t-1", 1))  # of a background task that outlived its graph
    assert export_to_langfuse(store, client=client).confirmed == 1
    assert len([o for o in server.of_trace(trace_id("t-1")) if o["type"] == "GENERATION"]) == 2


def test_running_rollouts_wait_until_they_end(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    rollout = Rollout(sink=store.sink(), rollout_id="t-run")
    rollout.record(a_step("t-run"))
    assert export_to_langfuse(store, client=client).running == 1
    assert not server.observations
    rollout.finish(1.0)
    assert export_to_langfuse(store, client=client).confirmed == 1
    assert scores(server, "t-run")["reward"]["value"] == 1.0


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500, "times": 2},
        {"status": 503, "times": 1, "retry_after": "0"},
        {"status": 0, "times": 2},
        {"status": 500, "times": 1, "applied": True},
        {"status": 0, "times": 1, "applied": True},
    ],
    ids=["errors", "busy", "cut", "taken, but answered with an error", "taken, but cut"],
)
@pytest.mark.parametrize("path", ["/api/public/otel", "/api/public/scores"])
def test_what_fails_for_a_while_is_sent_again_and_is_there_once(
    server: LangfuseServer, store: Store, client: LangfuseClient, path: str, fault: dict[str, Any]
) -> None:
    """C60: a failing endpoint loses nothing."""
    store.save_trajectory(played())
    server.break_(path=path, **fault)
    result = export_to_langfuse(store, client=client)
    assert (result.confirmed, result.complete) == (1, True)
    assert (len(server.observations), len(server.scores)) == (8, 1)


def test_a_server_that_says_how_long_to_wait_is_waited_for(server: LangfuseServer, store: Store) -> None:
    store.save_trajectory(played())
    server.break_(path="/api/public/otel", status=429, retry_after="1", times=1)
    with LangfuseClient(connection(server, attempts=1)) as client:
        assert export_to_langfuse(store, client=client).confirmed == 1
    first, second = (a.at for a in server.requests("/api/public/otel"))
    assert second - first >= 1.0


def test_a_server_that_asks_for_more_patience_than_there_is_ends_the_export_at_once(
    server: LangfuseServer, store: Store
) -> None:
    store.save_trajectory(played())
    tomorrow = email.utils.format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)
    server.break_(path="/api/public/otel", status=429, retry_after=tomorrow, times=None)
    with LangfuseClient(connection(server, patience=240)) as client:
        began = time.monotonic()
        result = export_to_langfuse(store, client=client)
    assert (result.left, result.requests) == (1, 1)
    assert "answers 429" in (result.stopped or "")
    assert time.monotonic() - began < 120


def test_a_dead_server_leaves_what_was_confirmed_and_says_what_is_left(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    """C60: it says what was not delivered, and the next time sends just that."""
    for number in range(6):
        store.save_trajectory(a_trajectory(f"t-{number}"))
    server.break_(path="/api/public/otel", after=1, times=None, status=500)
    options = ExportOptions(batch=2)
    seen: list[tuple[int, int]] = []
    result = export_to_langfuse(
        store, client=client, options=options, progress=lambda done, total: seen.append((done, total))
    )
    assert (result.confirmed, result.left, result.complete) == (2, 4, False)
    assert "answers 500" in (result.stopped or "")
    assert "4 left" in str(result)
    assert seen == [(0, 6), (2, 6)]
    server.mend()
    rest = export_to_langfuse(store, client=client, options=options)
    assert (rest.confirmed, rest.unchanged, rest.left) == (4, 2, 0)
    assert server.trace_ids == {trace_id(f"t-{n}") for n in range(6)}


def test_one_refused_trajectory_does_not_keep_the_others(
    server: LangfuseServer, store: Store, client: LangfuseClient
) -> None:
    store.save_trajectory(a_trajectory("t-1"))
    bad = a_span(0, name="bad", parent_id=None)
    store.save_trajectory(a_trajectory("t-2", spans=(bad,)))
    store.save_trajectory(a_trajectory("t-3", components={"odd": 1.0}))
    server.refused_observations, server.refused_scores = {"bad"}, {"reward/odd"}
    result = export_to_langfuse(store, client=client)
    assert (result.confirmed, result.left, set(result.failed)) == (1, 0, {"t-2", "t-3"})
    assert "refused: bad" in result.failed["t-2"]
    assert "'reward/odd'" in result.failed["t-3"]
    server.refused_observations, server.refused_scores = set(), set()
    assert export_to_langfuse(store, client=client).confirmed == 2


def test_wrong_keys_are_an_error_at_once(server: LangfuseServer, store: Store) -> None:
    store.save_trajectory(a_trajectory("t-1"))
    wrong = connection(server).replace(secret_key="sk-wrong")
    with (
        LangfuseClient(wrong) as client,
        pytest.raises(LangfuseRefusedError, match="check the public") as told,
    ):
        export_to_langfuse(store, client=client)
    assert len(server.asked) == 1
    assert "sk-wrong" not in f"{told.value!r} {wrong!r}"


def test_no_keys_are_an_error_that_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LANGFUSE_PUBLIC_KEY", raising=False)
    with pytest.raises(ConfigError, match="LANGFUSE_PUBLIC_KEY"):
        LangfuseConnection.from_env({})
    found = LangfuseConnection.from_env(
        {"LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk", "LANGFUSE_HOST": "http://h:3000/"}
    )
    assert found.base_url == "http://h:3000"


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


def test_a_slow_server_does_not_slow_a_rollout(server: LangfuseServer, store: Store) -> None:
    """C60: it never blocks a rollout."""
    store.save_trajectory(a_trajectory("t-1"))
    answer = threading.Event()
    server.break_(path="/api/public/otel", until=answer, status=200, times=1)
    with LangfuseClient(connection(server)) as client:
        exporting = threading.Thread(target=lambda: export_to_langfuse(store, client=client))
        exporting.start()
        while not server.asked:
            time.sleep(0.005)
        rollout = Rollout(sink=store.sink())
        rollout.record(a_step(rollout.id))
        rollout.finish(1.0)
        assert exporting.is_alive(), "the rollout ended first"
        answer.set()
        exporting.join()
    assert server.trace_ids == {trace_id("t-1")}


def test_two_projects_are_kept_apart_in_one_ledger(
    server: LangfuseServer, store: Store, tmp_path: Path
) -> None:
    store.save_trajectory(a_trajectory("t-1"))
    with LangfuseServer() as other, Ledger(tmp_path / "both") as ledger:
        for one in (server, other, server):
            with LangfuseClient(connection(one)) as client:
                export_to_langfuse(store, client=client, ledger=ledger)
        assert (len(server.trace_ids), len(other.trace_ids)) == (1, 1)
        assert len(server.requests("/api/public/otel")) == 1


def test_many_traces_go_at_the_rate_that_was_asked_for(
    server: LangfuseServer, store: Store, pytestconfig: pytest.Config
) -> None:
    count = pytestconfig.getoption("traces")
    scenario = a_trajectory("x").scenario
    step = a_step("x", tokens=None)
    for start in range(0, count, 1000):
        members = tuple(
            with_steps(f"t-{n}", replace(step, id=f"s-{n}", rollout_id=f"t-{n}"))
            for n in range(start, min(start + 1000, count))
        )
        store.save_group(TrajectoryGroup(scenario, members, id=f"g-{start}"))
    rate = 10  # requests a second: fewer than could be made meanwhile
    began = time.monotonic()
    with LangfuseClient(connection(server, requests_per_minute=60 * rate)) as client:
        result = export_to_langfuse(store, client=client, options=ExportOptions(batch=count // 40))
    assert (result.confirmed, result.left, len(server.trace_ids)) == (count, 0, count)
    assert result.scores == len(server.scores) == count
    times = sorted(a.at for a in server.asked)
    assert len(times) == result.requests >= 80
    assert times[-1] - began >= (len(times) - 1) / rate
    most = max(sum(1 for t in times if at <= t < at + 1) for at in times)
    assert most <= rate + 2, f"{most} requests within a second"  # one that was late, and the one after it

"""What a trajectory becomes in Langfuse, for any trajectory that the types allow."""

import json
from dataclasses import replace
from typing import Any

from helpers.trajectories import a_step, a_trajectory, trajectories
from hypothesis import given, settings
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from art_core.store.records import Score
from art_core.types import Trajectory
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.encoding import TraceEncoder
from art_langgraph.langfuse.ids import trace_id
from art_langgraph.langfuse.scores import trace_scores

CONNECTION = LangfuseConnection(public_key="pk", secret_key="sk")  # type: ignore[arg-type]


def spans(requests: tuple[bytes, ...]) -> list[Any]:
    whole = ExportTraceServiceRequest.FromString(b"".join(requests))
    return [s for resource in whole.resource_spans for scope in resource.scope_spans for s in scope.spans]


@settings(deadline=None, max_examples=50)
@given(trajectories())
def test_any_trajectory_is_one_tree_of_one_trace_and_the_same_each_time(trajectory: Trajectory) -> None:
    encoder = TraceEncoder(CONNECTION)
    trace = encoder.encode(trajectory, run_id="r-1")
    assert encoder.encode(trajectory, run_id="r-1") == trace
    found = spans(trace.requests)
    assert len(found) == trace.observations
    assert {s.trace_id.hex() for s in found} == {trace_id(trajectory.id)}
    ids = [s.span_id for s in found]
    assert len(set(ids)) == len(ids)
    assert [s.parent_span_id for s in found if s.parent_span_id not in ids] == [b""]
    assert all(s.end_time_unix_nano >= s.start_time_unix_nano for s in found)
    told = [s for s in found if any(a.key == "langfuse.observation.metadata.step_ids" for a in s.attributes)]
    steps = [
        step
        for s in told
        for a in s.attributes
        if a.key == "langfuse.observation.metadata.step_ids"
        for step in json.loads(a.value.string_value)
    ]
    assert sorted(steps) == sorted(step.id for step in trajectory.steps)


@settings(deadline=None, max_examples=50)
@given(trajectories())
def test_any_trajectorys_scores_are_json_and_failures_have_no_reward(trajectory: Trajectory) -> None:
    found = trace_scores(trajectory)
    json.dumps(found, allow_nan=False).encode()
    assert len({s["id"] for s in found}) == len(found)
    assert ("reward" in {s["name"] for s in found}) == (trajectory.reward is not None)
    assert trace_scores(trajectory) == found


def test_requests_are_never_larger_than_asked_for_and_hold_everything() -> None:
    steps = tuple(a_step("t-1", n, messages=({"role": "user", "content": "x" * 900},)) for n in range(40))
    trajectory = replace(a_trajectory("t-1", 0), steps=steps)
    trace = TraceEncoder(CONNECTION, max_request_bytes=10_000).encode(trajectory)
    assert len(trace.requests) > 4
    assert max(map(len, trace.requests)) <= 10_000
    assert len(spans(trace.requests)) == trace.observations == 43  # root, two nodes and calls


def test_a_judges_reason_is_the_comment_of_its_score_and_of_the_reward() -> None:
    judged = a_trajectory(
        "t-1", components={"ruler": 0.5, "odd": float("nan")}, metadata={"ruler": {"explanation": "fair"}}
    )
    found = {s["name"]: s.get("comment") for s in trace_scores(judged)}
    assert found == {"reward": "fair", "reward/ruler": "fair"}
    history = [
        Score(
            trajectory_id="t-1",
            reward=0.5,
            author="ada",
            created_at=1.0,
            components={},
            explanation="I say so",
        )
    ]
    found = {s["name"]: s.get("comment") for s in trace_scores(judged, history)}
    assert found == {"reward": "I say so", "reward/ruler": "fair"}


def test_a_new_reward_has_the_id_and_the_time_of_the_old_one() -> None:
    before, after = (trace_scores(a_trajectory("t-1", reward=reward))[0] for reward in (0.25, 0.75))
    assert before | {"value": 0.75} == after


def test_choices_of_one_call_are_one_generation() -> None:
    choices = [a_step("t-1", n, call_id="c", choice=n, started_at=1000.0) for n in range(2)]
    trajectory = replace(a_trajectory("t-1", 0), steps=tuple(choices))
    found = spans(TraceEncoder(CONNECTION).encode(trajectory).requests)
    calls = [s for s in found if any(a.value.string_value == "generation" for a in s.attributes)]
    (call,) = calls
    said = {a.key: a.value.string_value for a in call.attributes}
    assert len(json.loads(said["langfuse.observation.output"])) == 2

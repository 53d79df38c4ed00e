"""Steps and trajectories for tests: plain ones, and hypothesis strategies for any that the types allow."""

from hypothesis import strategies as st

from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Span,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
)


def a_step(rollout_id: str, number: int = 0, **changes: object) -> Step:
    values: dict[str, object] = {
        "id": f"s-{rollout_id}-{number}",
        "rollout_id": rollout_id,
        "messages": ({"role": "user", "content": f"move {number}?"},),
        "model": "agent@2",
        "started_at": 1000.0 + number,
        "duration": 0.25,
        "response": {"role": "assistant", "content": "5"},
        "finish_reason": "stop",
        "tokens": StepTokens((1, 2, 3), (4, 5), (-0.25, None)),
        "policy": PolicyVersion("agent", 2),
        "identity": StepIdentity(node="player", namespace="player:1|inner:2", tags=("a", "b")),
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    return Step(**(values | changes))  # type: ignore[arg-type]


def a_trajectory(name: str, steps: int = 2, **changes: object) -> Trajectory:
    values: dict[str, object] = {
        "id": name,
        "scenario": Scenario("board-1", {"board": [0, 1, 2]}, {"split": "train"}),
        "steps": tuple(a_step(name, n) for n in range(steps)),
        "status": RolloutStatus.FINISHED,
        "reward": 0.5,
        "started_at": 999.0,
        "duration": 3.0,
    }
    return Trajectory(**(values | changes))  # type: ignore[arg-type]


finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(min_value=0, max_value=1e10)
# Half surrogates are what a byte-level model may sample and JSON's escapes may carry.
texts = st.text(max_size=8) | st.sampled_from(["", "\x00", "\r\n", "\u2028", "☂", "\ud83d"])
names = st.text(min_size=1, max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(texts, json_values, max_size=3)
rewards = st.dictionaries(names, finite, max_size=3)
policies = st.builds(PolicyVersion, names, st.integers(0, 2**31 - 1))
ids = st.integers(-(2**31), 2**31 - 1)
logprobs = st.none() | st.floats(max_value=0, allow_nan=False)


@st.composite
def tokens(draw: st.DrawFn) -> StepTokens:
    # Few short lists, repeated: prompts cross the bounds of the store's blocks.
    prompt = draw(st.lists(ids, min_size=1, max_size=6)) * draw(st.sampled_from([1, 2, 100, 256]))
    completion = draw(st.lists(ids, max_size=5))
    return StepTokens(
        tuple(prompt),
        tuple(completion),
        tuple(draw(st.lists(logprobs, min_size=len(completion), max_size=len(completion)))),
    )


def identities() -> st.SearchStrategy[StepIdentity]:
    return st.builds(
        StepIdentity,
        node=st.none() | names,
        namespace=names,
        graph_step=st.none() | st.integers(0, 1000),
        call_index=st.integers(0, 1000),
        attempt=st.integers(1, 9),
        run_id=st.none() | names,
        parent_run_id=st.none() | names,
        tags=st.lists(names, max_size=2).map(tuple),
        retries=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    )


def steps(step_id: str, rollout_id: str) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        id=st.just(step_id),
        rollout_id=st.just(rollout_id),
        messages=st.lists(json_objects, max_size=3).map(tuple),
        model=names,
        started_at=seconds,
        duration=seconds,
        call_id=names,
        choice=st.integers(0, 9),
        tools=st.lists(json_objects, max_size=2).map(tuple),
        sampling=json_objects,
        response=st.none() | json_objects,
        finish_reason=st.none() | st.sampled_from(["stop", "length", "tool_calls"]),
        tokens=st.none() | tokens(),
        policy=st.none() | policies,
        identity=identities(),
        time_to_first_token=st.none() | seconds,
        raw_logprobs=st.booleans(),
        untrainable=st.none() | names,
        error=st.none() | names,
        usage=st.dictionaries(names, st.integers(0, 10**6), max_size=2),
    )


def a_span(number: int = 0, **changes: object) -> Span:
    values: dict[str, object] = {
        "id": f"p-{number}",
        "kind": "tool",
        "name": "look",
        "started_at": 1000.0 + number,
        "duration": 0.5,
        "parent_id": "p-0" if number else None,
        "node": "player",
        "namespace": "player:1",
        "inputs": {"cell": number},
        "outputs": ["free"],
        "tags": ("seq:step:1",),
    }
    return Span(**(values | changes))  # type: ignore[arg-type]


def spans(span_id: str) -> st.SearchStrategy[Span]:
    return st.builds(
        Span,
        id=st.just(span_id),
        kind=st.sampled_from(["chain", "llm", "tool", "retriever"]),
        name=names,
        started_at=seconds,
        duration=seconds,
        status=st.sampled_from(["ok", "error", "interrupted", "cancelled"]),
        parent_id=st.none() | names,
        node=st.none() | names,
        namespace=texts,
        attempt=st.integers(1, 9),
        inputs=json_values,
        outputs=json_values,
        error=st.none() | texts,
        tags=st.lists(names, max_size=2).map(tuple),
    )


@st.composite
def trajectories(draw: st.DrawFn, trajectory_id: str = "t-1") -> Trajectory:
    status = draw(st.sampled_from(RolloutStatus))
    count = draw(st.integers(0, 3))
    found = [draw(steps(f"s-{trajectory_id}-{n}", trajectory_id)) for n in range(count)]
    traced = [draw(spans(f"p-{n}")) for n in range(draw(st.integers(0, 2)))]
    scenario = st.builds(Scenario, id=names, inputs=json_objects, metadata=json_objects)
    return Trajectory(
        id=trajectory_id,
        scenario=draw(scenario),
        steps=tuple(sorted(found, key=lambda step: step.started_at)),
        group_id=draw(st.none() | names),
        status=status,
        reward=None if status is RolloutStatus.FAILED else draw(st.none() | finite),
        components=draw(rewards),
        step_rewards=draw(rewards),
        node_rewards=draw(rewards),
        metrics=draw(st.dictionaries(names, st.floats(allow_nan=False), max_size=2)),
        metadata=draw(json_objects),
        faults=draw(st.dictionaries(names, st.integers(0, 99), max_size=2)),
        failure=draw(st.builds(Failure, names, names, st.none() | names))
        if status is RolloutStatus.FAILED
        else None,
        started_at=draw(seconds),
        duration=draw(st.none() | seconds),
        spans=tuple(sorted(traced, key=lambda span: span.started_at)),
    )

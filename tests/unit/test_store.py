"""The store in one process: what is written comes back, and what is refused says why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from art_core.errors import RewardError, StoreError, UnknownTrajectoryError
from art_core.recording import Rollout
from art_core.store import RunState, Store
from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
    TrajectoryGroup,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("games", tmp_path) as store:
        yield store


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


def test_a_recorded_rollout_is_read_back_as_it_ended(store: Store) -> None:
    rollout = Rollout(Scenario("s", {"n": 1}), sink=store.sink(), group_id="g-1", metadata={"seed": 7})
    for number in range(3):
        rollout.record(a_step(rollout.id, number))
    rollout.components["style"] = 0.25
    ended = rollout.finish(0.75)
    assert store.trajectory(rollout.id) == ended
    assert list(store.trajectories(group_id="g-1")) == [ended]
    assert [s.author for s in store.scores(rollout.id)] == ["rollout"]


def test_a_failed_rollout_keeps_its_steps_and_refuses_a_reward(store: Store) -> None:
    """C10."""
    rollout = Rollout(sink=store.sink())
    rollout.record(a_step(rollout.id))
    ended = rollout.fail(Failure("exception", "boom", "builtins.ValueError"))
    assert store.trajectory(rollout.id) == ended
    with pytest.raises(RewardError, match="boom"):
        store.score(rollout.id, 1.0, author="judge")
    assert store.scores(rollout.id) == []


def test_a_reward_that_is_no_number_is_refused_and_the_old_one_stays(store: Store) -> None:
    store.save_group(TrajectoryGroup(Scenario("s"), (a_trajectory("t-1"),), "g"))
    with pytest.raises(RewardError, match="t-1"):
        store.score("t-1", float("nan"), author="judge")
    assert store.trajectory("t-1").reward == 0.5


def test_a_steps_rollout_must_have_begun(store: Store) -> None:
    with pytest.raises(UnknownTrajectoryError, match="t-nowhere"):
        store.sink().append(a_step("t-nowhere")).result()


def test_runs_metrics_versions_and_events_are_kept(store: Store) -> None:
    run = store.begin_run("agent", {"lr": 1e-5})
    store.log_metrics(run, 1, {"loss": 0.5, "kl": float("nan")})
    store.add_version(PolicyVersion("agent", 1), "/tmp/agent@1", metadata={"step": 1}, run_id=run)
    store.add_event(run, "skipped_update", "KL was 2.0", {"kl": 2.0})
    store.end_run(run, RunState.STOPPED)
    (ended,) = store.runs()
    assert (ended.model, ended.config, ended.state) == ("agent", {"lr": 1e-5}, RunState.STOPPED)
    assert [(m.step, m.name, str(m.value)) for m in store.metrics(run)] == [
        (1, "loss", "0.5"),
        (1, "kl", "nan"),
    ]
    latest = store.latest_version("agent")
    assert latest is not None
    assert latest.policy.name == "agent@1"
    assert latest.adapter_dir == Path("/tmp/agent@1")
    assert [e.message for e in store.events(run)] == ["KL was 2.0"]
    with pytest.raises(StoreError, match="agent@1"):
        store.add_version(PolicyVersion("agent", 1), "/tmp/other")

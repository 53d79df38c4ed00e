"""Metrics of rollouts and of time, and the catalogue that says what each one means."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.trajectories import a_step, a_trajectory

from art_core.observe.gathered import MOST_NODES, gathered_metrics, succeeded
from art_core.observe.metrics import BEGIN, END, METRICS, metrics_table, resolved, spec_of
from art_core.observe.phases import Phases, Training
from art_core.observe.rollout_watch import RolloutWatch
from art_core.recording import Rollout
from art_core.rewards.judge import Usage
from art_core.rewards.judgement import Judgement, Scored
from art_core.store import EndedRollout, Store
from art_core.types import (
    Failure,
    RolloutStatus,
    Scenario,
    StepIdentity,
    Trajectory,
    TrajectoryGroup,
)

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def group(*members: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(Scenario("board-1"), members, "g-1")


def failed(name: str, cause: str) -> Trajectory:
    return a_trajectory(
        name, steps=0, status=RolloutStatus.FAILED, reward=None, failure=Failure(cause, "it broke")
    )


# -- the catalogue -----------------------------------------------------------------------------------


def test_every_metric_says_what_it_is_in_which_unit_and_under_which_heading() -> None:
    for name, spec in METRICS.items():
        assert spec.name == name
        assert spec.unit
        assert spec.what.endswith("."), name
        assert spec.group


def test_a_name_that_a_run_brings_along_is_found_by_its_pattern() -> None:
    assert resolved("node/plan/step/latency") == (METRICS["node/<name>/latency"], "plan/step")
    assert resolved("reward/component_std/x") == (METRICS["reward/component_std/<name>"], "x")
    assert spec_of("reward_mean") is METRICS["reward_mean"]
    assert spec_of("node//calls") is spec_of("eval/win_rate") is None


def test_the_documented_table_is_the_catalogue() -> None:
    """Run ``python -m art_core.observe.metrics docs/metrics.md`` to bring the page up to date."""
    (table,) = re.findall(f"{BEGIN}(.*?){END}", DOCS.read_text(), re.DOTALL)
    assert table.strip() == metrics_table().strip()


# -- rollouts ----------------------------------------------------------------------------------------


def test_rewards_are_told_by_component_and_failures_by_cause() -> None:
    members = (
        a_trajectory("t-1", reward=1.0, components={"legal": 1.0}, metrics={"moves": 3.0, "weight/legal": 2}),
        a_trajectory("t-2", reward=0.0, components={"legal": 0.5}, metrics={"moves": 5.0}),
        failed("t-3", "timeout"),
        failed("t-4", "timeout"),
        replace(failed("t-5", "judge"), components={"legal": -9.0}, faults={"unattributed_calls": 2}),
    )
    even = (a_trajectory("t-6", reward=0.5), a_trajectory("t-7", reward=0.5))
    told = gathered_metrics([group(*members), group(*even)])
    assert told["reward/component/legal"] == 0.75
    assert told["reward/component_std/legal"] == 0.25
    assert told["reward_group_std"] == 0.25  # 0.5 of the first group, 0 of the second
    assert told["rollout/metric/moves"] == 4.0
    assert told["failures/timeout"] == 2
    assert told["failures/judge"] == 1
    assert told["faults/unattributed_calls"] == 2
    assert told["calls"] == 8
    assert told["tokens_sampled"] == 16
    assert told["tokens_prompt"] == 24
    assert told["rollout_seconds_mean"] == 3.0
    assert told["temperature_mean"] == 1.0
    assert "success_rate" not in told
    assert "judge_calls" not in told
    assert [name for name in told if spec_of(name) is None] == []


def test_nothing_is_told_of_nothing() -> None:
    assert gathered_metrics([]) == {}
    only_failures = gathered_metrics([group(failed("t-1", "exception"))])
    assert only_failures == {"failures/exception": 1.0, "calls": 0.0, "rollout_seconds_mean": 3.0}


@pytest.mark.parametrize(
    ("changes", "threshold", "expected"),
    [
        ({"components": {"success": 1.0}, "metrics": {"success": 0.0}}, None, True),
        ({"metrics": {"success": 0.0}, "metadata": {"success": True}}, None, False),
        ({"metadata": {"success": True}}, 0.9, True),
        ({"metadata": {"success": "yes"}}, None, None),
        ({"reward": 0.5}, 0.5, True),
        ({"reward": 0.5}, 0.75, False),
        ({"reward": None}, 0.5, None),
        ({"reward": 0.5}, None, None),
    ],
)
def test_success_is_what_the_rollout_says_else_what_its_reward_reaches(
    changes: dict[str, Any], threshold: float | None, expected: bool | None
) -> None:
    assert succeeded(a_trajectory("t-1", **changes), threshold) is expected
    assert succeeded(failed("t-2", "timeout"), threshold) is None


def test_each_node_has_calls_answers_latency_and_reward() -> None:
    def step(name: str, number: int, node: str, **changes: Any) -> Any:
        return a_step(name, number, identity=StepIdentity(node=node), **changes)

    one = a_trajectory("t-1", node_rewards={"plan": 1.0}, step_rewards={"s-t-1-0": -9.0, "s-t-1-1": 0.5})
    one = replace(one, steps=(step("t-1", 0, "plan", duration=1.0), step("t-1", 1, "write", duration=2.0)))
    other = a_trajectory("t-2", step_rewards={"s-t-2-0": 0.0})
    textual = step("t-2", 0, "plan", tokens=None, usage={"completion_tokens": 8}, duration=2.0)
    told = gathered_metrics([group(one, replace(other, steps=(textual,)))])
    assert told["node/plan/calls"] == 1.0
    assert told["node/plan/tokens"] == (2 + 8) / 2
    assert told["node/plan/latency"] == 1.5
    assert told["node/plan/reward"] == 0.5  # 1.0 for the whole node in one rollout, 0.0 for a step in another
    assert told["node/write/calls"] == 0.5
    assert told["node/write/reward"] == 0.5


def test_a_graph_that_makes_names_up_does_not_make_endless_metrics() -> None:
    steps = tuple(
        a_step("t-1", n, identity=StepIdentity(node=f"worker-{n if n % 3 else 0:04}")) for n in range(900)
    )
    told = gathered_metrics([group(replace(a_trajectory("t-1"), steps=steps))])
    nodes = {name for name in told if name.startswith("node/") and name.endswith("/calls")}
    assert len(nodes) == MOST_NODES
    assert "node/worker-0000/calls" in nodes  # the one with the most calls


def judged(members: TrajectoryGroup, **changes: Any) -> TrajectoryGroup:
    values: dict[str, Any] = {
        "author": "ruler:judge",
        "scores": {t.id: Scored(0.5, (0.5,), "so so") for t in members},
        "usage": Usage(calls=2, prompt_tokens=100, completion_tokens=10),
        "started_at": 1003.0,
        "seconds": 2.0,
    }
    return Judgement(**(values | changes)).apply(members)


def test_a_judge_is_counted_once_for_each_group() -> None:
    groups = [
        judged(group(a_trajectory("t-1"), a_trajectory("t-2")), cost=0.25),
        judged(group(a_trajectory("t-3")), scores={}, unscored="it was silent", cost=0.5),
        group(a_trajectory("t-4")),
    ]
    told = gathered_metrics(groups)
    assert told["judge_calls"] == 4
    assert told["judge_prompt_tokens"] == 200
    assert told["judge_completion_tokens"] == 20
    assert told["judge_cost"] == 0.75
    assert "judge_cost" not in gathered_metrics([judged(group(a_trajectory("t-1")))])


# -- time --------------------------------------------------------------------------------------------


def test_the_phases_of_a_step_add_up_to_its_time() -> None:
    # Rollouts from 999 to 1002 and 1001 to 1004, judged from 1003 to 1005; then the caller thinks till 1007.
    played = judged(group(a_trajectory("t-1"), a_trajectory("t-2", started_at=1001.0)))
    phases = Phases(begun=998.0)
    told = phases.metrics([played], Training(1007.0, 1008.0, 1018.0, 1020.0), trained_tokens=40)
    assert told["time/rollout"] == 5.0
    assert told["time/judge"] == 1.0  # of its two seconds, one went by while a rollout ran
    assert told["time/wait"] == 1.0 + 2.0
    assert told["time/train"] == 10.0
    assert told["time/publish"] == 1.0 + 2.0
    assert told["time/step"] == 22.0
    assert sum(told[f"time/{p}"] for p in ("rollout", "judge", "wait", "train", "publish")) == 22.0
    assert told["tokens_per_second/rollout"] == 8 / 5
    assert told["tokens_per_second/train"] == 4.0


def test_rollouts_beside_training_cost_no_time_of_their_own() -> None:
    phases = Phases(begun=900.0)
    phases.metrics([], Training(990.0, 990.0, 1000.5, 1000.5))
    told = phases.metrics([group(a_trajectory("t-1"))], Training(1003.0, 1003.0, 1005.0, 1005.0))
    assert told["time/rollout"] == 1.5  # from 1000.5, when the step before ended, to 1002
    assert told["time/wait"] == 1.0
    assert told["tokens_per_second/rollout"] == 4 / 3  # they ran for three seconds
    assert "time/judge" not in told


def test_rollouts_that_nobody_trains_take_time_too() -> None:
    dropped = EndedRollout(seq=1, id="t-9", cause="timeout", started_at=1001.0, duration=4.0)
    told = Phases(begun=999.0).metrics(
        [group(a_trajectory("t-1"))], Training(1006.0, 1006.0, 1007.0, 1007.0), [dropped]
    )
    assert told["time/rollout"] == 6.0
    assert told["time/wait"] == 1.0


def test_each_rollout_that_ended_is_told_once_however_long_it_ran(tmp_path: Path) -> None:
    with Store.open("games", tmp_path) as store:
        run = store.begin_run("agent")
        other = Rollout(sink=store.sink())
        rollouts = [Rollout(sink=store.sink(run)) for _ in range(4)]
        watch = RolloutWatch(store, run)
        assert watch.ended() == []
        rollouts[0].finish(1.0)
        rollouts[2].fail(Failure("timeout", "too slow"))
        other.fail(Failure("timeout", "too slow"))  # of no run of ours
        first = watch.ended()
        assert [(r.id, r.cause) for r in first] == [(rollouts[0].id, None), (rollouts[2].id, "timeout")]
        rollouts[3].finish(0.0)
        assert [r.id for r in watch.ended()] == [rollouts[3].id]
        rollouts[1].fail(Failure("exception", "boom"))  # it had begun before those that were told
        assert [(r.id, r.cause) for r in watch.ended()] == [(rollouts[1].id, "exception")]
        assert watch.ended() == []
        late = Rollout(sink=store.sink(run))
        late.finish(1.0)
        assert [r.id for r in watch.ended()] == [late.id]


def test_a_warm_start_tells_no_rollouts() -> None:
    told = Phases(begun=10.0).metrics([], Training(12.0, 12.0, 20.0, 21.0))
    assert told == {"time/wait": 2.0, "time/train": 8.0, "time/publish": 1.0, "time/step": 11.0}


def test_a_clock_that_was_set_back_gives_no_negative_time() -> None:
    told = Phases(begun=2000.0).metrics(
        [group(a_trajectory("t-1"))], Training(1007.0, 1006.0, 1005.0, 1004.0)
    )
    assert all(value >= 0 for value in told.values())

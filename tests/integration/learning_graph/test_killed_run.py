"""A learning graph that is killed at every node, and resumed."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.vllm_server import FakeVLLM
from helpers.killable_graph import GROUP_SIZE, NODES, PER_STEP, SCENARIOS, STEPS
from helpers.learning_graphs import verdict

from art_core.observe.metrics import spec_of
from art_core.store import Store
from art_core.types import RolloutStatus

HERE = Path(__file__).parent


POINTS = [
    *(f"{node}:{when}:1" for node in ("plan", "trial", "evaluate") for when in ("enter", "exit")),
    *("rollout:enter:3", "rollout:exit:1", "rollout:exit:1", "collect:enter:1", "collect:exit:1"),
    *("judge:enter:1", "judge:exit:1", "judge:exit:1", "train:enter:1", "save", "train:exit:1"),
    # In the second step, between what training keeps; the second of them while that is being made good.
    *("rollout:exit:1", "metrics", "version", "plan:exit:1"),
]
"""Where each life ends. What was done before is not called again, so only a first call is sure to come."""


def lived(base: str, root: Path, points: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Run to the end through all these deaths; the last state, and the questions that the judge was asked."""
    script = HERE.parents[1] / "helpers" / "killable_graph.py"
    path = os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1])])
    with FakeVLLM(verdict) as judge:
        done = subprocess.run(
            [sys.executable, str(script), base, str(root), judge.base_url, *points],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=560,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        questions = [json.dumps(body["messages"]) for body in judge.bodies]
    return json.loads((root / "state.json").read_text()), questions


def weights(root: Path) -> dict[str, bytes]:
    found = sorted((root / "p/agent/checkpoints").glob("checkpoint-*/adapter/adapter_model.safetensors"))
    return {path.parts[-3]: path.read_bytes() for path in found}


def figures(store: Store) -> dict[int, dict[str, float]]:
    """What the record says of each training step, whichever life said it; without times."""
    found: dict[int, dict[str, float]] = {}
    for run in store.runs():
        for metric in store.metrics(run.id):
            found.setdefault(metric.step, {})[metric.name] = metric.value
    return found


def without_ids(state: dict[str, Any]) -> list[Any]:
    """What a state says, without the ids that follow from the run's."""
    ids = {"group", "trajectory"}
    records = [*state["rollouts"], *state["trials"], *state["scores"]]
    plain = [{k: v for k, v in record.items() if k not in ids} for record in records]
    return [state["step"], state["policy"], state["history"], state["evaluations"], plain]


@pytest.mark.timeout(600)  # 22 processes one after the other
def test_a_run_that_was_killed_at_every_node_ends_as_one_that_never_was(base: str, tmp_path: Path) -> None:
    """C50."""
    assert {point.split(":")[0] for point in POINTS} >= set(NODES)
    whole, asked = lived(base, tmp_path / "whole", ())
    killed, asked_again = lived(base, tmp_path / "killed", POINTS)
    assert without_ids(killed) == without_ids(whole)
    assert [record["updated"] for record in whole["history"]] == [True] * STEPS
    assert list(weights(tmp_path / "whole")) == list(weights(tmp_path / "killed")) != []
    assert weights(tmp_path / "whole") == weights(tmp_path / "killed")
    assert sorted(asked_again) == sorted(asked)
    assert len(set(asked)) == len(asked), "no question was paid twice"
    with Store.open("p", tmp_path / "whole") as one, Store.open("p", tmp_path / "killed") as other:
        names = [name for name in whole["metrics"] if (s := spec_of(name)) is None or s.unit != "seconds"]
        assert {"loss", "grad_norm", "entropy", "reward_mean"} <= {*names}
        expected, found = figures(one), figures(other)
        assert expected.keys() == found.keys() == set(range(STEPS + 1))
        assert expected.pop(0) == found.pop(0), "the evaluation before the first step"
        for step, values in expected.items():
            assert {k: values[k] for k in names} == {k: found[step][k] for k in names}
        assert [v.policy for v in other.versions("agent")] == [v.policy for v in one.versions("agent")]
        for store in (one, other):
            ended = [t for t in store.trajectories(with_steps=False) if t.status is not RolloutStatus.RUNNING]
            kinds = Counter(t.metadata["kind"] for t in ended)
            assert kinds == {"rollout": STEPS * PER_STEP * GROUP_SIZE, "trial": 3 * len(SCENARIOS)}
            for trajectory in ended:
                authors = [score.author for score in store.scores(trajectory.id)]
                judged = ["ruler:judge"] if trajectory.metadata["kind"] == "rollout" else []
                assert authors == ["rollout", *judged]
                trained = {step.train_step for step in store.trained(trajectory.id)}
                assert trained <= {trajectory.metadata["batch"]}
                assert bool(trained) <= (trajectory.metadata["kind"] == "rollout")

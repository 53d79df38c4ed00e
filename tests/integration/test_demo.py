"""The demo as its users start it, small: a tiny random model in place of the real one."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import tiny_model

from art_core.store import Store

ROOT = Path(__file__).parents[2]
SMALL = ("--steps", "2", "--opponents", "2", "--group-size", "8", "--held-out", "4")
# Warm enough that some moves are legal, and a group's games end differently.
WARM = ("--warm-steps", "80", "--warm-learning-rate", "1e-2")
CHOSEN = ("--workers", "2", "--evaluate", "greedy", "--mixed-opponents", "--decay")
KNOBS = ("--set", "entropy_coef=0.01", "--set", "loss=dapo")


@dataclass(frozen=True)
class Told:
    """What a demo left and said."""

    out: Path
    result: dict[str, Any]
    printed: str


def demo(model: Path, out: Path) -> Told:
    """Run it to its end."""
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples/tic_tac_toe/demo.py"),
            *("--model", str(model), "--out", str(out), "--deterministic", "--seed", "1"),
            *(*SMALL, *WARM, *CHOSEN, *KNOBS),
        ],
        capture_output=True,
        text=True,
        timeout=250,
        env={
            **{name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")},
            "COLUMNS": "100",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = out.glob("player-*/result.json")
    return Told(out, json.loads(result.read_text()), done.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("demo") / "model", hidden=256)


@pytest.fixture(scope="module")
def told(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return demo(model, tmp_path_factory.mktemp("told"))


def test_the_demo_tells_its_whole_story_and_keeps_its_record(told: Told) -> None:
    """C71: no API key, no GPU, no model hub."""
    result = told.result
    assert result["options"]["set"] == ["entropy_coef=0.01", "loss=dapo"]
    assert result["before"] == result["evaluations"][1]
    assert result["after"] == result["evaluations"][2]
    assert str(told.out) not in json.dumps(result), "it can be published as it is"
    assert [e["name"] for e in result["evaluations"]] == ["as it comes", "warm start", "trained"]
    assert [s["step"] for s in result["steps"]] == [1, 2]
    assert all(e["games"] == 4 for e in result["evaluations"])
    for shown in ("held-out games", "GRPO, 2 of 2 steps", "before", "after", "curves", "adapter", "record"):
        assert shown in told.printed
    (run,) = told.out.glob("player-*")
    assert (run / "curves.png").stat().st_size > 10_000
    assert "plotly" in (run / "curves.html").read_text()
    assert (run / "adapter/adapter_model.safetensors").exists()
    with Store.open("tic-tac-toe", told.out) as store:
        games = list(store.trajectories(status="finished"))
        assert len(games) == 3 * 4 + 2 * 2 * 8
        assert len({game.scenario.id for game in games}) == 4 + 2 * 2 * 8
        assert {step.sampling["temperature"] for game in games for step in game.steps} == {0.0, 1.0}
        assert all(step.trainable for game in games for step in game.steps)
        assert {step.identity.node for game in games for step in game.steps} == {"player"}


def test_a_deterministic_demo_gives_the_same_curve_to_the_last_digit_twice(
    told: Told, model: Path, tmp_path: Path
) -> None:
    """Also where processes play, whose calls come in another order each time."""
    first = figures(told)
    assert first == figures(demo(model, tmp_path))
    assert any(row.get("kl") is not None for row in first)


def figures(told: Told) -> list[dict[str, Any]]:
    """The curves' numbers, without those that are times."""
    timed = ("seconds", "play_seconds", "train_seconds")
    rows = (*told.result["steps"], *told.result["evaluations"])
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]

"""The tuning benchmark's forms and tables: no run is made."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from art_core import TrainConfig
from benchmarks.tuning_forms import CPU, FORMS
from benchmarks.tuning_table import PANELS, draw, markdown, ratios
from examples.tic_tac_toe.demo import Demo, parse_options

ROOT = Path(__file__).parents[2]
RUNS = [(form, variant) for form in FORMS for variant in FORMS[form].variants]


def demo(monkeypatch: pytest.MonkeyPatch, form: str, variant: str) -> Demo:
    """The demo as a variant would run it, up to where it would begin."""
    given = FORMS[form].options(variant, 3, ["--model", "model"])
    monkeypatch.setattr(sys, "argv", ["demo.py", *given])
    return Demo(parse_options(), Console())


@pytest.mark.parametrize(("form", "variant"), RUNS)
def test_the_demo_reads_every_variant_and_each_but_the_base_changes_something(
    form: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, base = demo(monkeypatch, form, variant), demo(monkeypatch, form, "base")
    assert found.options.seed == 3
    same = (found.options, found.train_config()) == (base.options, base.train_config())
    assert same == (variant == "base")
    assert any(variant in variants for variants in PANELS.values()) == (variant != "base")


@pytest.mark.parametrize("variant", [v for v in CPU.variants if v not in {"half_batch", "one_update"}])
def test_variants_of_the_small_form_keep_the_games_and_the_updates_of_a_step(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (found := demo(monkeypatch, "cpu", variant)).options
    config: TrainConfig = found.train_config()
    assert options.opponents * options.group_size == 128
    assert config.groups_per_update is not None
    assert options.opponents / config.groups_per_update * config.epochs == 2
    assert options.steps == 12


def run(
    variant: str, seed: int, won: float | None, rewards: tuple[float, ...] = (0.25, 0.75)
) -> dict[str, Any]:
    """A run's figures as `tuning.py` keeps them; without ``won`` it was cut off."""
    rates = {"win_rate": 0.4, "illegal_rate": 0.25}
    return {
        "variant": variant,
        "seed": seed,
        "seconds": 90.0,
        "before": rates,
        "after": None if won is None else {"win_rate": won, "illegal_rate": 0.005},
        "steps": [
            {"reward": reward, "entropy": entropy}
            for reward, entropy in zip(rewards, (0.5, None), strict=True)
        ],
    }


FOUND = [
    {"variant": "cispo", "seed": 0, "log": "it failed"},
    run("gspo", 0, 0.6),
    run("dapo", 0, None),
    run("base", 1, 0.9, (0.5, 1.0)),
    run("base", 0, 0.7),
]


def test_the_table_has_the_base_first_and_says_how_far_its_seeds_lie_apart() -> None:
    _, _, first, second, gspo, _, noise = markdown(FOUND, CPU).splitlines()
    assert first == "| nothing | 0 | 40.0% | 70.0% | 0.5% | 0.500 | 0.50 | 1.5 |"
    assert second == "| nothing | 1 | 40.0% | 90.0% | 0.5% | 0.750 | 0.50 | 1.5 |"
    assert gspo == "| `loss=gspo` | 0 | 40.0% | 60.0% | 0.5% | 0.500 | 0.50 | 1.5 |"
    assert "2 seeds" in noise
    assert "20.0 points" in noise
    assert "0.250 of mean reward" in noise
    assert "0.00 nats" in noise
    assert "not known" in markdown(FOUND[:2], CPU)
    assert ratios(FOUND) == {"gspo": pytest.approx(0.75), "base": pytest.approx(1.0)}


def test_the_picture_is_drawn_from_whole_runs_alone(tmp_path: Path) -> None:
    draw(FOUND, tmp_path / "tuning.png", "a machine")
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no run of the base"):
        draw(FOUND[:3], tmp_path / "nothing.png", "a machine")
    assert not (tmp_path / "nothing.png").exists()


def test_the_table_of_the_docs_is_that_of_the_results() -> None:
    """Write it anew with ``python benchmarks/tuning.py --cpu --show``."""
    kept = json.loads((ROOT / "benchmarks/results/tuning.json").read_text())["raw"]
    assert kept["form"] == "cpu"
    assert kept["base"] == list(CPU.base)
    assert markdown(kept["runs"], CPU) in (ROOT / "docs/choosing-an-algorithm.md").read_text()

"""A sharded model's passes cannot be made again, so whether they fit is foreseen.

Memory is made up here: a GPU's is measured in tests/gpu/test_distributed.py.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.ranks import tiny_policy
from helpers.tiny import tiny_model
from helpers.training import group, step, trajectory

from art_core.config import GuardrailConfig, TrainConfig
from art_core.training import footprint
from art_core.training.footprint import SIZES, SURE, Foresight
from art_core.training.grpo import Trainer
from art_core.training.ranks import Alone
from art_core.types import TrajectoryGroup

FIXED, PER_TOKEN = 1000, 10
CONFIG = TrainConfig(
    learning_rate=1e-3,
    token_budget=1024,
    guardrails=GuardrailConfig(max_kl=None, max_norm_growth=None),
)


class Sharded(Alone):
    """One rank that shares its model with others, who see what it sees unless one of them is short."""

    sharded = True
    another_is_short = False

    def any(self, flag: bool) -> bool:
        return flag or self.another_is_short


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the passes that were measured; each takes what the line says."""
    sizes: list[int] = []

    def peak(policy: object, tree: object) -> int:
        sizes.append(min(SIZES, key=lambda size: abs(size - len(tree))))  # type: ignore[arg-type]
        return FIXED + PER_TOKEN * sizes[-1]

    monkeypatch.setattr(footprint, "peak_memory", peak)
    return sizes


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def have(left: float) -> None:
        monkeypatch.setattr(footprint, "available_memory", lambda device: left)

    return have


def trainer(model: Path, ranks: Alone) -> Trainer:
    """As on a GPU, whose memory can be foreseen."""
    found = Trainer(tiny_policy(model, model / "no-faults")("cpu"), CONFIG, ranks=ranks)
    found._keeping._foresight = Foresight(found.policy, ranks)  # type: ignore[attr-defined]
    return found


def groups() -> list[TrajectoryGroup]:
    dice = random.Random(0)
    return [
        group(
            *(
                trajectory(f"{i}", dice.random(), step(f"{i}", [5, *[6] * 40], [7, 8, dice.randint(9, 40)]))
                for i in range(6)
            )
        )
    ]


def test_passes_that_fit_keep_what_they_need(
    model: Path, measured: list[int], memory: Callable[[float], None]
):
    memory(100 * (FIXED + PER_TOKEN * SIZES[1]))
    sharing = trainer(model, Sharded())
    assert sharing.policy.gradient_checkpointing  # until more is known
    for _ in range(2):
        report = sharing.train(groups())
        assert report.updated
        assert not report.events
        assert not sharing.policy.gradient_checkpointing
    assert measured == list(SIZES)  # once, for both updates


def test_passes_that_never_fit_keep_their_inputs_alone_and_give_the_same_gradient(
    model: Path, measured: list[int], memory: Callable[[float], None]
):
    memory(FIXED)
    expected = trainer(model, Alone()).train(groups())
    sharing = trainer(model, Sharded())
    report = sharing.train(groups())
    assert sharing.policy.gradient_checkpointing
    assert not report.events  # nothing was changed
    assert report.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)


def test_from_the_first_pass_that_would_not_fit_inputs_alone_are_kept_and_that_is_said_once(
    model: Path, measured: list[int], memory: Callable[[float], None]
):
    memory(100 * (FIXED + PER_TOKEN * SIZES[1]))
    sharing = trainer(model, Sharded())
    assert not sharing.train(groups()).events
    memory(FIXED)  # somebody else has taken it
    report = sharing.train(groups())
    assert [e.kind for e in report.events] == ["gradient_checkpointing_on"]
    assert "passes of up to 1024 tokens are not expected to fit" in report.events[0].message
    assert sharing.policy.gradient_checkpointing
    memory(100 * (FIXED + PER_TOKEN * SIZES[1]))
    assert not sharing.train(groups()).events
    assert sharing.policy.gradient_checkpointing


def test_what_a_user_has_decided_is_not_foreseen(
    model: Path, measured: list[int], memory: Callable[[float], None]
):
    memory(FIXED)
    sharing = trainer(model, Sharded())
    sharing.set_config(CONFIG.replace(gradient_checkpointing=False))
    assert not sharing.train(groups()).events
    assert not sharing.policy.gradient_checkpointing
    assert not measured


def test_a_pass_of_the_size_that_is_left_fits_and_a_larger_one_does_not(
    model: Path, measured: list[int], memory: Callable[[float], None]
):
    policy = tiny_policy(model, model / "no-faults")("cpu")
    places, taken = 5000, 300
    memory((FIXED + PER_TOKEN * places) / SURE + taken + 1)
    foresight = Foresight(policy, Sharded())
    assert foresight.fits(places, taken)
    assert not foresight.fits(places + 1, taken)
    assert not foresight.fits(places, taken + 2)


def test_another_rank_s_want_of_memory_counts(
    model: Path, measured: list[int], memory: Callable[[float], None]
):
    policy = tiny_policy(model, model / "no-faults")("cpu")
    memory(1e12)
    ranks = Sharded()
    foresight = Foresight(policy, ranks)
    assert foresight.fits(100)
    ranks.another_is_short = True
    assert not foresight.fits(100)


def test_a_pass_that_is_too_large_to_be_measured_is_not_tried(
    model: Path, measured: list[int], memory: Callable[[float], None]
):
    policy = tiny_policy(model, model / "no-faults")("cpu")
    memory(FIXED + PER_TOKEN * SIZES[0])
    foresight = Foresight(policy, Sharded())
    assert not foresight.fits(1)
    assert not foresight.fits(1)
    assert measured == [SIZES[0]]

"""What is trained beside the policy loss: imitated data, own best rollouts; coefficients on the move."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.tiny import tiny_model
from helpers.training import group, sample, step, trajectory

from art_core.config import LoRAConfig, TrainConfig
from art_core.errors import ConfigError
from art_core.training import checkpoints
from art_core.training.batch import prepare
from art_core.training.grpo import Trainer
from art_core.training.optimizer import Optimizer
from art_core.training.peft_policy import PeftPolicy
from art_core.training.samples import TRUNCATED
from art_core.types import TrajectoryGroup


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


def load(model: Path) -> PeftPolicy:
    return PeftPolicy.load(str(model), LoRAConfig(rank=4, alpha=8), dtype="float32")


def games(*rewards: float) -> TrajectoryGroup:
    """One answer of one token each, each its own token; nobody knows how likely they were."""
    return group(
        *(
            trajectory(f"t{i}", r, step(f"s{i}", [5, 6], [10 + i], logprobs=[None]))
            for i, r in enumerate(rewards)
        )
    )


LESSON = [sample([20, 21], [30 + i, 2], step=f"lesson {i}", rollout=f"l{i}") for i in range(4)]


def lesson_loss(policy: PeftPolicy) -> float:
    """How unlikely the lesson's answers are."""
    return Trainer(policy, TrainConfig()).sft(LESSON, learning_rate=1e-12).metrics["loss"]


def test_a_data_set_that_is_mixed_in_is_learned_beside_the_games(model: Path):
    losses = {}
    for weight in (0.0, 0.5):
        policy = load(model)
        trainer = Trainer(policy, TrainConfig(learning_rate=5e-3, sft_weight=weight, sft_batch=2))
        start = lesson_loss(policy)
        for _ in range(15):
            report = trainer.train([games(1.0, 0.0, 0.0)], imitate=LESSON if weight else ())
        assert ("sft_loss" in report.metrics) == bool(weight)
        losses[weight] = lesson_loss(policy) - start
    assert losses[0.5] < losses[0.0] - 1.0


def test_the_mixed_loss_is_the_sum_of_both(model: Path):
    """The gradient of one mixed update is the policy's plus ``sft_weight`` times the imitation's."""

    def kept_by(optimizer: Optimizer) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        make = optimizer.step

        def keep(*given: float) -> None:
            kept.extend(p.grad.clone() for p in optimizer.parameters if p.grad is not None)
            make(*given)

        optimizer.step = keep  # type: ignore[method-assign]
        return kept

    alone = Trainer(load(model), TrainConfig())
    policys = kept_by(alone.optimizer)
    alone.train([games(1.0, 0.0)])
    taught = Trainer(load(model), TrainConfig())
    lessons = kept_by(taught.sft_optimizer)
    taught.sft(LESSON)
    mixed = Trainer(load(model), TrainConfig(sft_weight=0.25))
    both = kept_by(mixed.optimizer)
    mixed.train([games(1.0, 0.0)], imitate=LESSON)
    for whole, policy, lesson in zip(both, policys, lessons, strict=True):
        torch.testing.assert_close(whole, policy + 0.25 * lesson, atol=1e-6, rtol=1e-5)


def test_the_best_of_each_group_above_its_mean_are_imitated(model: Path):
    """Rejection sampling: two of four would be taken, but only one of the second group is above its mean."""
    groups = [games(1.0, 0.2, 0.9, 0.0), replace(games(0.0, 0.0, 1.0, 0.0), id="other")]
    config = TrainConfig(sft_weight=0.1, sft_own_best=2)
    batch = prepare(groups, config, torch.Generator().manual_seed(0))
    assert sorted(s.completion[0] for s in batch.minibatches[0].best) == [10, 12, 12]
    report = Trainer(load(model), config).train(groups)
    assert report.metrics["sft_loss"] > 0


@pytest.mark.parametrize(
    ("config", "imitate", "words"),
    [
        (TrainConfig(), LESSON, "sft_weight is 0"),
        (TrainConfig(sft_weight=0.1), (), "there is nothing to imitate"),
    ],
)
def test_half_a_mix_is_refused(model: Path, config: TrainConfig, imitate, words: str):
    with pytest.raises(ConfigError, match=words):
        Trainer(load(model), config).train([games(1.0, 0.0)], imitate=imitate)


def test_answers_cut_by_max_tokens_may_be_left_out_and_are_counted(model: Path):
    cut = [
        trajectory(f"t{i}", float(i), replace(step(f"s{i}", [5, 6], [10 + i]), finish_reason=reason))
        for i, reason in enumerate(("stop", "length", "length"))
    ]
    for masked, trained in ((False, 3), (True, 1)):
        report = Trainer(load(model), TrainConfig(mask_truncated=masked)).train([group(*cut)])
        assert report.metrics["entries"] == trained
        assert report.metrics["steps_truncated"] == 2
        assert report.left_out.get(TRUNCATED, 0) == 3 - trained


def test_coefficients_go_on_from_a_checkpoint(model: Path, tmp_path: Path):
    """C50"""
    config = TrainConfig(kl_coef=0.1, kl_target=0.01, entropy_coef=0.01, entropy_target=9.0)
    first = Trainer(load(model), config)
    for _ in range(3):
        first.train([games(1.0, 0.0)])
    saved = checkpoints.save(tmp_path, first, version=3)
    second = Trainer(load(model), config)
    checkpoints.load(saved.directory, second)
    assert second.coefficients == first.coefficients
    assert first.coefficients.kl != 0.1
    assert first.coefficients.entropy == pytest.approx(0.025)
    reports = [t.train([games(1.0, 0.0)]).metrics for t in (first, second)]
    assert {**reports[0], "seconds": 0} == {**reports[1], "seconds": 0}


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "gspo"},
        {"mismatch_level": "sequence"},
        {"loss": "gspo", "mismatch_level": "sequence", "kl_coef": 0.1},
    ],
)
def test_progress_counts_the_passes_that_are_read_ahead(model: Path, options: dict[str, object]):
    groups = [games(1.0, 0.0), games(0.0, 1.0, 1.0), games(1.0, 0.5, 0.0, 0.0)]
    config = TrainConfig(**{"groups_per_update": 1, "epochs": 2, "token_budget": 16, **options})
    done: list[tuple[int, int]] = []
    Trainer(load(model), config).train(groups, progress=lambda *at: done.append(at))
    assert [at for at, _ in done] == list(range(1, len(done) + 1))
    assert {total for _, total in done} == {len(done)}

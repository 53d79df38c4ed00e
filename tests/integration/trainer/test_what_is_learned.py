"""What tiny policies learn from rewards alone."""

import math
from pathlib import Path

import pytest
import torch
from helpers.tiny_policies import LOSSES, load
from helpers.training import group, sample, step, trajectory

from art_core.config import LossName, TrainConfig
from art_core.training.grpo import Trainer
from art_core.training.peft_policy import PeftPolicy
from art_core.training.policy import TRAINING
from art_core.types import TrajectoryGroup


def play(
    policy: PeftPolicy, reward, *, tokens: int, games: int, generator: torch.Generator
) -> TrajectoryGroup:
    """Sample answers of a few tokens from the policy itself, with their log-probabilities."""
    prompt = [5, 6, 7]
    rows = torch.tensor([prompt] * games)
    logprobs = []
    with torch.no_grad(), policy.using(TRAINING):
        for _ in range(tokens):
            hidden = policy.hidden_states(input_ids=rows, use_cache=False).last_hidden_state[:, -1]
            every = torch.log_softmax(policy.head(hidden).float(), -1)
            drawn = torch.multinomial(every.exp(), 1, generator=generator)
            logprobs.append(every.gather(1, drawn))
            rows = torch.cat([rows, drawn], 1)
    answers = rows[:, len(prompt) :].tolist()
    known = torch.cat(logprobs, 1).tolist()
    return group(
        *(
            trajectory(f"t{i}", reward(answer), step(f"s{i}", prompt, answer, logprobs=known[i]))
            for i, answer in enumerate(answers)
        )
    )


ARMS = (10, 11, 12, 13)


@pytest.fixture(scope="module")
def undecided(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter, made by imitation, that answers with two of four tokens and has no preference."""
    policy = load(models["learner"], awake=False)
    answers = [sample([5, 6, 7], [a, b], step=f"{a}{b}") for a in ARMS for b in ARMS]
    trainer = Trainer(policy, TrainConfig())
    trainer.sft(answers, batch_size=16, steps=40, learning_rate=1e-2)
    report = trainer.sft(answers, batch_size=16, steps=1, learning_rate=1e-3)
    assert report.metrics["loss"] == pytest.approx(math.log(4), abs=0.15)
    directory = tmp_path_factory.mktemp("undecided")
    policy.save_weights(directory)
    return directory


def learn(policy: PeftPolicy, trainer: Trainer, reward, *, tokens: int, updates: int) -> list[float]:
    """Mean rewards, update by update."""
    generator = torch.Generator().manual_seed(0)
    history = []
    for _ in range(updates):
        played = play(policy, reward, tokens=tokens, games=32, generator=generator)
        history.append(sum(played.rewards) / len(played))
        trainer.train([played])
    return history


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_solves_a_bandit(models: dict[str, Path], undecided: Path, name: LossName):
    """One arm of four pays: the share of games that chose it rises above 0.9."""
    policy = load(models["learner"], awake=False)
    policy.load_weights(undecided)
    trainer = Trainer(policy, TrainConfig(learning_rate=1e-2, loss=name))
    history = learn(policy, trainer, lambda a: float(a[0] == ARMS[2]), tokens=1, updates=20)
    assert history[0] < 0.6
    assert sum(history[-5:]) / 5 > 0.9


def test_a_two_token_answer_is_learned_where_the_second_depends_on_the_first(
    models: dict[str, Path], undecided: Path
):
    """Reward for naming the same arm twice, whichever: credit flows through the tree's shared nodes."""
    policy = load(models["learner"], awake=False)
    policy.load_weights(undecided)
    trainer = Trainer(policy, TrainConfig(learning_rate=1e-2))
    history = learn(policy, trainer, lambda a: float(a[0] == a[1]), tokens=2, updates=40)
    assert history[0] < 0.6
    assert sum(history[-5:]) / 5 > 0.9


def test_a_kl_term_holds_the_policy_near_its_base(models: dict[str, Path]):
    far: dict[float, float] = {}
    for coefficient in (1e-9, 5.0):
        policy = load(models["learner"], awake=False)
        trainer = Trainer(policy, TrainConfig(learning_rate=1e-2, kl_coef=coefficient))
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            played = play(policy, lambda a: float(a[0] < 200), tokens=1, games=32, generator=generator)
            report = trainer.train([played])
        far[coefficient] = report.metrics["kl_base"]
    assert far[5.0] < far[1e-9] / 2

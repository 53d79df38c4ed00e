"""What training did with each token, as the trainer says and as a trajectory's page can show it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny import tiny_model
from helpers.training import failed, group, step, trajectory

from art_core.config import GuardrailConfig, LoRAConfig, TrainConfig
from art_core.training.grpo import Trainer
from art_core.training.peft_policy import PeftPolicy
from art_core.training.policy import TRAINING
from art_core.training.trained import CLIPPED, TRAINED, StepTraining
from art_core.types import TrajectoryGroup


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", arch="llama")


def trainer(model: Path, **options: object) -> Trainer:
    policy = PeftPolicy.load(str(model), LoRAConfig(rank=4, alpha=8), dtype="float32")
    return Trainer(policy, TrainConfig(**({"learning_rate": 1e-2} | options)))  # type: ignore[arg-type]


def logprobs(policy: PeftPolicy, prompt: list[int], completion: list[int]) -> list[float]:
    with torch.no_grad(), policy.using(TRAINING):
        ids = torch.tensor([prompt + completion])
        hidden = policy.hidden_states(input_ids=ids, use_cache=False).last_hidden_state
        odds = policy.head(hidden[0, len(prompt) - 1 : -1]).float().log_softmax(-1)
    return [float(odds[i, token]) for i, token in enumerate(completion)]


def ratios(training: StepTraining) -> list[float]:
    return np.frombuffer(training.ratio, dtype="<f4").tolist()


def two_rollouts(policy: PeftPolicy, scale: float) -> TrajectoryGroup:
    """Answers whose recorded probabilities are the policy's divided by a scale."""
    members = []
    for name, prompt, answer, reward in (("a", [5, 6], [7, 8, 9], 1.0), ("b", [5, 6, 4], [8, 7], 0.0)):
        known = [p - np.log(scale) for p in logprobs(policy, prompt, answer)]
        members.append(trajectory(f"t-{name}", reward, step(f"s-{name}", prompt, answer, logprobs=known)))
    return group(*members)


def test_each_trained_token_has_the_ratio_of_the_policy_in_training_to_the_one_that_sampled(model: Path):
    training = trainer(model)
    report = training.train([two_rollouts(training.policy, 1.25)])
    told = {t.step_id: t for t in report.trained}
    assert set(told) == {"s-a", "s-b"}
    assert ratios(told["s-a"]) == pytest.approx([1.25] * 3, rel=1e-4)
    assert ratios(told["s-b"]) == pytest.approx([1.25] * 2, rel=1e-4)
    assert told["s-a"].advantage == -told["s-b"].advantage == 0.5
    assert told["s-a"].marks == bytes([TRAINED] * 3)
    assert report.metrics["behaviour_ratio_p50"] == pytest.approx(1.25, rel=1e-4)
    assert report.metrics["behaviour_ratio_p99"] == pytest.approx(1.25, rel=1e-4)
    assert report.metrics["effective_sample_size"] == pytest.approx(1.0)  # equal weights


def test_the_effective_sample_size_is_that_of_the_ratios_as_weights(model: Path):
    training = trainer(model)
    policy = training.policy
    members = []
    for name, scale, reward in (("a", 1.0, 1.0), ("b", 3.0, 0.0)):
        prompt, answer = [5, len(members)], [7]
        known = [p - np.log(scale) for p in logprobs(policy, prompt, answer)]
        members.append(trajectory(f"t-{name}", reward, step(f"s-{name}", prompt, answer, logprobs=known)))
    report = training.train([group(*members)])
    assert report.metrics["effective_sample_size"] == pytest.approx((1 + 3) ** 2 / (2 * (1 + 9)), rel=1e-4)


def test_tokens_that_gave_no_gradient_are_told_apart(model: Path):
    """Masked by the importance weight; unknown to the server; clipped in a later epoch."""
    masking = trainer(model, importance_beyond="mask", importance_cap=2.0)
    masked = masking.train([two_rollouts(masking.policy, 3.0)])
    assert all(set(t.marks) == {0} for t in masked.trained)
    assert masked.metrics["masked_fraction"] == 1.0

    unknown = trainer(model)
    played = two_rollouts(unknown.policy, 1.0)
    (one, other) = played
    tokens = one.steps[0].tokens
    assert tokens is not None
    blind = replace(one.steps[0], tokens=replace(tokens, logprobs=(None, tokens.logprobs[1], None)))
    report = unknown.train([group(replace(one, steps=(blind,)), other)])
    told = next(t for t in report.trained if t.step_id == "s-a")
    assert [np.isnan(r) for r in ratios(told)] == [True, False, True]
    assert told.marks == bytes([TRAINED] * 3)

    clipping = trainer(model, learning_rate=0.3, epochs=3, guardrails=GuardrailConfig(max_kl=None))
    marks = b"".join(t.marks for t in clipping.train([two_rollouts(clipping.policy, 1.0)]).trained)
    assert TRAINED | CLIPPED in marks


def test_what_was_not_trained_is_not_told(model: Path):
    """A group without spread, a failed rollout, and an update that a guardrail refused."""
    training = trainer(model)
    played = two_rollouts(training.policy, 1.0)
    even = group(*[replace(t, reward=0.5) for t in played], scenario="even")
    assert training.train([even]).trained == ()
    report = training.train([group(*played, failed("t-c", step("s-c", [5], [6])))])
    assert {t.step_id for t in report.trained} == {"s-a", "s-b"}
    strict = trainer(model, guardrails=GuardrailConfig(max_kl=1e-3))
    refused = strict.train([two_rollouts(strict.policy, 5.0)])
    assert refused.metrics["updates_skipped"] == 1
    assert refused.trained == ()

"""The forward and backward pass of a token tree, in any pieces, are those of its rows."""

import math
from collections import Counter

import pytest
import torch
from helpers.tiny_policies import LOSSES, load
from helpers.training import passes, sample
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_core.config import LossName, TrainConfig
from art_core.training.batch import minibatch
from art_core.training.coefficients import Coefficients
from art_core.training.logprobs import entry_logprobs
from art_core.training.losses import policy_loss
from art_core.training.peft_policy import PeftPolicy
from art_core.training.policy import TRAINING
from art_core.training.samples import Sample
from art_core.training.token_tree import TokenTree, build_tree, split, to_rows
from art_core.training.update import accumulate_policy_gradient


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    tokens = st.integers(5, 8)
    return [
        sample(
            draw(st.lists(tokens, min_size=1, max_size=8)),
            completion := draw(st.lists(tokens, min_size=1, max_size=5)),
            advantage=draw(st.sampled_from([-1.0, 0.5, 1.0])),
            logprobs=[draw(st.floats(-8, -0.1)) for _ in completion],
            step=f"s{i}",
            rollout=f"r{i % 3}",
        )
        for i in range(draw(st.integers(1, 8)))
    ]


def gradient(
    policy: PeftPolicy, pieces: list[TokenTree]
) -> tuple[float, dict[object, float], list[torch.Tensor]]:
    """Loss, log-probability by entry, and gradient of a batch given as trees."""
    total, logprobs = 0.0, Counter[object]()
    for parameter in policy.trainable_parameters():
        parameter.grad = None
    for piece in pieces:
        with policy.using(TRAINING):
            logprob = entry_logprobs(policy, piece).logprob
            old = torch.tensor(piece.entries.old_logprob, dtype=torch.float32)
            advantage = torch.tensor(piece.entries.advantage, dtype=torch.float32)
            loss = policy_loss("grpo", logprob, old.maximum(logprob.detach() - 0.1), advantage).loss.sum()
            loss.backward()
        total += float(loss.detach())
        for i, value in enumerate(logprob.tolist()):
            key = (int(piece.entries.step[i]), int(piece.depth[piece.entries.node[i]]))
            logprobs[key] += value
    return total, logprobs, [p.grad for p in policy.trainable_parameters()]


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches(), budget=st.integers(8, 24))
def test_tree_pieces_and_rows_have_the_same_logits_loss_and_gradient(
    policies: dict[str, PeftPolicy], arch: str, batch: list[Sample], budget: int
):
    """C25"""
    policy = policies[arch]
    tree = build_tree(batch)
    loss, logprobs, grads = gradient(policy, [tree])
    for pieces in (to_rows(tree), split(tree, budget)):
        other_loss, other_logprobs, other_grads = gradient(policy, pieces)
        assert other_loss == pytest.approx(loss, abs=1e-4)
        assert other_logprobs.keys() == logprobs.keys()
        assert all(math.isclose(other_logprobs[k], v, abs_tol=1e-4) for k, v in logprobs.items())
        for mine, theirs in zip(grads, other_grads, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
    separate = [gradient(policy, [build_tree([s])]) for s in batch]
    assert sum(part[0] for part in separate) == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_the_trees_logprobs_are_those_of_transformers_own_forward(policies: dict[str, PeftPolicy], arch: str):
    """C25"""
    policy = policies[arch]
    batch = [
        sample([5, 6, 7], [8, 9, 10], step="a"),
        sample([5, 6, 7, 8], [11, 5], step="b"),
        sample([12], [5, 6], step="c"),
        sample([5, 6], [20], step="d"),
    ]
    tree = build_tree(batch)
    with torch.no_grad(), policy.using(TRAINING):
        found = entry_logprobs(policy, tree).logprob
        expected = []
        for s in sorted(batch, key=lambda s: s.ids):
            logits = policy.model(input_ids=torch.tensor([s.ids])).logits[0].float()
            every = torch.log_softmax(logits[:-1], -1)[range(len(s.ids) - 1), s.ids[1:]]
            expected.append(every[len(s.prompt) - 1 :])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_does_not_depend_on_how_the_tree_was_cut(
    policies: dict[str, PeftPolicy], name: LossName
):
    """C25: also when a step lies in several pieces, and the policy has moved since the batch began."""
    policy = policies["llama"]
    batch = [
        sample(
            [5, 6], [7, 8, 9 + i], advantage=(-1.0) ** i, step=f"s{i}", rollout=f"r{i}", logprobs=[-5.0] * 3
        )
        for i in range(6)
    ]
    config = TrainConfig(loss=name, clip_low=0.5, clip_high=9.0, kl_coef=0.1)
    tree = minibatch(batch, "rollout").tree
    proximal = torch.tensor(tree.depth[tree.entries.node] * 0.1 - 5.5, dtype=torch.float32)
    base = torch.full((len(tree.entries),), -5.0)
    results = []
    for budget in (1000, 6):
        assert (len(split(tree, budget)) > 1) == (budget == 6)
        for parameter in policy.trainable_parameters():
            parameter.grad = None
        figures = accumulate_policy_gradient(
            passes(policy, budget), tree, config, Coefficients.of(config), proximal=proximal, base=base
        )
        results.append((figures.loss, [p.grad.clone() for p in policy.trainable_parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    for mine, theirs in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3)


@pytest.mark.model
def test_a_real_models_tree_equals_its_rows():
    """C25, on SmolLM2-135M in float32: log-probabilities, loss and gradient."""
    from examples.prepare_model import smollm2

    policy = load(smollm2())
    batch = [
        sample([*range(100, 116), 200 + i % 3], [300 + i, 301, 2], advantage=(-1.0) ** i, step=f"s{i}")
        for i in range(6)
    ]
    tree = build_tree(batch)
    loss, logprobs, grads = gradient(policy, [tree])
    for pieces in (to_rows(tree), split(tree, 24)):
        other_loss, other_logprobs, other_grads = gradient(policy, pieces)
        assert other_loss == pytest.approx(loss, abs=1e-4)
        assert all(math.isclose(other_logprobs[k], v, abs_tol=1e-3) for k, v in logprobs.items())
        for mine, theirs in zip(grads, other_grads, strict=True):
            difference = torch.linalg.vector_norm(mine - theirs)
            assert difference <= 1e-3 * torch.linalg.vector_norm(mine) + 1e-6

"""Every loss against a plain reference: Python floats, one token at a time, gradients by formula."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from art_core.config import AVERAGING, LossName, TrainConfig
from art_core.errors import ConfigError
from art_core.training.coefficients import Coefficients, next_kl_coef
from art_core.training.losses import (
    importance_weights,
    kl,
    kl_penalty,
    policy_loss,
    segment_mean,
    segment_sum,
    token_weights,
)

LOSSES: tuple[LossName, ...] = get_args(LossName)
NAN, INF = float("nan"), float("inf")
LOGPROBS = st.floats(-6, 0)


@st.composite
def entries(draw: st.DrawFn):
    """New and old log-probabilities, advantage and rollout of some tokens."""
    n = draw(st.integers(1, 8))

    def column(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    rollouts = sorted(column(st.integers(0, 2)))
    by_rollout = {r: draw(st.sampled_from([-1.5, -0.5, 0.5, 2.0])) for r in set(rollouts)}
    return column(LOGPROBS), column(LOGPROBS), [by_rollout[r] for r in rollouts], rollouts


def reference(name: str, new, old, advantages, rollouts, low=0.2, high=0.3) -> tuple[float, list[float]]:
    """Loss of a batch and its gradient by each new log-probability, from the papers' formulas."""
    sizes = {r: rollouts.count(r) for r in rollouts}
    loss, gradient = 0.0, [0.0] * len(new)
    for i, (n, o, a, r) in enumerate(zip(new, old, advantages, rollouts, strict=True)):
        weight = {
            "rollout": 1 / (len(sizes) * sizes[r]),
            "token": 1 / len(new),
            "constant": 1 / (len(sizes) * max(sizes.values())),
        }[AVERAGING[name]]
        log_ratio = n - o
        if name == "gspo":
            log_ratio = sum(x - y for x, y, s in zip(new, old, rollouts, strict=True) if s == r) / sizes[r]
        ratio = math.exp(log_ratio)
        if name == "cispo":
            loss -= weight * min(ratio, 1 + high) * a * n
            gradient[i] = -weight * min(ratio, 1 + high) * a
            continue
        clipped = min(max(ratio, 1 - low), 1 + high)
        loss -= weight * min(ratio * a, clipped * a)
        gradient[i] = -weight * ratio * a if ratio * a <= clipped * a else 0.0
    return loss, gradient


def ours(name: LossName, new, old, advantages, rollouts) -> tuple[float, list[float]]:
    now = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    before = torch.tensor(old, dtype=torch.float64)
    numbers = torch.tensor(rollouts)
    outcome = policy_loss(
        name,
        now,
        before,
        torch.tensor(advantages, dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.3,
        segment_log_ratio=segment_mean((now - before).detach(), numbers),
    )
    loss = (token_weights(AVERAGING[name], numbers) * outcome.loss).sum()
    loss.backward()
    return float(loss.detach()), now.grad.tolist()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=60)
@given(batch=entries())
def test_loss_and_gradient_are_the_papers(name: LossName, batch):
    loss, gradient = ours(name, *batch)
    expected, expected_gradient = reference(name, *batch)
    assert loss == pytest.approx(expected, abs=1e-9)
    assert gradient == pytest.approx(expected_gradient, abs=1e-9)


def test_gspos_gradient_is_the_derivative_of_its_sequence_level_loss():
    """GSPO's eq. 5 by finite differences: mean over sequences of min(s A, clip(s) A)."""
    new, old, advantages, rollouts = [-1.0, -2.0, -0.5], [-1.1, -1.9, -0.4], [1.0, 1.0, -2.0], [0, 0, 1]

    def loss(values):
        total = 0.0
        for r, a in ((0, 1.0), (1, -2.0)):
            own = [values[i] - old[i] for i in range(3) if rollouts[i] == r]
            s = math.exp(sum(own) / len(own))
            total -= min(s * a, min(max(s, 0.8), 1.3) * a) / 2
        return total

    _, gradient = ours("gspo", new, old, advantages, rollouts)
    for i in range(3):
        up, down = list(new), list(new)
        up[i] += 1e-6
        down[i] -= 1e-6
        assert gradient[i] == pytest.approx((loss(up) - loss(down)) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_before_the_first_update_the_gradient_is_reinforce(name: LossName):
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5])
    outcome = policy_loss(name, new, new.detach(), advantages, segment_log_ratio=torch.zeros(2))
    outcome.loss.sum().backward()
    assert new.grad.tolist() == [-1.0, 0.5]
    assert outcome.ratio.tolist() == [1.0, 1.0]
    assert not outcome.clipped.any()


def test_clipping_stops_the_gradient_where_the_policy_has_moved_far_enough_already():
    new = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5])).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    outcome = policy_loss("grpo", new, torch.zeros(4), advantages)
    outcome.loss.sum().backward()
    assert outcome.clipped.tolist() == [True, False, False, True]
    assert (new.grad == 0).tolist() == [True, False, False, True]


def test_dapo_clips_higher_than_low():
    new = torch.log(torch.tensor([1.25]))
    one = torch.ones(1)
    assert policy_loss("dapo", new, torch.zeros(1), one, clip_high=0.2).clipped.item()
    assert not policy_loss("dapo", new, torch.zeros(1), one, clip_high=0.28).clipped.item()


def test_cispo_keeps_every_tokens_gradient():
    new = torch.log(torch.tensor([3.0])).requires_grad_()
    outcome = policy_loss("cispo", new, torch.zeros(1), torch.ones(1), clip_high=0.2)
    outcome.loss.sum().backward()
    assert new.grad.item() == pytest.approx(-1.2)


@pytest.mark.parametrize("name", LOSSES)
def test_an_unknown_old_logprob_counts_as_on_policy(name: LossName):
    """C23"""
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    old = torch.tensor([NAN, -2.0])
    advantages = torch.tensor([1.0, 1.0])
    outcome = policy_loss(name, new, old, advantages, segment_log_ratio=torch.zeros(2))
    weights = importance_weights(new, old, 2.0)
    (weights * outcome.loss).sum().backward()
    assert outcome.ratio.tolist() == [1.0, 1.0]
    assert weights.tolist() == [1.0, 1.0]
    assert new.grad.tolist() == [-1.0, -1.0]
    assert kl(new, old)[0] == 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("now", "then"), [(-2.0, -91.0), (-91.0, -2.0), (0.0, -1e4), (-1e4, 0.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_far_apart_logprobs_make_no_infinity_and_no_nan(
    name: LossName, now: float, then: float, advantage: float
):
    """C24"""
    new = torch.tensor([now, -1.0], requires_grad=True)
    old = torch.tensor([then, NAN])
    given = torch.tensor([advantage, 0.0])
    segments = segment_mean((new.detach() - old).nan_to_num().clamp(-20, 20), torch.tensor([0, 0]))
    outcome = policy_loss(name, new, old, given, segment_log_ratio=segments)
    loss = importance_weights(new, old, 2.0) * outcome.loss + 0.1 * kl(new, old)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(new.grad).all()


def test_importance_weights_are_truncated_and_carry_no_gradient():
    proximal = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    weights = importance_weights(proximal, torch.tensor([-1.5, -3.0, -0.5]), 2.0)
    assert weights.tolist() == pytest.approx([math.exp(0.5), 2.0, math.exp(-0.5)])
    assert not weights.requires_grad
    assert importance_weights(proximal, torch.tensor([-9.0] * 3), None).tolist() == [1.0, 1.0, 1.0]


@given(
    st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5),
    st.lists(st.floats(0.05, 1.0), min_size=5, max_size=5),
)
def test_k3_is_never_negative_and_its_mean_is_the_kl(left: list[float], right: list[float]):
    p = torch.tensor(left, dtype=torch.float64) / sum(left)
    q = torch.tensor(right[: len(left)], dtype=torch.float64)
    q = q / q.sum()
    estimates = kl(p.log(), q.log())
    assert (estimates >= 0).all()
    exact = (p * (p / q).log()).sum()
    assert float((p * estimates).sum()) == pytest.approx(float(exact), abs=1e-9)


@pytest.mark.parametrize(
    ("averaging", "expected"),
    [
        ("rollout", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("token", [1 / 4] * 4),
        ("constant", [1 / 6] * 4),
    ],
)
def test_tokens_are_averaged_as_the_loss_wants(averaging, expected: list[float]):
    assert token_weights(averaging, torch.tensor([7, 7, 7, 2])).tolist() == pytest.approx(expected)


def test_a_segments_mean_is_given_to_each_of_its_entries():
    means = segment_mean(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([4, 9, 4]))
    assert means.tolist() == [2.0, 5.0, 2.0]


def test_gspo_asks_for_the_segments_ratio():
    with pytest.raises(ValueError, match="segment_log_ratio"):
        policy_loss("gspo", torch.zeros(1), torch.zeros(1), torch.ones(1))


def test_the_kl_terms_gradient_is_that_of_the_kl():
    """In expectation, by enumeration; without the ratio it would be another divergence's."""
    logits = torch.tensor([0.3, -0.8, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    now = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((now.exp() * (now - reference)).sum(), logits, retain_graph=True)
    drawn = now.detach().exp()
    (found,) = torch.autograd.grad((drawn * kl_penalty(now, reference, now.detach())).sum(), logits)
    assert found.tolist() == pytest.approx(exact.tolist(), abs=1e-12)


# -- server and trainer disagree ---------------------------------------------------------------------


def test_masked_importance_sampling_leaves_out_what_server_and_trainer_disagree_on():
    proximal = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    server = torch.tensor([-1.5, -3.0, 1.0, NAN])
    weights = importance_weights(proximal, server, 2.0, floor=0.5, mask=True)
    assert weights.tolist() == pytest.approx([math.exp(0.5), 0.0, 0.0, 1.0])
    assert importance_weights(proximal, server, 2.0, mask=True)[2] == pytest.approx(math.exp(-2))


@pytest.mark.parametrize(("mask", "expected"), [(False, [1.5, 1.5, 0.5]), (True, [0.0, 0.0, 0.5])])
def test_a_whole_answers_mismatch_is_the_product_of_its_tokens(mask: bool, expected: list[float]):
    proximal = torch.log(torch.tensor([0.6, 0.8, 0.2]))
    server = torch.log(torch.tensor([0.4, 0.5, 0.4]))
    answers = segment_sum(proximal - server, torch.tensor([0, 0, 1]))
    weights = importance_weights(proximal, server, 1.5, mask=mask, sequence_log_ratio=answers)
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo"])
def test_any_loss_may_have_its_ratio_at_the_level_of_the_sequence(name: LossName):
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    answer = torch.tensor([0.1, 0.1])
    outcome = policy_loss(
        name, new, torch.zeros(2), torch.ones(2), level="sequence", segment_log_ratio=answer
    )
    assert outcome.ratio.tolist() == pytest.approx([math.exp(0.1)] * 2)


# -- coefficients that follow a target ---------------------------------------------------------------


def test_the_kl_coefficient_follows_its_target_by_at_most_two_percent():
    """Ziegler et al. 2019, section 2.2."""
    assert next_kl_coef(0.1, kl=10.0, target=1.0) == pytest.approx(0.1 * 1.02)
    assert next_kl_coef(0.1, kl=0.0, target=1.0) == pytest.approx(0.1 * 0.98)
    assert next_kl_coef(0.1, kl=1.1, target=1.0) == pytest.approx(0.1 * 1.01)


def test_the_entropy_bonus_grows_below_its_target_and_rests_above_it():
    config = TrainConfig(entropy_coef=0.01, entropy_target=0.5)
    start = Coefficients.of(config)
    assert start.entropy_weight == 0.0
    low = start.after(config, kl=None, entropy=0.2)
    assert low.entropy_weight == pytest.approx(0.015)
    high = low.after(config, kl=None, entropy=0.9)
    assert high.entropy == pytest.approx(0.01)
    assert high.entropy_weight == 0.0
    for _ in range(5):
        high = high.after(config, kl=None, entropy=0.9)
    assert high.entropy == 0.0


def test_without_a_choice_each_loss_has_its_papers_clipping_and_averaging():
    assert TrainConfig().clip_range == (0.2, 0.2)
    assert TrainConfig(loss="dapo").clip_range == (0.2, 0.28)
    assert TrainConfig(loss="gspo", clip_high=0.1).clip_range == (3e-4, 0.1)
    assert TrainConfig(loss="gspo").ratio_level == "sequence"
    assert TrainConfig(loss="dr_grpo").averaging == "constant"
    assert TrainConfig(loss="dr_grpo", loss_scale="token").averaging == "token"


def test_a_coefficient_without_a_target_is_always_the_configurations():
    config = TrainConfig(kl_coef=0.2, entropy_coef=0.01)
    moved = Coefficients(kl=9.0, entropy=9.0).after(config, kl=5.0, entropy=0.0)
    assert Coefficients.of(config, moved) == Coefficients(0.2, 0.01)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kl_target": 0.1}, "kl_coef > 0"),
        ({"importance_floor": 0.5}, "importance_beyond='mask'"),
        ({"loss_length": 100}, "averages by 'rollout'"),
        ({"sft_own_best": 1}, "sft_weight > 0"),
        ({"gamma": 1.5}, "gamma"),
    ],
)
def test_knobs_that_nothing_would_read_are_refused(wrong: dict[str, float], words: str):
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**wrong)

"""What an update is made of, and what moves nothing: skipped, counted, refused."""

import math
from pathlib import Path

import pytest
import torch
from helpers.tiny_policies import games, load
from helpers.training import failed, group, same, step, trajectory, weights

from art_core.config import GuardrailConfig, TrainConfig
from art_core.errors import NothingToTrainError
from art_core.selection import Nodes
from art_core.training.grpo import Trainer
from art_core.training.peft_policy import PeftPolicy


def test_eight_trajectories_make_one_optimizer_step_whatever_their_order(models: dict[str, Path]):
    """C27"""
    outcomes = []
    members = games().trajectories
    for order in (members, members[::-1]):
        policy = load(models["llama"])
        report = Trainer(policy, TrainConfig(learning_rate=1e-3, token_budget=16)).train([group(*order)])
        assert report.metrics["updates"] == 1
        assert report.updated
        outcomes.append((weights(policy), {k: v for k, v in report.metrics.items() if k != "seconds"}))
    assert same(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.1, 0.1, 0.30000000000000004 - 0.2, 0.1]])
def test_equal_rewards_move_nothing(policy: PeftPolicy, rewards: list[float]):
    """C26"""
    trainer = Trainer(policy, TrainConfig(learning_rate=1e-2, weight_decay=0.1))
    trainer.train([games()])
    before, state = weights(policy), trainer.state_dict()
    moments = [v.clone() for s in state["optimizer"]["adamw"]["state"].values() for v in s.values()]
    equal = group(*(trajectory(f"t{i}", r, step(f"s{i}", [5], [6 + i])) for i, r in enumerate(rewards)))
    report = trainer.train([equal, equal])
    assert not report.updated
    assert report.metrics["groups_without_spread"] == 2
    assert same(weights(policy), before)
    after = [v for s in trainer.state_dict()["optimizer"]["adamw"]["state"].values() for v in s.values()]
    assert same(moments, after)


def test_a_null_logprob_is_counted_and_trained_on_policy(policy: PeftPolicy):
    """C23"""
    nulls = group(
        trajectory("a", 1.0, step("a1", [5], [6, 7], logprobs=[None, -5.0])),
        trajectory("b", 0.0, step("b1", [5], [8, 7], logprobs=[float("nan"), -5.0])),
    )
    report = Trainer(policy, TrainConfig(learning_rate=1e-3)).train([nulls])
    assert report.metrics["null_logprobs"] == 2
    assert report.updated
    assert all(torch.isfinite(w).all() for w in weights(policy))


def test_an_absurd_old_logprob_neither_breaks_the_weights_nor_passes_unnoticed(models: dict[str, Path]):
    """C24"""
    absurd = group(
        trajectory("a", 1.0, step("a1", [5], [6, 7], logprobs=[-91.0, -2.0])),
        trajectory("b", 0.0, step("b1", [5], [8, 7], logprobs=[-1e5, -2.0])),
    )
    for limit, updates in ((1.0, 0), (None, 1)):
        policy = load(models["llama"])
        report = Trainer(
            policy, TrainConfig(learning_rate=1e-3, guardrails=GuardrailConfig(max_kl=limit))
        ).train([absurd])
        assert report.metrics["updates"] == updates
        assert math.isfinite(report.metrics["grad_norm"])
        assert all(torch.isfinite(w).all() for w in weights(policy))


def test_an_update_too_far_from_the_sampling_policy_is_skipped_with_a_reason(policy: PeftPolicy):
    trainer = Trainer(policy, TrainConfig(learning_rate=1e-3, guardrails=GuardrailConfig(max_kl=0.01)))
    before = weights(policy)
    report = trainer.train([group(*(trajectory(f"t{i}", i, step(f"s{i}", [5], [6 + i])) for i in range(2)))])
    assert report.metrics["updates_skipped"] == 1
    assert report.events[0].kind == "update_skipped"
    assert "max_kl=0.01" in report.events[0].message
    assert same(weights(policy), before)
    assert trainer.optimizer.updates == 0


def test_an_update_whose_gradient_is_not_finite_is_skipped_with_a_reason(policy: PeftPolicy):
    trainer = Trainer(policy, TrainConfig(learning_rate=1e-3))
    poisoned = policy.trainable_parameters()[0]
    before = weights(policy)
    hook = poisoned.register_hook(lambda grad: grad * float("nan"))
    report = trainer.train([games()])
    hook.remove()
    assert report.metrics["updates_skipped"] == 1
    assert "gradient norm is nan" in report.events[0].message
    assert same(weights(policy), before)
    assert trainer.train([games()]).updated


def test_failed_rollouts_are_in_no_baseline_and_no_update(models: dict[str, Path]):
    """C33"""
    outcomes = []
    for extra in ((), (failed("z", step("z1", [5, 6, 7], [10, 2])),)):
        policy = load(models["llama"])
        report = Trainer(policy, TrainConfig(learning_rate=1e-3)).train([group(*games(), *extra)])
        assert report.metrics["trajectories_failed"] == len(extra)
        outcomes.append(weights(policy))
    assert same(*outcomes)


def test_superseded_unselected_and_untrainable_steps_are_counted_not_trained(policy: PeftPolicy):
    def member(name: str, reward: float):
        return trajectory(
            name,
            reward,
            step(f"{name}1", [5], [6], namespace="work:1", attempt=1, node="work"),
            step(f"{name}2", [5], [7], namespace="work:1", attempt=2, node="work"),
            step(f"{name}3", [5], [8], untrainable="answered from a cache", node="work"),
            step(f"{name}4", [5], [9], node="other"),
        )

    groups = [group(member("a", 1), member("b", 0))]
    report = Trainer(policy, TrainConfig()).train(groups, train=Nodes("work"))
    assert report.metrics["entries"] == 2
    assert report.metrics["steps_left_out"] == 6
    assert set(report.left_out.values()) == {2}
    assert "answered from a cache" in report.left_out
    with_superseded = Trainer(policy, TrainConfig(train_superseded=True)).train(groups, train=Nodes("work"))
    assert with_superseded.metrics["entries"] == 4


def test_groups_are_dealt_into_minibatches_of_one_optimizer_step_each(policy: PeftPolicy):
    groups = [games(2 + i) for i in range(5)]
    trainer = Trainer(
        policy,
        TrainConfig(
            learning_rate=1e-3, groups_per_update=2, epochs=2, guardrails=GuardrailConfig(max_kl=None)
        ),
    )
    done: list[tuple[int, int]] = []
    report = trainer.train(groups, progress=lambda *at: done.append(at))
    assert report.metrics["updates"] == 6
    assert trainer.optimizer.updates == 6
    assert report.metrics["ratio_max"] > 1.0  # later updates are measured against the policy at the start
    assert done[-1][0] == done[-1][1]
    assert [at for at, _ in done] == list(range(1, len(done) + 1))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([], "no trajectories were given"),
        ([group()], "no trajectories were given"),
        ([group(failed("a"), trajectory("b", None))], r"1 failed \(timeout\), 1 were never given a reward"),
        (
            [
                group(
                    trajectory("a", 1.0, step("s", [5], [6], untrainable="from a cache")),
                    trajectory("b", 0.0),
                )
            ],
            "1 x from a cache",
        ),
        ([group(trajectory("a", 1.0), trajectory("b", 0.0))], "hold no step that can be trained"),
    ],
)
def test_nothing_to_train_on_is_an_error_that_says_why(policy: PeftPolicy, groups, words: str):
    with pytest.raises(NothingToTrainError, match=words):
        Trainer(policy, TrainConfig()).train(groups)

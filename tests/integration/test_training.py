"""The trainer on tiny random models of real architectures, in float32."""

import math
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import torch
from helpers.tiny import tiny_model
from helpers.training import failed, group, passes, same, sample, step, trajectory, weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_core.config import GuardrailConfig, LoRAConfig, LossName, TrainConfig
from art_core.errors import NothingToTrainError
from art_core.selection import Nodes
from art_core.training.batch import minibatch
from art_core.training.coefficients import Coefficients
from art_core.training.grpo import Trainer
from art_core.training.logprobs import entry_logprobs
from art_core.training.losses import policy_loss
from art_core.training.peft_policy import PeftPolicy
from art_core.training.policy import TRAINING
from art_core.training.samples import Sample
from art_core.training.token_tree import TokenTree, build_tree, split, to_rows
from art_core.training.update import accumulate_policy_gradient
from art_core.types import TrajectoryGroup

LOSSES: tuple[LossName, ...] = get_args(LossName)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": tiny_model(root / "llama", arch="llama"),
        "qwen3": tiny_model(root / "qwen3", arch="qwen3"),
        # Wide, so that its (tied) embeddings let it become certain of a token.
        "learner": tiny_model(root / "learner", arch="llama", layers=1, hidden=256),
    }


def load(directory: Path, *, seed: int = 0, awake: bool = True) -> PeftPolicy:
    """A policy; awake: with an adapter that already changes the model, so that all gradients flow."""
    policy = PeftPolicy.load(str(directory), LoRAConfig(rank=4, alpha=8), dtype="float32", seed=seed)
    if awake:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.trainable_parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


@pytest.fixture(scope="module")
def policies(models: dict[str, Path]) -> dict[str, PeftPolicy]:
    return {name: load(directory) for name, directory in models.items()}


@pytest.fixture
def policy(models: dict[str, Path]) -> PeftPolicy:
    return load(models["llama"], awake=False)


# -- tree == rows ------------------------------------------------------------------------------------


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


# -- what an update is -------------------------------------------------------------------------------


def games(n: int = 8) -> TrajectoryGroup:
    """Trajectories of one group that answered differently; half of them were right."""
    return group(
        *(
            trajectory(f"t{i}", float(i % 2), step(f"s{i}", [5, 6, 7], [10 + i, 2], logprobs=[-5.5, -5.9]))
            for i in range(n)
        )
    )


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


# -- nothing to train --------------------------------------------------------------------------------


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


# -- learning ----------------------------------------------------------------------------------------


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

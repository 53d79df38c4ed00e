"""Problems whose best policy is known: every loss finds it, from five seeds.

The policy is a real, tiny Llama with an adapter. It begins without a preference among eight tokens, and each
answer is one token, so a problem is solved when the tokens that pay are drawn nearly always.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch
from helpers.tiny import tiny_tokenizer
from helpers.training import group, step, trajectory
from transformers import LlamaConfig, LlamaForCausalLM

from art_core.config import LoRAConfig, LossName, TrainConfig
from art_core.training.grpo import Trainer
from art_core.training.peft_policy import PeftPolicy
from art_core.training.policy import TRAINING
from art_core.training.samples import NO_ADVANTAGE
from art_core.types import TrajectoryGroup

LOSSES: tuple[LossName, ...] = get_args(LossName)
SEEDS = range(5)
GAMES = 32
TOKENS = 8
PATIENCE = 60
SOLVED = 0.95


def undecided(seed: int) -> PeftPolicy:
    """A policy that finds all tokens about equally likely."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return PeftPolicy(LlamaForCausalLM(shape), tiny_tokenizer(), LoRAConfig(rank=8, alpha=16), seed=seed)


def probabilities(policy: PeftPolicy, prompt: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Of every token as the answer to a prompt."""
    with torch.no_grad(), policy.using(TRAINING):
        hidden = policy.hidden_states(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state
        return (policy.head(hidden[0, -1]).float() / temperature).softmax(-1)


class Player:
    """Answers prompts as the policy would, with the log-probabilities that a server would report."""

    def __init__(self, policy: PeftPolicy, seed: int, temperature: float = 1.0) -> None:
        self.policy = policy
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def answer(self, name: str, prompt: Sequence[int], node: str | None = None):
        """A step that answers a prompt."""
        key = tuple(prompt)
        if key not in self.known:
            self.known[key] = probabilities(self.policy, prompt, self.temperature)
        odds = self.known[key]
        token = int(torch.multinomial(odds, 1, generator=self.generator))
        logprobs, sampling = [float(odds[token].log())], {"temperature": self.temperature}
        return step(name, prompt, [token], logprobs=logprobs, node=node, sampling=sampling)


def said(answered) -> int:
    return answered.tokens.completion[0]


def bandit(player: Player) -> tuple[TrajectoryGroup, list[float]]:
    """Token 3 pays 1, token 5 pays a half, the others nothing."""
    members = []
    for i in range(GAMES):
        pull = player.answer(f"s{i}", [1])
        members.append(trajectory(f"t{i}", {3: 1.0, 5: 0.5}.get(said(pull), 0.0), pull))
    played = group(*members)
    return played, [sum(played.rewards) / GAMES]


def two_steps(player: Player) -> tuple[TrajectoryGroup, list[float]]:
    """The first answer decides, and is paid for when it is given; the second earns nothing."""
    members, paid = [], []
    for i in range(GAMES):
        first = player.answer(f"a{i}", [1])
        second = player.answer(f"b{i}", [1, said(first), 2])
        paid.append(float(said(first) == 3))
        played = trajectory(f"t{i}", None, first, second)
        members.append(replace(played, step_rewards={first.id: paid[-1], second.id: 0.0}))
    return group(*members), [sum(paid) / GAMES]


def paid_at_the_end(player: Player) -> tuple[TrajectoryGroup, list[float]]:
    """The first answer decides, but the reward comes with the last."""
    played, paid = two_steps(player)
    members = [replace(t, reward=sum(t.step_rewards.values()), step_rewards={}) for t in played]
    return group(*members), paid


def two_agents(player: Player) -> tuple[TrajectoryGroup, list[float]]:
    """Each agent has a reward of its own: the planner's token is 3, the writer's 5."""
    members, paid = [], []
    for i in range(GAMES):
        plan = player.answer(f"p{i}", [1], node="planner")
        write = player.answer(f"w{i}", [2], node="writer")
        rewards = {"planner": float(said(plan) == 3), "writer": float(said(write) == 5)}
        paid.append(rewards)
        members.append(replace(trajectory(f"t{i}", None, plan, write), node_rewards=rewards))
    return group(*members), [sum(r[agent] for r in paid) / GAMES for agent in ("planner", "writer")]


def solve(problem, config: TrainConfig, seed: int, temperature: float = 1.0):
    """Train until the problem is solved; the first and the last scores, the policy and the last report."""
    policy = undecided(seed)
    trainer = Trainer(policy, config, seed=seed)
    first = report = None
    for _ in range(PATIENCE):
        played, scores = problem(Player(policy, seed * PATIENCE + trainer.optimizer.updates, temperature))
        first = first or scores
        if min(scores) >= SOLVED:
            break
        report = trainer.train([played])
    return first, scores, policy, report


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("problem", "options"),
    [
        (bandit, {}),
        (two_steps, {"gamma": 1.0, "baseline_per": "turn"}),
        (paid_at_the_end, {"advantage": "leave_one_out"}),
        (two_agents, {"advantage": "std"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_loss_finds_the_optimum_from_five_seeds(problem, options, loss: LossName):
    config = TrainConfig(loss=loss, learning_rate=2e-2, epochs=2, **options)
    for seed in SEEDS:
        first, last, _, _ = solve(problem, config, seed)
        assert max(first) < 0.7, "it was not solved before"
        assert min(last) >= SOLVED, f"seed {seed}: {first} to {last}"


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_optimum_is_found_at_the_temperature_that_is_sampled_at(temperature: float):
    """The policy that sampled is the one that is trained: before the first update their ratio is 1."""
    config = TrainConfig(learning_rate=2e-2)
    policy = undecided(0)
    metrics = Trainer(policy, config).train([bandit(Player(policy, 0, temperature))[0]]).metrics
    assert metrics["kl_old_new"] == pytest.approx(0, abs=1e-6)
    assert metrics["importance_max"] == pytest.approx(1, abs=1e-4)
    for seed in SEEDS:
        first, last, _, _ = solve(bandit, config, seed, temperature)
        assert max(first) < 0.7, "it was not solved before"
        assert min(last) >= SOLVED, f"seed {seed}: {first} to {last}"


def test_a_step_after_which_nothing_is_earned_is_not_trained():
    """Two-step credit: with ``gamma``, a reward is due at the step that earned it."""
    config = TrainConfig(learning_rate=2e-2, gamma=1.0, baseline_per="turn")
    trainer = Trainer(undecided(0), config)
    played, _ = two_steps(Player(trainer.policy, 0))
    report = trainer.train([played])
    assert report.metrics["entries"] == GAMES
    assert report.left_out == {NO_ADVANTAGE: GAMES}


@pytest.mark.parametrize("options", [{"entropy_coef": 0.3}, {"entropy_coef": 0.25, "entropy_target": 1.0}])
def test_an_entropy_bonus_keeps_a_solved_policy_from_certainty(options):
    """Without it, the policy becomes nearly certain; a target keeps entropy about there."""

    def entropy_after(config: TrainConfig) -> float:
        policy = undecided(0)
        trainer = Trainer(policy, config)
        for n in range(40):
            trainer.train([bandit(Player(policy, n))[0]])
        odds = probabilities(policy, [1])
        return float(-(odds * odds.log()).sum())

    assert entropy_after(TrainConfig(learning_rate=2e-2)) < 0.3
    assert entropy_after(TrainConfig(learning_rate=2e-2, **options)) > 0.4

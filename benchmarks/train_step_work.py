"""What `train_step.py` trains on: shapes of models, and token ids of rollouts."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from art_core.types import (
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Step,
    StepTokens,
    Trajectory,
    TrajectoryGroup,
)


@dataclass(frozen=True)
class Workload:
    """One optimizer step's data.

    Attributes:
        prompt: tokens that all rollouts of a group begin with.
        rollouts: in a group.
        turns: policy calls of a rollout.
        sampled: tokens that each call samples.
        tool: tokens that a tool answers between two calls.
        groups: in the step.
    """

    prompt: int
    rollouts: int
    turns: int
    sampled: int
    tool: int
    groups: int = 1

    @property
    def trained(self) -> int:
        """Tokens that are trained in the step."""
        return self.groups * self.rollouts * self.turns * self.sampled

    @property
    def merged(self) -> int:
        """Tokens of one rollout as one row."""
        return self.prompt + self.turns * self.sampled + (self.turns - 1) * self.tool

    @property
    def unique(self) -> int:
        """Tokens of the step when shared prompts count once."""
        return self.groups * (self.prompt + self.rollouts * (self.merged - self.prompt))


W1 = Workload(prompt=4000, rollouts=16, turns=6, sampled=60, tool=200)
W2 = Workload(prompt=200, rollouts=8, turns=1, sampled=1000, tool=0)
# 64,000 tokens in one rollout, half of them sampled.
W3 = Workload(prompt=2000, rollouts=1, turns=31, sampled=1000, tool=1034)
WORKLOADS: dict[str, Workload] = {
    "w1": W1,
    "w2": W2,
    "w3": W3,
    **{f"g{n}": Workload(4000, n, 6, 60, 200) for n in (4, 8, 16, 32)},
}
SMALL: dict[str, Workload] = {
    "w1": Workload(prompt=160, rollouts=4, turns=3, sampled=8, tool=16),
    "w2": Workload(prompt=16, rollouts=4, turns=1, sampled=48, tool=0),
}

Segments = list[tuple[list[int], bool]]


@dataclass(frozen=True)
class Rollout:
    """Token ids of one rollout.

    Attributes:
        ids: the whole row, from the prompt to the last sampled token.
        sampled: which of them the policy sampled.
        advantage: reward minus the group's mean.
        reward: of the rollout.
        calls: for each call where its prompt ends and where its answer ends.
    """

    ids: list[int]
    sampled: list[bool]
    advantage: float
    reward: float
    calls: list[tuple[int, int]]


def groups(work: Workload, vocabulary: int, seed: int = 0) -> list[list[Rollout]]:
    """Random tokens in the workload's shape; every contender gets the same ones."""
    random = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return random.integers(10, vocabulary - 10, count).tolist()

    found: list[list[Rollout]] = []
    for _ in range(work.groups):
        prompt = tokens(work.prompt)
        rewards = [float(i % 2) for i in range(work.rollouts)] if work.rollouts > 1 else [1.0]
        # A single rollout has no one to be compared with; it still has to move something.
        mean = sum(rewards) / len(rewards) if work.rollouts > 1 else 0.0
        members: list[Rollout] = []
        for reward in rewards:
            ids, sampled, calls = list(prompt), [False] * len(prompt), []
            for turn in range(work.turns):
                if turn:
                    ids += tokens(work.tool)
                    sampled += [False] * work.tool
                start = len(ids)
                ids += tokens(work.sampled)
                sampled += [True] * work.sampled
                calls.append((start, len(ids)))
            members.append(Rollout(ids, sampled, reward - mean, reward, calls))
        found.append(members)
    return found


def trajectory_groups(work: list[list[Rollout]]) -> list[TrajectoryGroup]:
    """The same as what a user hands to the trainer; a rollout without company gets a silent companion."""
    found: list[TrajectoryGroup] = []
    for g, members in enumerate(work):
        scenario = Scenario(f"s{g}")
        trajectories = [_trajectory(f"{g}.{r}", m.reward, scenario, m) for r, m in enumerate(members)]
        if len(members) == 1:
            short = Rollout([*members[0].ids[:64], 5], [False] * 64 + [True], 0.0, 0.0, [(64, 65)])
            trajectories.append(_trajectory(f"{g}.x", 0.0, scenario, short))
        found.append(TrajectoryGroup(scenario, trajectories))
    return found


def _trajectory(name: str, reward: float, scenario: Scenario, rollout: Rollout) -> Trajectory:
    steps = tuple(
        Step(
            id=f"{name}.{i}",
            rollout_id=name,
            messages=(),
            model="m@0",
            started_at=0.0,
            duration=0.0,
            tokens=StepTokens(
                tuple(rollout.ids[:start]), tuple(rollout.ids[start:end]), (None,) * (end - start)
            ),
            policy=PolicyVersion("m", 0),
        )
        for i, (start, end) in enumerate(rollout.calls)
    )
    return Trajectory(id=name, scenario=scenario, status=RolloutStatus.FINISHED, reward=reward, steps=steps)


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen2",
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 65536,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "05b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 65536,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
}
"""Models of random weights, by name: speed and memory depend on the shape alone."""


def write_model(name: str, directory: Path, device: str) -> Path:
    """Write a model of a shape, unless it is there already; returns its directory."""
    if (directory / "ready").exists():
        return directory
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1, "use_sliding_window": False}
    config = AutoConfig.for_model(**SHAPES[name], **ids)
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=kind)
    model.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<|end|>", "<|pad|>", *alphabet])}
    spelled = Tokenizer(models.BPE(vocab=words, merges=[]))
    spelled.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelled.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=spelled,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    ).save_pretrained(directory)
    (directory / "ready").write_text(json.dumps(SHAPES[name]))
    return directory


def described(work: Workload) -> dict[str, int]:
    """A workload as it is written into results."""
    return {**asdict(work), "trained": work.trained, "unique": work.unique}

"""The same tensors through TRL's own trainer give the same loss and the same gradient.

TRL's `GRPOTrainer._compute_loss` runs on the very PEFT model that is trained here, over a batch that is
padded as TRL pads it: prompts on the left, completions on the right. Only its Triton kernel for
log-probabilities is replaced by plain torch, since there is no Triton on a CPU.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.tiny import tiny_model
from helpers.training import sample
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from art_core.config import LoRAConfig, TrainConfig
from art_core.training.batch import minibatch
from art_core.training.coefficients import Coefficients
from art_core.training.memory import TokenBudget
from art_core.training.peft_policy import PeftPolicy
from art_core.training.ranks import Alone
from art_core.training.samples import Sample, canonical
from art_core.training.update import Passes, accumulate_policy_gradient

LONGEST = 6


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PeftPolicy:
    directory = tiny_model(tmp_path_factory.mktemp("model") / "llama")
    policy = PeftPolicy.load(str(directory), LoRAConfig(rank=4, alpha=8), dtype="float32")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


def answers() -> list[Sample]:
    """One answer for each rollout, as TRL has it; in the order in which the tree has them."""
    batch = [
        sample(
            [5, 6, 7, *([8] * (i // 2))],
            [10 + i % 3, *range(12, 12 + i)],
            advantage=[1.0, -1.0, 0.5, -0.5, 2.0, -0.7][i],
            step=f"s{i}",
            rollout=f"r{i}",
        )
        for i in range(6)
    ]
    return canonical(batch)


def moved(sample: Sample) -> list[float]:
    """New minus old log-probability of each token: small, large, and of both signs."""
    return [0.5 * math.sin(len(sample.prompt) * 5.0 + t) for t in range(len(sample.completion))]


def padded(rows: Sequence[Sequence[float]], *, left: bool = False) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor(
        [[0] * (width - len(r)) + [*r] if left else [*r] + [0] * (width - len(r)) for r in rows]
    )


def plain_logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *,
    temperature: float = 1.0,
    **_: Any,
) -> tuple[Tensor, Tensor, None]:
    """What TRL's kernel computes, by transformers' own logits."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
    every = (logits.float() / temperature).log_softmax(-1)
    chosen = every.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0]
    return chosen, -(every.exp() * every).sum(-1), None


def trls_loss(
    policy: PeftPolicy, batch: Sequence[Sample], now: Tensor, out: Path, *, beta: float = 0.0, **options: Any
) -> Tensor:
    """What TRL makes of the batch; ``beta`` weighs KL to a reference of -4 for each token."""
    trainer = GRPOTrainer(
        model=policy.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=len(batch),
            num_generations=len(batch),
            steps_per_generation=1,
            max_completion_length=LONGEST,
            epsilon=0.2,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            beta=0.0,  # otherwise TRL adds a reference adapter to the model
            **options,
        ),
        train_dataset=Dataset.from_list([{"prompt": "hello"}]),
        processing_class=policy.tokenizer,
    )
    trainer._get_per_token_logps_and_entropies = partial(plain_logprobs, temperature=trainer.temperature)
    trainer.beta = beta
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    completions = [s.completion for s in batch]
    mask = padded([[1] * len(c) for c in completions])
    by_answer = now.split([len(c) for c in completions])
    old = [(n - torch.tensor(moved(s))).tolist() for n, s in zip(by_answer, batch, strict=True)]
    return trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": padded([s.prompt for s in batch], left=True),
            "prompt_mask": padded([[1] * len(s.prompt) for s in batch], left=True),
            "completion_ids": padded(completions),
            "completion_mask": mask,
            "advantages": torch.tensor([s.advantage for s in batch]),
            "old_per_token_logps": padded(old),
            "ref_per_token_logps": padded([[-4.0] * len(c) for c in completions]),
            "num_items_in_batch": mask.sum(),
        },
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"loss": "grpo"}, {"loss_type": "grpo"}),
        ({"loss": "grpo", "kl_coef": 0.1}, {"loss_type": "grpo", "beta": 0.1}),
        (
            {"loss": "grpo", "entropy_coef": 0.05},
            {"loss_type": "grpo", "entropy_coef": 0.05},
        ),
        (
            {"loss": "grpo", "entropy_coef": 0.05},
            {"loss_type": "grpo", "entropy_coef": 0.05, "temperature": 0.7},
        ),
        (
            {"loss": "gspo"},
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "temperature": 1.5},
        ),
        ({"loss": "dr_grpo", "loss_length": LONGEST}, {"loss_type": "dr_grpo"}),
        ({"loss": "dapo"}, {"loss_type": "dapo"}),
        (
            {"loss": "dapo", "entropy_coef": 0.05},
            {"loss_type": "dapo", "entropy_coef": 0.05},
        ),
        (
            {"loss": "gspo"},
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        ),
        # TRL's cap is on the ratio itself, where MiniMax-M1 writes 1 + epsilon.
        ({"loss": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_loss_and_gradient_are_trls(
    policy: PeftPolicy, tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]
):
    batch = [replace(s, temperature=theirs.get("temperature", 1.0)) for s in answers()]
    config = TrainConfig(**{"clip_low": 0.2, "clip_high": 0.28, "importance_cap": None, **ours})
    tree = minibatch(batch, config.averaging, length=config.loss_length).tree
    parameters = policy.trainable_parameters()
    passes = Passes(policy, TokenBudget(1000, Alone(), parameters), Alone(), lambda: None)

    def run(proximal: Tensor | None) -> Any:
        for parameter in parameters:
            parameter.grad = None
        base = torch.full((len(tree.entries),), -4.0) if config.kl_coef else None
        return accumulate_policy_gradient(
            passes, tree, config, Coefficients.of(config), proximal=proximal, base=base
        )

    now = run(None).logprob
    figures = run(now - torch.tensor([m for s in batch for m in moved(s)]))
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    assert 0 < figures.clipped.float().mean() < 1

    for parameter in parameters:
        parameter.grad = None
    expected = trls_loss(policy, batch, now, tmp_path, **{"epsilon_high": 0.28, **theirs})
    expected.backward()
    assert figures.loss == pytest.approx(expected.item(), abs=1e-5)
    for mine, parameter in zip(gradients, parameters, strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-5, rtol=1e-4)

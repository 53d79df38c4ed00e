"""Compare Unsloth's policy with PEFT's, in a process of its own: Unsloth patches libraries for all of it.

    python unsloth_equality.py MODEL_DIRECTORY SCRATCH

Prints one JSON object: the largest differences of log-probabilities and gradients by path, and of what a
saved adapter, a snapshot and the base model give.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import unsloth  # noqa: E402, F401, I001 - before transformers

import torch  # noqa: E402
from helpers.training import sample  # noqa: E402

from art_core.config import LoRAConfig  # noqa: E402
from art_core.training.logprobs import entry_logprobs  # noqa: E402
from art_core.training.peft_policy import PeftPolicy  # noqa: E402
from art_core.training.policy import BASE, TRAINING  # noqa: E402
from art_core.training.token_tree import build_tree  # noqa: E402
from art_core.training.unsloth_policy import UnslothPolicy  # noqa: E402

LORA = LoRAConfig(rank=4, alpha=8)
TRUNK = list(range(10, 40))
TREE = build_tree(
    [
        sample(TRUNK, [5, 6, 7], step="a", rollout="a"),
        sample(TRUNK, [8, 9, 10, 11], step="b", rollout="b"),
        sample(TRUNK, [8, 9, 12], step="d", rollout="d", temperature=0.7),
        sample([*TRUNK, 8], [22, 33], step="c", rollout="b"),
    ]
)


def filled(policy: PeftPolicy) -> PeftPolicy:
    with torch.no_grad():
        for i, weight in enumerate(policy.trainable_parameters()):
            weight.copy_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i)))
    return policy


def outcome(policy: PeftPolicy) -> tuple[torch.Tensor, torch.Tensor]:
    for weight in policy.trainable_parameters():
        weight.grad = None
    with policy.using(TRAINING):
        found = entry_logprobs(policy, TREE)
        (found.logprob * torch.arange(1, len(found.logprob) + 1)).sum().backward()
    return found.logprob.detach(), torch.cat([w.grad.flatten() for w in policy.trainable_parameters()])


def seen(policy: PeftPolicy, adapter: str | None) -> torch.Tensor:
    with torch.no_grad(), policy.using(adapter):
        return entry_logprobs(policy, TREE).logprob


def main(directory: str, scratch: Path) -> None:
    peft = filled(PeftPolicy.load(directory, LORA, dtype="float32"))
    own = UnslothPolicy.load(directory, LORA, dtype="float32")
    filled(own)
    expected = outcome(peft)
    found: dict[str, float] = {"gradient_size": float(expected[1].abs().max())}
    for path in ("packed", "padded"):
        for checkpointing in (False, True):
            own.path, own.gradient_checkpointing = path, checkpointing
            logprob, gradient = outcome(own)
            name = f"{path}{', checkpointing' if checkpointing else ''}"
            found[f"{name}: logprob"] = float((logprob - expected[0]).abs().max())
            found[f"{name}: gradient"] = float((gradient - expected[1]).abs().max())
    own.snapshot("m@1")
    found["snapshot"] = float((seen(own, "m@1") - expected[0]).abs().max())
    found["base"] = float((seen(own, BASE) - seen(peft, BASE)).abs().max())
    own.save_weights(scratch / "adapter")
    peft.load_weights(scratch / "adapter")
    found["saved"] = float((seen(peft, TRAINING) - expected[0]).abs().max())
    found["fingerprints"] = float(own.base_fingerprint() != peft.base_fingerprint())
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

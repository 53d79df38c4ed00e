"""A policy without an adapter: every weight of a small model is trained (full fine-tuning).

Invariant: the optimizer's weights are float32, whatever the model computes in; those that the model computes
with are their rounding, exactly what is served; a snapshot's weights are its own and never change.

Updates of 1e-5 are lost to bfloat16's rounding, so the model's weights are copies of float32 master weights,
to which each gradient is added as soon as it is there (Micikevicius et al. 2018, arXiv:1710.03740, section
3.1); with float32 models there is one set of weights. A version, the base model included, is another set of
weights: `FullPolicy.using` points the model at it, and copies nothing.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from art_core.config import DTypeName, LoRAConfig
from art_core.errors import CheckpointError, ConfigError, EngineError
from art_core.training.causal_policy import CausalPolicy, fingerprint, load_causal_lm
from art_core.training.forward import Attention, Kernels
from art_core.training.policy import BASE, TRAINING, resolve_dtype

logger = logging.getLogger(__name__)

ADAMW_BYTES = 8
"""AdamW's two moments of one weight, in float32."""


class FullPolicy(CausalPolicy):
    """All weights of any ``AutoModelForCausalLM``, trained by transformers' own modules.

    Args:
        model: whose weights begin the training; its ``name_or_path`` must lead to them again, since KL to
            the base model reads them when it is first asked for.
        tokenizer: with a chat template.
        attention: how trees are attended to in training; see `forward.Attention`.
    """

    lora: LoRAConfig | None = None

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, attention: Attention = "auto"
    ) -> None:
        self._take(model, tokenizer)
        self.kernels = "modules"  # fused kernels have gradients for adapters alone
        self.attention = attention
        named: list[tuple[str, torch.nn.Parameter]] = sorted(model.named_parameters(), key=lambda n: n[0])
        self._names = [name for name, _ in named]
        self._placed = [parameter for _, parameter in named]
        self._fingerprint = fingerprint(named)
        self._masters: list[torch.nn.Parameter] = []
        for parameter in self._placed:
            # `float` shares a float32 weight's memory.
            master = torch.nn.Parameter(parameter.detach().float())
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))
            self._masters.append(master)
        self._weights: dict[str | None, list[Tensor]] = {TRAINING: [p.detach() for p in self._placed]}
        self._active: str | None = TRAINING
        self._rounded = [master._version for master in self._masters]
        logger.info("all %d weights are trained: %s", self._count(), self.memory())

    @classmethod
    def load(
        cls,
        base_model: str,
        *,
        dtype: DTypeName = "auto",
        device: str = "cpu",
        kernels: Kernels = "auto",
        attention: Attention = "auto",
    ) -> "FullPolicy":
        """Load a base model by hub name or directory.

        Raises:
            ConfigError: there is no such model, it cannot be read as a causal language model, or fused
                kernels are asked for.
        """
        if kernels == "fused":
            raise ConfigError(
                "kernels='fused' with lora=None: fused kernels have gradients for adapters alone; leave "
                "kernels out, or train an adapter"
            )
        model, tokenizer = load_causal_lm(base_model, resolve_dtype(dtype), device)
        return cls(model, tokenizer, attention=attention)

    def base_fingerprint(self) -> str:
        """Checksum of every base weight's name, shape and first values, rounded to bfloat16."""
        return self._fingerprint

    def memory(self) -> str:
        """What training takes beside the passes themselves, in words."""
        count, held = self._count(), sum(p.numel() * p.element_size() for p in self._placed)
        masters = sum(m.numel() * 4 for m, p in self._pairs() if p.dtype != torch.float32)
        parts = {
            "weights": held,
            "float32 master weights": masters,
            "gradients": 4 * count,
            "AdamW's state": ADAMW_BYTES * count,
            "each version served from this process, and the base model for KL": held,
        }
        return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts.items() if size)

    def _count(self) -> int:
        return sum(master.numel() for master in self._masters)

    def _pairs(self) -> Sequence[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        return list(zip(self._masters, self._placed, strict=True))

    @contextmanager
    def using(self, name: str | None) -> Generator[None]:
        """Run with a snapshot, `TRAINING` or `BASE` inside the block; holds the lock.

        Raises:
            EngineError: there is no such snapshot.
            ConfigError: the base model's weights are not where they were any more.
        """
        with self.lock:
            if name is BASE and BASE not in self._weights:
                self._weights[BASE] = self._read_base()
            if name not in self._weights:
                known = ", ".join(str(n) for n in self._weights if n not in (BASE, TRAINING)) or "none"
                raise EngineError(f"no policy version {name!r} is loaded; loaded: {known}")
            self._activate(name)
            yield

    def _activate(self, name: str | None) -> None:
        if self._active != name:
            for parameter, weight in zip(self._placed, self._weights[name], strict=True):
                parameter.data = weight
            self._active = name
        if name == TRAINING:
            self._round()

    @torch.no_grad()
    def _round(self) -> None:
        """Let what the model trains with follow the master weights, if those have moved."""
        moved = [master._version for master in self._masters]
        if moved == self._rounded:
            return
        for weight, master in zip(self._weights[TRAINING], self._masters, strict=True):
            if weight.dtype != master.dtype:  # otherwise they are one
                weight.copy_(master)
        self._rounded = moved

    @contextmanager
    def dropout(self) -> Generator[None]:
        """Nothing is dropped: dropout is an adapter's; holds the lock."""
        with self.lock:
            yield

    def snapshot(self, name: str, directory: Path | None = None) -> None:
        """Keep a copy of the weights in training, or those of a model directory, under a name.

        Raises:
            EngineError: the name is taken.
            CheckpointError: the directory holds no model of these shapes.
        """
        with self.lock:
            if name in self._weights:
                raise EngineError(f"policy version {name!r} is loaded already; versions never change")
            if directory is not None:
                self._weights[name] = [
                    w.to(p.dtype) for w, p in zip(self._read(directory), self._placed, strict=True)
                ]
                return
            self._round()
            self._weights[name] = [weight.clone() for weight in self._weights[TRAINING]]

    def drop(self, name: str) -> None:
        """Forget a snapshot; unknown names are ignored, so that retiring twice is harmless."""
        with self.lock:
            if name in (BASE, TRAINING) or name not in self._weights:
                return
            if self._active == name:
                self._activate(TRAINING)
            del self._weights[name]

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """The master weights, float32, in the order of their names."""
        return list(self._masters)

    def save_weights(self, directory: Path) -> None:
        """Write the whole model as an ordinary transformers directory, its weights in float32."""
        with self.lock:
            self._activate(TRAINING)
            trained = {id(p): master.detach() for master, p in self._pairs()}
            state: dict[str, Tensor] = self.model.state_dict()
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                state[name] = trained[id(parameter)]
            self.model.save_pretrained(str(directory), state_dict=state)
            self.tokenizer.save_pretrained(str(directory))

    @torch.no_grad()
    def load_weights(self, directory: Path) -> None:
        """Replace the master weights by a model directory's.

        Raises:
            CheckpointError: the directory holds no model of these shapes.
        """
        with self.lock:
            for master, weight in zip(self._masters, self._read(directory), strict=True):
                master.copy_(weight)

    def _read_base(self) -> list[Tensor]:
        try:
            read = self._read_weights(self.base_model)
        except (OSError, ValueError, CheckpointError) as gone:
            raise ConfigError(
                f"KL to the base model needs its weights again, and {self.base_model!r} does not hold them "
                f"any more ({str(gone).splitlines()[0]}); put them back, or set kl_coef=0"
            ) from gone
        weights = [w.to(p.dtype) for w, p in zip(read, self._placed, strict=True)]
        if fingerprint(zip(self._names, weights, strict=True)) != self._fingerprint:
            raise ConfigError(
                f"KL to the base model needs its weights again, and those of {self.base_model!r} are others "
                "now; put them back, or set kl_coef=0"
            )
        return weights

    def _read(self, directory: Path) -> list[Tensor]:
        if not (directory / "config.json").exists():
            raise CheckpointError(
                f"{directory} is not a model's directory: it has no config.json. This model trains all "
                "weights (lora=None)"
            )
        try:
            return self._read_weights(str(directory))
        except (OSError, ValueError, RuntimeError) as unreadable:
            raise CheckpointError(
                f"{directory} cannot be read as this model: {str(unreadable).splitlines()[0]}"
            ) from unreadable

    def _read_weights(self, source: str) -> list[Tensor]:
        """A model's weights in float32 on the device, in the order of ours."""
        found: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True
        )
        model, notes = found
        weights: dict[str, Tensor] = {n: p.detach() for n, p in model.named_parameters()}
        wrong = sorted(notes["missing_keys"]) + [
            name
            for name, ours in zip(self._names, self._placed, strict=True)
            if name not in weights or weights[name].shape != ours.shape
        ]
        if wrong:
            raise CheckpointError(
                f"{source} lacks {len(wrong)} of this model's weights, or has them in other shapes: "
                f"{wrong[0]}, ..."
            )
        return [weights[name].to(self.device) for name in self._names]


def _hand_over(master: torch.nn.Parameter, parameter: torch.nn.Parameter) -> None:
    """Add a weight's gradient to its master's, and forget it."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return
    wide = gradient.float()
    master.grad = wide if master.grad is None else master.grad.add_(wide)

"""A policy that Unsloth runs: its kernels, its gradient checkpointing, its 4-bit weights.

Invariant: what is trained is an ordinary PEFT adapter under PEFT's names, so its directories, snapshots and
checkpoints are those of `PeftPolicy`.

``import unsloth`` replaces parts of transformers, PEFT and TRL for the whole process, and should come before
them. So it is imported here alone, when this policy is asked for, in the process that trains; whoever starts
that process and knows the choice imports this module first.

Its attention takes no mask of ours, so trees go before it as rows: packed, kept apart by their positions,
or padded on the right.
"""

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from art_core.config import DTypeName, LoRAConfig
from art_core.errors import ConfigError, words_of
from art_core.training.layout import Layout
from art_core.training.layout import Path as LayoutPath
from art_core.training.peft_policy import PeftPolicy
from art_core.training.policy import resolve_dtype

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What ``all-linear`` stands for: the layers that Unsloth's kernels adapt."""


def import_unsloth() -> Any:
    """Unsloth's ``FastLanguageModel``.

    Raises:
        ConfigError: Unsloth is not installed, or does not run here.
    """
    try:
        return importlib.import_module("unsloth").FastLanguageModel
    except (ImportError, RuntimeError) as missing:  # what it says where it finds no GPU that it knows
        raise ConfigError(
            f"policy='unsloth' needs Unsloth: {words_of(missing).splitlines()[0]}. "
            "Install art-langgraph[unsloth], or train with policy='peft'"
        ) from missing


class UnslothPolicy(PeftPolicy):
    """LoRA by Unsloth's ``FastLanguageModel``.

    It trains; the embedded engine wants a `PeftPolicy`, since Unsloth's decoder has a cache of its own.

    Args:
        model: a PEFT model that Unsloth made, its adapter named ``default``.
        tokenizer: with a chat template.
        lora: the adapter's settings.
    """

    def __init__(self, model: Any, tokenizer: Any, lora: LoRAConfig) -> None:
        self._adopt(model, tokenizer, lora)
        self.paths = frozenset[LayoutPath](("packed", "padded"))
        self.path = "packed"

    @classmethod
    def load(  # type: ignore[override]
        cls,
        base_model: str,
        lora: LoRAConfig,
        *,
        dtype: DTypeName = "auto",
        device: str = "cpu",
        seed: int = 0,
        max_length: int = 65536,
        load_in_4bit: bool = False,
    ) -> "UnslothPolicy":
        """Load a base model by hub name or directory.

        Args:
            base_model: what to load.
            lora: the adapter.
            dtype: of the weights that are not quantised, and of the computation.
            device: Unsloth takes the first GPU where there is one; this must agree.
            seed: of the adapter's first weights.
            max_length: longest row, in tokens.
            load_in_4bit: quantise the base weights (QLoRA, Dettmers et al. 2023, arXiv:2305.14314). The
                server has them in 16 bits, so its log-probabilities differ more from the trainer's: see
                ``importance_mean`` and ``kl_old_new`` in the report.

        Raises:
            ConfigError: Unsloth is missing, does not know the model, or cannot adapt what ``lora`` names.
        """
        if load_in_4bit and not device.startswith("cuda"):
            raise ConfigError(f"load_in_4bit needs a CUDA device; training runs on {device}")
        fast = import_unsloth()
        targets = lora.target_modules
        if isinstance(targets, str):
            if targets != "all-linear":
                raise ConfigError(
                    f"target_modules={targets!r}: with policy='unsloth' give 'all-linear' or a tuple of names"
                )
            targets = ALL_LINEAR
        try:
            model, _ = fast.from_pretrained(
                base_model,
                dtype=resolve_dtype(dtype),
                load_in_4bit=load_in_4bit,
                max_seq_length=max_length,
            )
            model = fast.get_peft_model(
                model,
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=list(targets),
                bias="none",
                use_gradient_checkpointing="unsloth",
                random_state=seed,
                max_seq_length=max_length,
            )
            tokenizer = AutoTokenizer.from_pretrained(base_model)
        except (OSError, ValueError, RuntimeError) as unknown:
            if isinstance(unknown, torch.OutOfMemoryError):
                raise
            why = words_of(unknown).strip().splitlines()[0]
            raise ConfigError(
                f"Unsloth cannot load base_model={base_model!r} ({why}); "
                "policy='peft' takes any transformers model"
            ) from unknown
        return cls(model, tokenizer, lora)

    def states(self, layout: Layout) -> torch.Tensor:
        """Hidden states of rows, by flat index  [places, width].

        Raises:
            ConfigError: the layout is a tree's.
        """
        if layout.path not in self.paths:
            raise ConfigError(
                f"Unsloth's attention takes rows, not path={layout.path!r}; choose 'packed' or 'padded'"
            )
        causal_lm = self._causal_lm
        decoder = causal_lm.get_decoder()
        token_ids = torch.from_numpy(np.ascontiguousarray(layout.token_ids)).to(self.device)
        positions = torch.from_numpy(np.ascontiguousarray(layout.positions)).to(self.device)
        # Unsloth tells packed rows apart by positions that begin again; padding, which is on the right,
        # is hidden by causality. Its checkpointing acts in training mode alone.
        checkpointing = self.gradient_checkpointing and torch.is_grad_enabled()
        wide = causal_lm.dtype == torch.float32
        with (
            _training_mode(self.model, decoder, checkpointing),
            torch.autocast(self.device.type, causal_lm.dtype, enabled=not wide),
        ):
            hidden = decoder(
                input_ids=token_ids,
                position_ids=positions if layout.path == "packed" else None,
                use_cache=False,
            ).last_hidden_state
        return hidden.flatten(0, 1).to(causal_lm.dtype)


@contextmanager
def _training_mode(model: Any, decoder: Any, checkpointing: bool) -> Generator[None]:
    """Training mode inside the block, which chooses Unsloth's training kernels.

    Dropout of adapters stays as `PeftPolicy.dropout` set it.
    """
    dropouts = [(m, m.training) for n, m in model.named_modules() if "lora_dropout." in n]
    model.train()
    for module in (decoder, *decoder.layers):
        module.gradient_checkpointing = checkpointing
    try:
        for module, training in dropouts:
            module.train(training)
        yield
    finally:
        model.eval()
        for module, training in dropouts:
            module.train(training)

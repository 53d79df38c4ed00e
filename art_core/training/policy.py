"""A policy: what training and the embedded engine need of a model that learns.

Invariant: a snapshot never changes after it was taken, and what `BASE` stands for never changes at all.

The engine decodes with snapshots, the trainer updates what is trained; both use the same modules, so
whoever runs the model holds ``policy.lock``. `peft_policy` and `unsloth_policy` train an adapter,
`full_policy` all weights: "the weights" of a policy are what it trains, and its snapshots are copies of it.
"""

import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from art_core.config import DTypeName, LoRAConfig
from art_core.training.layout import Layout
from art_core.training.layout import Path as LayoutPath

TRAINING = "default"
"""PEFT's name of the adapter in training; `save_pretrained` writes it without a subfolder."""

BASE = None
"""Stands for the base model, all adapters off."""


class Policy(Protocol):
    """What training and the embedded engine need of a model."""

    lock: threading.RLock
    tokenizer: PreTrainedTokenizerBase

    @property
    def lora(self) -> LoRAConfig | None:
        """The adapter; None: all weights are trained."""
        ...

    @property
    def base_model(self) -> str:
        """The base model's hub name or directory."""
        ...

    def base_fingerprint(self) -> str:
        """Tells base models apart by their weights, wherever they lie and whatever type they have."""
        ...

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        ...

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens with which the model ends an answer."""
        ...

    @property
    def context_length(self) -> int | None:
        """Most tokens over which every layer attends to all that came before; None when unlimited."""
        ...

    def hidden_states(self, **inputs: Any) -> Any:
        """The decoder's forward pass without the head; takes what transformers takes.

        Returns:
            transformers' model output: ``last_hidden_state`` [batch, tokens, width], ``past_key_values``.
        """
        ...

    paths: frozenset[LayoutPath]
    """How a token tree may be put before this model; a probe checks it (`paths.probe`)."""

    path: LayoutPath
    """How trees are put before it from now on; one of `paths`."""

    gradient_checkpointing: bool
    """Whether a trained pass keeps its layers' inputs alone, and computes the rest again."""

    def states(self, layout: Layout) -> torch.Tensor:
        """Hidden states of a layout, by the flat index of its places  [places or more, width]."""
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., width] to logits [..., vocabulary]."""
        ...

    @property
    def head_weight(self) -> torch.Tensor | None:
        """The head as one frozen matrix  [vocabulary, width]; None when it is more than that."""
        ...

    def using(self, name: str | None) -> Any:
        """A context in which the model runs with this snapshot, `TRAINING`, or `BASE`."""
        ...

    def dropout(self) -> AbstractContextManager[None]:
        """A context in which the training adapter's dropout acts; everywhere else it does not."""
        ...

    def snapshot(self, name: str, directory: Path | None = None) -> None:
        """Freeze a copy of what is trained, or load one from a directory, under a name."""
        ...

    def drop(self, name: str) -> None:
        """Forget a snapshot."""
        ...

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizer updates, in a fixed order."""
        ...

    def save_weights(self, directory: Path) -> None:
        """Write what is trained as an ordinary directory, of PEFT or of transformers."""
        ...

    def load_weights(self, directory: Path) -> None:
        """Replace what is trained by what `save_weights` wrote."""
        ...


def resolve_dtype(dtype: DTypeName) -> torch.dtype:
    """``auto`` is bfloat16."""
    return {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]

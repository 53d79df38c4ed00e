"""What policies on transformers' causal language models have in common, whatever of them is trained.

Invariant: whoever runs the model holds ``lock``; hidden states come from the decoder alone, so that logits
exist only for tokens that are asked about.

Training calls `CausalPolicy.states` with layouts of token trees, which `forward.LayoutForward` runs; the
embedded engine calls `CausalPolicy.hidden_states` with a cache.
"""

import hashlib
import threading
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from art_core.errors import ConfigError
from art_core.training.attention import register
from art_core.training.forward import AdapterCompute, Attention, Kernels, LayoutForward
from art_core.training.layout import PATHS, Layout
from art_core.training.layout import Path as LayoutPath


class CausalPolicy:
    """A causal language model that trees of tokens, or a cache, can be put before.

    Attributes:
        gradient_checkpointing: keep the layers' inputs alone in a forward pass that is trained, and
            compute the rest again.
    """

    model: Any
    kernels: Kernels = "auto"
    adapter_compute: AdapterCompute = "auto"
    attention: Attention = "auto"

    def _take(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Begin with a model, of which nothing is known yet."""
        self.lock = threading.RLock()
        self.tokenizer = tokenizer
        self.model = model
        self.model.eval()  # dropout in the model would make sampling and training disagree
        self.paths: frozenset[LayoutPath] = frozenset(PATHS)
        self.path: LayoutPath = "tree"
        self.gradient_checkpointing = False
        self._dropping = False
        self._forward: LayoutForward | None = None

    @property
    def _causal_lm(self) -> Any:
        return self.model

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.model.device

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokenizer's end token and those of the model's generation settings."""
        settings = getattr(self._causal_lm, "generation_config", None)
        listed: Any = getattr(settings, "eos_token_id", None)
        ids: list[Any] = [*listed] if isinstance(listed, list) else [listed]
        ids.append(self.tokenizer.eos_token_id)
        return frozenset(i for i in ids if isinstance(i, int))

    @property
    def base_model(self) -> str:
        """The base model's hub name or directory."""
        return self._causal_lm.config.name_or_path

    @property
    def context_length(self) -> int | None:
        """The model's positions, or the window of layers that see no further.

        Raises:
            ConfigError: the model has layers that are not attention and cannot be masked by token.
        """
        config: Any = self._causal_lm.config.get_text_config()
        kinds: set[str] = set(getattr(config, "layer_types", None) or ())
        window: Any = getattr(config, "sliding_window", None)
        others = kinds - {"full_attention", "sliding_attention"}
        if others:
            raise ConfigError(
                f"this model has {', '.join(sorted(others))} layers; only models whose layers are all "
                "attention can be trained and served here"
            )
        limits = [getattr(config, "max_position_embeddings", None)]
        if "sliding_attention" in kinds or not kinds:
            limits.append(window)
        known = [limit for limit in limits if isinstance(limit, int)]
        return min(known, default=None)

    def hidden_states(self, **inputs: Any) -> Any:
        """The decoder's forward pass without the head; takes what transformers takes."""
        return self._causal_lm.get_decoder()(**inputs)

    def states(self, layout: Layout) -> torch.Tensor:
        """Hidden states of a layout, by the flat index of its places  [places or more, width]."""
        if self._forward is None:
            self._forward = LayoutForward(
                self._causal_lm,
                kernels=self.kernels,
                adapter_compute=self.adapter_compute,
                attention=self.attention,
            )
        return self._forward(layout, checkpointing=self.gradient_checkpointing, dropping=self._dropping)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., width] to logits [..., vocabulary]."""
        logits = self._causal_lm.get_output_embeddings()(hidden)
        cap = self._final_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def _final_cap(self) -> float | None:
        return getattr(self._causal_lm.config.get_text_config(), "final_logit_softcapping", None)

    @property
    def head_weight(self) -> torch.Tensor | None:
        """The head as one frozen matrix  [vocabulary, width]; None when it is more than that."""
        head = self._causal_lm.get_output_embeddings()
        if type(head) is not torch.nn.Linear or "bias" in dict(head.named_parameters()) or self._final_cap:
            return None
        # A sharded weight is a tensor of another type: its module gathers it.
        if type(head.weight) is not torch.nn.Parameter or head.weight.requires_grad:
            return None
        return head.weight.detach()


def load_causal_lm(base_model: str, dtype: torch.dtype, device: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """A base model by hub name or directory, and its tokenizer.

    Raises:
        ConfigError: there is no such model, or it cannot be read as a causal language model.
    """
    try:
        AutoConfig.from_pretrained(base_model)
        tokenizer = AutoTokenizer.from_pretrained(base_model)
        model: Any = AutoModelForCausalLM.from_pretrained(
            base_model, dtype=dtype, attn_implementation=register()
        )
        model.to(device)
    except (OSError, ValueError) as unknown:
        raise ConfigError(
            f"base_model={base_model!r} cannot be loaded: it is neither a directory with a transformers "
            f"model nor a hub name within reach ({str(unknown).splitlines()[0]})"
        ) from unknown
    return model, tokenizer


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Checksum of every weight's name, shape and first values, rounded to bfloat16."""
    found = hashlib.sha256()
    for name, weight in weights:
        first = weight.detach().flatten()[:64].to("cpu", torch.bfloat16)
        found.update(f"{name} {tuple(weight.shape)}".encode())
        found.update(first.view(torch.int16).numpy().tobytes())
    return found.hexdigest()

"""A policy by PEFT: LoRA on any causal language model of transformers.

Invariant: the base weights stay as they were loaded; the adapter in training and its frozen snapshots are
PEFT's own adapters of one model.

Training calls `PeftPolicy.states` with layouts of token trees, which `forward.LayoutForward` runs; the
embedded engine calls `PeftPolicy.hidden_states` with a cache.
"""

import hashlib
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from art_core.config import DTypeName, LoRAConfig
from art_core.errors import CheckpointError, ConfigError, EngineError
from art_core.training.attention import register
from art_core.training.forward import AdapterCompute, Attention, Kernels, LayoutForward
from art_core.training.layout import PATHS, Layout
from art_core.training.layout import Path as LayoutPath
from art_core.training.policy import BASE, TRAINING, resolve_dtype


class PeftPolicy:
    """LoRA by PEFT on any ``AutoModelForCausalLM``.

    Args:
        model: the base model; its parameters are frozen here.
        tokenizer: with a chat template.
        lora: the adapter.
        seed: of the adapter's first weights.
        kernels: what runs the decoder's layers in training; see `Kernels`.
        adapter_compute: type in which adapters compute there; their weights are float32 either way.
        attention: how trees are attended to there; see `Attention`.

    Attributes:
        gradient_checkpointing: keep the layers' inputs alone in a forward pass that is trained, and
            compute the rest again.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        lora: LoRAConfig,
        *,
        seed: int = 0,
        kernels: Kernels = "auto",
        adapter_compute: AdapterCompute = "auto",
        attention: Attention = "auto",
    ) -> None:
        self.kernels: Kernels = kernels
        self.adapter_compute: AdapterCompute = adapter_compute
        self.attention: Attention = attention
        targets = lora.target_modules
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = get_peft_model(
                model,
                LoraConfig(
                    r=lora.rank,
                    lora_alpha=lora.alpha,
                    lora_dropout=lora.dropout,
                    target_modules=targets if isinstance(targets, str) else list(targets),
                    task_type="CAUSAL_LM",
                ),
            )
        self._adopt(adapted, tokenizer, lora)

    def _adopt(self, model: Any, tokenizer: PreTrainedTokenizerBase, lora: LoRAConfig) -> None:
        """Take a model whose adapter in training is there already."""
        self.lock = threading.RLock()
        self.tokenizer = tokenizer
        self.lora = lora
        self.model: PeftModel = model
        self.model.eval()  # dropout in the base would make sampling and training disagree
        self.paths: frozenset[LayoutPath] = frozenset(PATHS)
        self.path: LayoutPath = "tree"
        self.gradient_checkpointing = False
        self._dropping = False
        self._forward: LayoutForward | None = None
        self._snapshots: dict[str, str] = {}
        self._taken = 0

    @classmethod
    def load(
        cls,
        base_model: str,
        lora: LoRAConfig,
        *,
        dtype: DTypeName = "auto",
        device: str = "cpu",
        seed: int = 0,
        kernels: Kernels = "auto",
        adapter_compute: AdapterCompute = "auto",
        attention: Attention = "auto",
    ) -> "PeftPolicy":
        """Load a base model by hub name or directory.

        Raises:
            ConfigError: there is no such model, or it cannot be read as a causal language model.
        """
        try:
            AutoConfig.from_pretrained(base_model)
            tokenizer = AutoTokenizer.from_pretrained(base_model)
            model: Any = AutoModelForCausalLM.from_pretrained(
                base_model, dtype=resolve_dtype(dtype), attn_implementation=register()
            )
            model.to(device)
        except (OSError, ValueError) as unknown:
            raise ConfigError(
                f"base_model={base_model!r} cannot be loaded: it is neither a directory with a transformers "
                f"model nor a hub name within reach ({str(unknown).splitlines()[0]})"
            ) from unknown
        return cls(
            model,
            tokenizer,
            lora,
            seed=seed,
            kernels=kernels,
            adapter_compute=adapter_compute,
            attention=attention,
        )

    @property
    def device(self) -> torch.device:  # noqa: D102 - the protocol says it
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
    def base_model(self) -> str:  # noqa: D102
        return self._causal_lm.config.name_or_path

    def base_fingerprint(self) -> str:
        """Checksum of every base weight's name, shape and first values, rounded to bfloat16."""
        found = hashlib.sha256()
        for name, weight in self.model.named_parameters():
            if "lora_" in name:
                continue
            first = weight.detach().flatten()[:64].to("cpu", torch.bfloat16)
            found.update(f"{name} {tuple(weight.shape)}".encode())
            found.update(first.view(torch.int16).numpy().tobytes())
        return found.hexdigest()

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

    @property
    def _causal_lm(self) -> Any:
        return self.model.get_base_model()

    def hidden_states(self, **inputs: Any) -> Any:  # noqa: D102
        return self._causal_lm.get_decoder()(**inputs)

    def states(self, layout: Layout) -> torch.Tensor:  # noqa: D102
        if self._forward is None:
            self._forward = LayoutForward(
                self._causal_lm,
                kernels=self.kernels,
                adapter_compute=self.adapter_compute,
                attention=self.attention,
            )
        return self._forward(layout, checkpointing=self.gradient_checkpointing, dropping=self._dropping)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:  # noqa: D102
        logits = self._causal_lm.get_output_embeddings()(hidden)
        cap = self._final_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def _final_cap(self) -> float | None:
        return getattr(self._causal_lm.config.get_text_config(), "final_logit_softcapping", None)

    @property
    def head_weight(self) -> torch.Tensor | None:  # noqa: D102
        head = self._causal_lm.get_output_embeddings()
        if type(head) is not torch.nn.Linear or "bias" in dict(head.named_parameters()) or self._final_cap:
            return None
        # A sharded weight is a tensor of another type: its module gathers it.
        if type(head.weight) is not torch.nn.Parameter or head.weight.requires_grad:
            return None
        return head.weight.detach()

    @contextmanager
    def using(self, adapter: str | None) -> Generator[None]:
        """Run with a snapshot, `TRAINING` or `BASE` inside the block; holds the lock.

        Raises:
            EngineError: there is no such snapshot.
        """
        with self.lock:
            if adapter is BASE:
                with self.model.disable_adapter():
                    yield
                return
            if adapter != TRAINING and adapter not in self._snapshots:
                known = ", ".join(self._snapshots) or "none"
                raise EngineError(f"no policy version {adapter!r} is loaded; loaded: {known}")
            name = TRAINING if adapter == TRAINING else self._snapshots[adapter]
            # The adapter stays active afterwards: switching walks every layer, and whoever computes
            # next says with which adapter anyway.
            if self.model.active_adapter != name:
                self._activate(name)
            yield

    def _activate(self, name: str) -> None:
        self.model.set_adapter(name, inference_mode=name != TRAINING)

    @contextmanager
    def dropout(self) -> Generator[None]:
        """Let the training adapter's dropout act inside the block; holds the lock."""
        with self.lock:
            layers = [m for n, m in self.model.named_modules() if n.endswith(f"lora_dropout.{TRAINING}")]
            try:
                for layer in layers:
                    layer.train()
                self._dropping = self.lora.dropout > 0
                yield
            finally:
                self._dropping = False
                for layer in layers:
                    layer.eval()

    def snapshot(self, name: str, adapter_dir: Path | None = None) -> None:
        """Freeze a copy of the training adapter, or of a directory's, under a name.

        Raises:
            EngineError: the name is taken.
            CheckpointError: the directory holds no adapter that fits.
        """
        with self.lock:
            if name in self._snapshots:
                raise EngineError(f"policy version {name!r} is loaded already; versions never change")
            # PEFT keeps adapters in a ModuleDict, whose keys may hold no dots; names of ours may.
            inner = f"snapshot{self._taken}"
            self._taken += 1
            weights = (
                get_peft_model_state_dict(self.model, adapter_name=TRAINING)
                if adapter_dir is None
                else _read_adapter(adapter_dir, self.device)
            )
            self.model.add_adapter(inner, self.model.peft_config[TRAINING])
            try:
                self._fill(inner, weights, adapter_dir)
            except CheckpointError:
                self.model.delete_adapter(inner)
                raise
            for parameter_name, parameter in self.model.named_parameters():
                if f".{inner}." in parameter_name:
                    parameter.requires_grad_(False)
            self.model.eval()  # PEFT makes new adapters with their dropout at work
            self._activate(TRAINING)
            self._snapshots[name] = inner

    def _fill(self, adapter: str, weights: dict[str, torch.Tensor], source: Path | None) -> None:
        try:
            result = set_peft_model_state_dict(self.model, weights, adapter_name=adapter)
        except RuntimeError as misfit:
            raise CheckpointError(
                f"{source} holds an adapter of another shape than this model's (rank {self.lora.rank}, "
                f"{self.lora.target_modules}): {str(misfit).splitlines()[0]}"
            ) from misfit
        missing = [key for key in result.missing_keys if "lora_" in key and f".{adapter}." in key]
        if missing:
            raise CheckpointError(
                f"{source} lacks {len(missing)} of this adapter's weights: {missing[0]}, ..."
            )

    def drop(self, name: str) -> None:
        """Forget a snapshot; unknown names are ignored, so that retiring twice is harmless."""
        with self.lock:
            inner = self._snapshots.pop(name, None)
            if inner is not None:
                if self.model.active_adapter == inner:
                    self._activate(TRAINING)
                self.model.delete_adapter(inner)

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """The training adapter's weights, in the order of their names."""
        named = [(n, p) for n, p in self.model.named_parameters() if f".{TRAINING}." in n]
        return [p for _, p in sorted(named, key=lambda item: item[0])]

    def save_adapter(self, directory: Path) -> None:
        """Write the training adapter as an ordinary PEFT directory."""
        with self.lock:
            self.model.save_pretrained(str(directory), selected_adapters=[TRAINING])

    def load_adapter(self, directory: Path) -> None:
        """Replace the training adapter's weights.

        Raises:
            CheckpointError: the directory holds no adapter that fits.
        """
        with self.lock:
            self._fill(TRAINING, _read_adapter(directory, self.device), directory)


def _read_adapter(directory: Path, device: torch.device) -> dict[str, torch.Tensor]:
    if not (directory / "adapter_config.json").exists():
        raise CheckpointError(f"{directory} is not a PEFT adapter directory: it has no adapter_config.json")
    return load_peft_weights(str(directory), device=str(device))

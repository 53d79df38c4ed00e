"""A policy by PEFT: LoRA on any causal language model of transformers.

Invariant: the base weights stay as they were loaded; the adapter in training and its frozen snapshots are
PEFT's own adapters of one model.

`causal_policy` runs the model; here are the adapters.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from transformers import PreTrainedTokenizerBase

from art_core.config import DTypeName, LoRAConfig
from art_core.errors import CheckpointError, EngineError
from art_core.training.causal_policy import CausalPolicy, fingerprint, load_causal_lm
from art_core.training.forward import AdapterCompute, Attention, Kernels
from art_core.training.policy import BASE, TRAINING, resolve_dtype


class PeftPolicy(CausalPolicy):
    """LoRA by PEFT on any ``AutoModelForCausalLM``.

    Args:
        model: the base model; its parameters are frozen here.
        tokenizer: with a chat template.
        lora: the adapter.
        seed: of the adapter's first weights.
        kernels: what runs the decoder's layers in training; see `Kernels`.
        adapter_compute: type in which adapters compute there; their weights are float32 either way.
        attention: how trees are attended to there; see `Attention`.
    """

    model: PeftModel

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
        self.kernels = kernels
        self.adapter_compute = adapter_compute
        self.attention = attention
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
        self._take(model, tokenizer)
        self.lora = lora
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
        model, tokenizer = load_causal_lm(base_model, resolve_dtype(dtype), device)
        return cls(
            model,
            tokenizer,
            lora,
            seed=seed,
            kernels=kernels,
            adapter_compute=adapter_compute,
            attention=attention,
        )

    def base_fingerprint(self) -> str:
        """Checksum of every base weight's name, shape and first values, rounded to bfloat16."""
        return fingerprint((n, w) for n, w in self.model.named_parameters() if "lora_" not in n)

    @property
    def _causal_lm(self) -> Any:
        return self.model.get_base_model()

    @contextmanager
    def using(self, name: str | None) -> Generator[None]:
        """Run with a snapshot, `TRAINING` or `BASE` inside the block; holds the lock.

        Raises:
            EngineError: there is no such snapshot.
        """
        with self.lock:
            if name is BASE:
                with self.model.disable_adapter():
                    yield
                return
            if name != TRAINING and name not in self._snapshots:
                known = ", ".join(self._snapshots) or "none"
                raise EngineError(f"no policy version {name!r} is loaded; loaded: {known}")
            adapter = TRAINING if name == TRAINING else self._snapshots[name]
            # The adapter stays active afterwards: switching walks every layer, and whoever computes
            # next says with which adapter anyway.
            if self.model.active_adapter != adapter:
                self._activate(adapter)
            yield

    def _activate(self, adapter: str) -> None:
        self.model.set_adapter(adapter, inference_mode=adapter != TRAINING)

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

    def snapshot(self, name: str, directory: Path | None = None) -> None:
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
                if directory is None
                else _read_adapter(directory, self.device)
            )
            self.model.add_adapter(inner, self.model.peft_config[TRAINING])
            try:
                self._fill(inner, weights, directory)
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

    def save_weights(self, directory: Path) -> None:
        """Write the training adapter as an ordinary PEFT directory."""
        with self.lock:
            self.model.save_pretrained(str(directory), selected_adapters=[TRAINING])

    def load_weights(self, directory: Path) -> None:
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

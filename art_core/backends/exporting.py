"""What was trained, written for others to use: a PEFT adapter, or a whole model of transformers.

Invariant: a path that holds something else is refused, and a model's directory is complete or not there.
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from art_core.errors import CheckpointError, ConfigError
from art_core.inference.merging import merge
from art_core.inference.model_families import TEMPLATE_FILE, read_facts
from art_core.inference.vllm_merged import base_directory
from art_core.training.checkpoints import Kept

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def write_adapter(policy: Kept, directory: Path) -> None:
    """Write the adapter in training as a PEFT directory; one that is there already is replaced.

    Raises:
        CheckpointError: something else lies at that path.
        ConfigError: there is no adapter.
    """
    if policy.lora is None:
        raise ConfigError(
            "all weights are trained (lora=None), so there is no adapter; save_model() writes them"
        )
    if directory.exists() and not (directory.is_dir() and _is_adapter(directory)):
        raise CheckpointError(f"{directory} exists and is no adapter directory; choose another path")
    policy.save_weights(directory)


class Exported(Kept, Protocol):
    """What a model's directory is written from."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """With the chat template that messages were rendered with."""
        ...


def write_model(policy: Exported, directory: Path) -> None:
    """Write the whole model as trained; an adapter is folded into the base model's weights.

    Its chat template is the one that it was trained with.

    Raises:
        CheckpointError: the path is taken.
        ConfigError: the adapter cannot be folded in, or the base model is not on this machine.
    """
    if directory.exists():
        raise CheckpointError(f"{directory} exists; a model is written into a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".writing-") as scratch:
        trained = Path(scratch) / "trained"
        policy.save_weights(trained)
        if policy.lora is None:
            trained.rename(directory)
        else:
            model = merge(base_directory(policy.base_model), trained, Path(scratch) / "model")
            _write_template(policy, model)
            model.rename(directory)


def _write_template(policy: Exported, model: Path) -> None:
    """Let a model's directory render messages as the policy does, where its base model does otherwise."""
    template: Any = policy.tokenizer.chat_template
    if isinstance(template, str) and template != read_facts(str(model)).template:
        (model / TEMPLATE_FILE).write_text(template, encoding="utf-8")


def _is_adapter(directory: Path) -> bool:
    return not any(directory.iterdir()) or (directory / "adapter_config.json").exists()

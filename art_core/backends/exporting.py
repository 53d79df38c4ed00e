"""What was trained, written for others to use: a PEFT adapter, or a whole model of transformers.

Invariant: a path that holds something else is refused, and a model's directory is complete or not there.
"""

import tempfile
from pathlib import Path

from art_core.errors import CheckpointError, ConfigError
from art_core.inference.merging import merge
from art_core.inference.vllm_merged import base_directory
from art_core.training.checkpoints import Kept


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


def write_model(policy: Kept, directory: Path) -> None:
    """Write the whole model as trained; an adapter is folded into the base model's weights.

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
            merge(base_directory(policy.base_model), trained, directory)


def _is_adapter(directory: Path) -> bool:
    return not any(directory.iterdir()) or (directory / "adapter_config.json").exists()

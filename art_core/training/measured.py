"""What was measured on a machine, kept so that it is measured once.

Invariant: a value is read only for the key under which it was written, and a key says all that the value
depends on; a table that is damaged or cannot be written costs a measurement, never a run.

One JSON file for each kind of measurement, in ``$ART_CACHE``, else ``~/.cache/art-langgraph``.
"""

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from art_core.training.policy import Policy

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Where tables are kept."""
    return Path(os.environ.get("ART_CACHE") or Path.home() / ".cache" / "art-langgraph")


class Measured:
    """A table of measurements.

    Args:
        kind: names the file.
        directory: where it lies; None: `cache_dir`.
    """

    def __init__(self, kind: str, directory: Path | None = None) -> None:
        self.path = (directory or cache_dir()) / f"{kind}.json"

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was measured under a key; None when nothing was."""
        return self._read().get(_name(key))

    def put(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Keep a measurement; others' in the same file stay."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = {**self._read(), _name(key): dict(value)}
            handle, scratch = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}-")
            try:
                with os.fdopen(handle, "w") as out:
                    json.dump(whole, out, indent=1, sort_keys=True)
                Path(scratch).replace(self.path)
            except BaseException:
                Path(scratch).unlink(missing_ok=True)
                raise
        except OSError as refused:
            logger.warning("a measurement is not kept for the next time: %s", refused)

    def _read(self) -> dict[str, Any]:
        try:
            read = json.loads(self.path.read_text())
            return {name: dict(value) for name, value in read.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as damaged:
            logger.warning("%s is not readable and is measured anew: %s", self.path, damaged)
            return {}


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(dict(key), sort_keys=True)


def machine_key(policy: Policy) -> dict[str, Any]:
    """What a measurement of a policy depends on: device, model, its types and kernels, adapter, versions."""
    device = policy.device
    config: Any = getattr(getattr(policy, "model", None), "config", None)
    shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "policy": type(policy).__name__,
        "model": [getattr(config, "model_type", None), *(getattr(config, name, None) for name in shape)],
        "dtype": str(getattr(config, "dtype", None)),
        "quantized": getattr(config, "quantization_config", None) is not None,
        **{name: getattr(policy, name, None) for name in ("kernels", "adapter_compute", "attention")},
        "lora": None if policy.lora is None else policy.lora.model_dump(mode="json"),
        "torch": torch.__version__,
    }

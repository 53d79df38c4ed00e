"""Merging: an adapter folded into the weights of its base model, as a model directory of its own.

Invariant: the directory is complete or not there; every weight that the adapter does not touch is copied bit
for bit, and one that it touches is W + scale * B A, added in float32 and rounded once (LoRA, Hu et al. 2021,
arXiv:2106.09685, section 4.1).

Files of weights are read, merged and written one after the other, so memory holds one file at a time, however
large the model is. PEFT's own merge needs the whole model, loaded, and a second time to save it.
"""

import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.durable import sync
from art_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "base_model.model."
_WEIGHTS = "*.safetensors"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, slots=True)
class Update:
    """What an adapter adds to one weight: ``scale * b @ a``.

    Attributes:
        a: [rank, in_features]
        b: [out_features, rank]
        scale: alpha / rank, or alpha / sqrt(rank) for rank-stabilised adapters (arXiv:2312.03732).
        transposed: whether the weight is stored as [in_features, out_features].
    """

    a: "Tensor"
    b: "Tensor"
    scale: float
    transposed: bool = False

    def added_to(self, weight: "Tensor") -> "Tensor":
        """The merged weight, in the type of the given one."""
        change = self.scale * (self.b.float() @ self.a.float())
        return (weight.float() + (change.T if self.transposed else change)).to(weight.dtype)


def merge(base_dir: Path, adapter_dir: Path, into: Path) -> Path:
    """Write the base model with an adapter folded in; returns the new directory.

    Args:
        base_dir: with ``config.json``, tokenizer and weights as safetensors.
        adapter_dir: of PEFT.
        into: the directory to make.

    Raises:
        ConfigError: the adapter is no plain LoRA of these weights, or the weights are not safetensors.
    """
    if into.exists():
        raise ConfigError(f"{into} exists; a merged model is written once, into a new directory")
    updates = read_adapter(adapter_dir)
    shards = sorted(base_dir.glob(_WEIGHTS))
    if not shards:
        raise ConfigError(f"{base_dir} holds no {_WEIGHTS}; publish='merged' merges those only")
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=".writing-") as scratch:
        work = Path(scratch) / "model"
        work.mkdir()
        _copy_the_rest(base_dir, work)
        left = dict(updates)
        for shard in shards:
            _merge_shard(shard, work / shard.name, left)
        if left:
            raise ConfigError(
                f"{adapter_dir} changes {len(left)} weights that {base_dir} does not have under that name, "
                f"such as {next(iter(left))}; publish='merged' cannot serve this model, publish='adapter' may"
            )
        work.rename(into)
        sync(into.parent)
    return into


def is_model(directory: Path) -> bool:
    """Whether a directory holds a whole model, and not an adapter."""
    return (directory / "config.json").exists() and not (directory / "adapter_config.json").exists()


def read_adapter(adapter_dir: Path) -> dict[str, Update]:
    """What an adapter adds, by the name of the weight.

    Raises:
        ConfigError: it is no PEFT directory, or does more than a plain LoRA.
    """
    from safetensors.torch import load_file

    try:
        settings: dict[str, Any] = json.loads((adapter_dir / "adapter_config.json").read_text())
        tensors: dict[str, Tensor] = load_file(adapter_dir / "adapter_model.safetensors")
    except (OSError, ValueError) as unreadable:
        raise ConfigError(f"{adapter_dir} is no PEFT adapter directory: {unreadable}") from unreadable
    _check_plain(adapter_dir, settings, tensors)
    updates: dict[str, Update] = {}
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removesuffix(".lora_A.weight").removeprefix(_PREFIX)
        updates[f"{module}.weight"] = Update(
            a,
            tensors[name.replace(".lora_A.", ".lora_B.")],
            _scale(settings, module),
            bool(settings.get("fan_in_fan_out")),
        )
    return updates


def _check_plain(adapter_dir: Path, settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    wrong = [
        f"{key}={settings[key]!r}"
        for key in ("use_dora", "use_qalora", "modules_to_save", "trainable_token_indices", "lora_bias")
        if settings.get(key)
    ]
    wrong += [n for n in tensors if not n.endswith((".lora_A.weight", ".lora_B.weight"))][:3]
    if settings.get("peft_type", "LORA") != "LORA" or settings.get("bias", "none") != "none" or wrong:
        raise ConfigError(
            f"{adapter_dir} is more than a plain LoRA ({', '.join(wrong) or settings.get('peft_type')}), "
            "which publish='merged' cannot fold in; use publish='adapter'"
        )


def _scale(settings: Mapping[str, Any], module: str) -> float:
    rank = _by_pattern(settings.get("rank_pattern"), module, settings["r"])
    alpha = _by_pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"])
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    """PEFT's rule: the first pattern that the module's name ends with."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _merge_shard(source: Path, target: Path, left: dict[str, Update]) -> None:
    """Write one file of weights; what was merged is taken out of ``left``."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    with safe_open(source, framework="pt") as weights:
        metadata = weights.metadata()
        for name in weights.keys():  # noqa: SIM118 - it is no mapping
            tensor = weights.get_tensor(name)
            update = left.pop(name, None)
            if update is not None:
                _check_shape(name, update, tensor)
                tensor = update.added_to(tensor)
            tensors[name] = tensor
    save_file(tensors, target, metadata=metadata)
    sync(target)


def _check_shape(name: str, update: Update, weight: "Tensor") -> None:
    shape = (update.b.shape[0], update.a.shape[1])
    found = tuple(weight.shape[::-1] if update.transposed else weight.shape)
    if not weight.is_floating_point() or weight.element_size() < 2 or found != shape:
        raise ConfigError(
            f"{name}: the adapter is for {list(shape)}, the base model has {list(weight.shape)} of "
            f"{weight.dtype}; publish='merged' needs weights of 16 or 32 bits of the same shape"
        )


def _copy_the_rest(source: Path, target: Path) -> None:
    for path in source.iterdir():
        weights = path.match(_WEIGHTS) or path.suffix in _OTHER_WEIGHTS
        if path.is_file() and not weights:
            shutil.copyfile(path, target / path.name)

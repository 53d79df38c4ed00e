"""Options that the examples share: models by name, and any knob of `TrainConfig`."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.prepare_model import qwen2_5_coder, smollm2

PREPARED: Mapping[str, Callable[[], Path]] = {
    "qwen2.5-coder-0.5b": qwen2_5_coder,
    "smollm2-135m": smollm2,
}
"""Models from the package registry, which are made ready when they are first named."""


def model_named(name: str) -> str:
    """A prepared model's directory; a directory or a hub name as it is."""
    return str(PREPARED[name]()) if name in PREPARED else name


def knobs(given: Sequence[str]) -> dict[str, Any]:
    """``KNOB=VALUE`` as TrainConfig takes it; values are JSON, or else text."""
    read: dict[str, Any] = {}
    for knob in given:
        name, _, value = knob.partition("=")
        try:
            read[name] = json.loads(value)
        except json.JSONDecodeError:
            read[name] = value
    return read

"""Serving and training of policies that learn from rollouts; knows nothing of LangChain.

Names are imported when they are first used: looking at a record needs no engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_core.backends.local import LocalBackend
    from art_core.config import (
        EngineConfig,
        LoRAConfig,
        ParallelConfig,
        TrainableModelConfig,
        TrainConfig,
    )
    from art_core.errors import ArtError
    from art_core.learning import alearn, learn
    from art_core.model import TrainableModel
    from art_core.types import PolicyVersion, Scenario, Step, Trajectory, TrajectoryGroup

__all__ = [
    "ArtError",
    "EngineConfig",
    "LoRAConfig",
    "LocalBackend",
    "ParallelConfig",
    "PolicyVersion",
    "Scenario",
    "Step",
    "TrainConfig",
    "TrainableModel",
    "TrainableModelConfig",
    "Trajectory",
    "TrajectoryGroup",
    "alearn",
    "learn",
]

_HOMES = {
    "backends.local": ("LocalBackend",),
    "config": ("EngineConfig", "LoRAConfig", "ParallelConfig", "TrainConfig", "TrainableModelConfig"),
    "errors": ("ArtError",),
    "learning": ("alearn", "learn"),
    "model": ("TrainableModel",),
    "types": ("PolicyVersion", "Scenario", "Step", "Trajectory", "TrajectoryGroup"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

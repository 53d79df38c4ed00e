"""Serving and training of policies that learn from rollouts; knows nothing of LangChain."""

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

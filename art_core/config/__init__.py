"""Every knob, typed, documented and validated. A setting that nothing reads has no place here.

Invariant: all settings are imported from here; the modules inside hold one noun each.
"""

from art_core.config.engine import DTypeName, EngineConfig
from art_core.config.guardrails import GuardrailConfig
from art_core.config.lora import LoRAConfig
from art_core.config.model import TrainableModelConfig
from art_core.config.parallel import ParallelConfig, Strategy
from art_core.config.replay import ReplayConfig
from art_core.config.retention import RetentionConfig
from art_core.config.settings import Settings
from art_core.config.train import (
    AVERAGING,
    CLIP_RANGE,
    AdvantageName,
    Averaging,
    BaselineName,
    ComputeName,
    KernelsName,
    LevelName,
    LossName,
    PathName,
    PolicyName,
    TrainConfig,
)

__all__ = [
    "AVERAGING",
    "CLIP_RANGE",
    "AdvantageName",
    "Averaging",
    "BaselineName",
    "ComputeName",
    "DTypeName",
    "EngineConfig",
    "GuardrailConfig",
    "KernelsName",
    "LevelName",
    "LoRAConfig",
    "LossName",
    "ParallelConfig",
    "PathName",
    "PolicyName",
    "ReplayConfig",
    "RetentionConfig",
    "Settings",
    "Strategy",
    "TrainConfig",
    "TrainableModelConfig",
]

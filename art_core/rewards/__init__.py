"""Rewards: ready-made functions, and judges that compare runs."""

from art_core.rewards.adaptive import Adaptive
from art_core.rewards.batch import ascore_trajectories, score_trajectories
from art_core.rewards.compose import Component, Composed, Measure, component
from art_core.rewards.parts import PerNode, PerStep
from art_core.rewards.schema import ValidJSON, ValidToolCalls
from art_core.rewards.shape import Cost, Efficiency, Latency, Length, Price, Steps
from art_core.rewards.text import Citation, ExactMatch, Forbidden, Format, FuzzyMatch, Grounding, Refusal
from art_core.rewards.tools import ExpectedCall, ToolArguments, ToolChoice, ToolErrors

__all__ = [
    "Adaptive",
    "Citation",
    "Component",
    "Composed",
    "Cost",
    "Efficiency",
    "ExactMatch",
    "ExpectedCall",
    "Forbidden",
    "Format",
    "FuzzyMatch",
    "Grounding",
    "Latency",
    "Length",
    "Measure",
    "PerNode",
    "PerStep",
    "Price",
    "Refusal",
    "Steps",
    "ToolArguments",
    "ToolChoice",
    "ToolErrors",
    "ValidJSON",
    "ValidToolCalls",
    "ascore_trajectories",
    "component",
    "score_trajectories",
]

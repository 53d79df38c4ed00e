"""Rewards: ready-made functions, and judges that compare runs."""

from art_core.rewards.adaptive import Adaptive
from art_core.rewards.batch import ascore_trajectories, score_trajectories
from art_core.rewards.cache import VerdictCache
from art_core.rewards.compose import Component, Composed, Measure, component
from art_core.rewards.judge import Answer, Judge, JudgeError, Usage
from art_core.rewards.judgement import Judgement, Scored
from art_core.rewards.opinions import Relevance, UserFeedback
from art_core.rewards.outcome import Outcome
from art_core.rewards.parts import PerNode, PerStep
from art_core.rewards.reweighting import Reweighted, reweighted
from art_core.rewards.ruler import Ruler
from art_core.rewards.schema import ValidJSON, ValidToolCalls
from art_core.rewards.shape import Cost, Efficiency, Latency, Length, Price, Steps
from art_core.rewards.text import Citation, ExactMatch, Forbidden, Format, FuzzyMatch, Grounding, Refusal
from art_core.rewards.tools import ExpectedCall, ToolArguments, ToolChoice, ToolErrors
from art_core.scoring import Reward

__all__ = [
    "Adaptive",
    "Answer",
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
    "Judge",
    "JudgeError",
    "Judgement",
    "Latency",
    "Length",
    "Measure",
    "Outcome",
    "PerNode",
    "PerStep",
    "Price",
    "Refusal",
    "Relevance",
    "Reward",
    "Reweighted",
    "Ruler",
    "Scored",
    "Steps",
    "ToolArguments",
    "ToolChoice",
    "ToolErrors",
    "Usage",
    "UserFeedback",
    "ValidJSON",
    "ValidToolCalls",
    "VerdictCache",
    "ascore_trajectories",
    "component",
    "reweighted",
    "score_trajectories",
]

"""LangGraph agents that learn from their own runs: capture, rollouts, judges, learning as a graph."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_langgraph.capturing import capture
    from art_langgraph.chat_model import ChatART
    from art_langgraph.handler import TrajectoryCallbackHandler
    from art_langgraph.judges import LangChainJudge
    from art_langgraph.judging import ruler_graph
    from art_langgraph.learning import learning_builder, learning_graph
    from art_langgraph.learning_loop import LearningLoop
    from art_langgraph.learning_state import LearningState
    from art_langgraph.rollouts import Workers, agather, arollout, gather, rollout
    from art_langgraph.ruler_node import RulerNode

_WHERE = {
    "ChatART": "chat_model",
    "LangChainJudge": "judges",
    "LearningLoop": "learning_loop",
    "LearningState": "learning_state",
    "RulerNode": "ruler_node",
    "TrajectoryCallbackHandler": "handler",
    "Workers": "rollouts",
    "agather": "rollouts",
    "arollout": "rollouts",
    "capture": "capturing",
    "gather": "rollouts",
    "learning_builder": "learning",
    "learning_graph": "learning",
    "rollout": "rollouts",
    "ruler_graph": "judging",
}

__all__ = [
    "ChatART",
    "LangChainJudge",
    "LearningLoop",
    "LearningState",
    "RulerNode",
    "TrajectoryCallbackHandler",
    "Workers",
    "agather",
    "arollout",
    "capture",
    "gather",
    "learning_builder",
    "learning_graph",
    "rollout",
    "ruler_graph",
]


def __getattr__(name: str) -> Any:
    # Loaded when first used: LangChain's OpenAI client alone takes a second to import.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)

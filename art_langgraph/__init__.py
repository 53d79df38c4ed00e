"""LangGraph agents that learn from their own runs: capture, rollouts, judges."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_langgraph.capturing import capture
    from art_langgraph.chat_model import ChatART
    from art_langgraph.handler import TrajectoryCallbackHandler
    from art_langgraph.judges import LangChainJudge
    from art_langgraph.rollouts import Workers, agather, arollout, gather, rollout

_WHERE = {
    "ChatART": "chat_model",
    "LangChainJudge": "judges",
    "TrajectoryCallbackHandler": "handler",
    "Workers": "rollouts",
    "agather": "rollouts",
    "arollout": "rollouts",
    "capture": "capturing",
    "gather": "rollouts",
    "rollout": "rollouts",
}

__all__ = [
    "ChatART",
    "LangChainJudge",
    "TrajectoryCallbackHandler",
    "Workers",
    "agather",
    "arollout",
    "capture",
    "gather",
    "rollout",
]


def __getattr__(name: str) -> Any:
    # Loaded when first used: LangChain's OpenAI client alone takes a second to import.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)

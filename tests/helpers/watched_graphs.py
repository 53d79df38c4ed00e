"""Small real graphs, a model without a server, and a handler that keeps what it is told of calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import add
from typing import Annotated, Any, TypedDict

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tracers.context import register_configure_hook
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    topic: str
    said: Annotated[list[str], add]


class Said(TypedDict, total=False):
    said: Annotated[list[str], add]


class Watcher(BaseCallbackHandler):
    """Keeps the events of chat model calls."""

    def __init__(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.ends: list[Any] = []
        self.errors: list[dict[str, Any]] = []
        self.chunks: list[Any] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **event: Any) -> None:
        self.starts.append({"serialized": serialized, **event})

    def on_llm_new_token(self, token: str, **event: Any) -> None:
        self.chunks.append(event.get("chunk"))

    def on_llm_end(self, response: Any, **event: Any) -> None:
        self.ends.append(response)

    def on_llm_error(self, error: BaseException, **event: Any) -> None:
        self.errors.append({"error": error, **event})

    def metadata(self, key: str) -> list[Any]:
        return [start["metadata"].get(key) for start in self.starts]


_ambient: ContextVar[BaseCallbackHandler | None] = ContextVar("facts_ambient", default=None)


register_configure_hook(_ambient, inheritable=True)


@contextmanager
def ambient(handler: BaseCallbackHandler) -> Iterator[None]:
    token = _ambient.set(handler)
    try:
        yield
    finally:
        _ambient.reset(token)


def says(*words: str) -> GenericFakeChatModel:
    return GenericFakeChatModel(messages=iter([AIMessage(w) for w in words or ["yes"] * 100]))


def one_node(node: Callable[..., Any], **options: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("work", node, **options)
    builder.add_edge(START, "work")
    builder.add_edge("work", END)
    return builder.compile(checkpointer=InMemorySaver())

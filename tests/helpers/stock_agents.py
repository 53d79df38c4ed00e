"""Small graphs around stock ChatOpenAI, and whether a step has the tokens of its server."""

from collections.abc import Callable
from operator import add
from typing import Annotated, Any, TypedDict

from fakes.vllm_server import completion_ids, prompt_ids
from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from art_core.types import Step


class State(TypedDict, total=False):
    topic: str
    said: Annotated[list[str], add]


class Said(TypedDict, total=False):
    said: Annotated[list[str], add]


def stock(base_url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="m@1", base_url=base_url, api_key="none", max_retries=0, **options)


def echo(request: dict[str, Any]) -> str:
    return f"re: {request['messages'][-1]['content']}"


def ask(model: ChatOpenAI) -> Callable[[State], State]:
    def call(state: State) -> State:
        return {"said": [str(model.invoke(state.get("topic", "hi")).content)]}

    return call


def one_node(node: Callable[..., Any], **options: Any) -> Any:
    builder = StateGraph(State, output_schema=Said)
    builder.add_node("work", node, **options)
    builder.add_edge(START, "work")
    builder.add_edge("work", END)
    return builder.compile(checkpointer=InMemorySaver())


def thread(name: str = "1") -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


def exact(step: Step) -> bool:
    """Whether a step has the very tokens that the server sampled for its request."""
    return (
        step.trainable
        and step.tokens is not None
        and step.tokens.completion == completion_ids(step.message())
        and step.tokens.prompt == prompt_ids({"messages": step.messages})
    )

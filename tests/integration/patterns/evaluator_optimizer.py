"""Evaluator and optimizer: a draft goes back with feedback until the evaluator accepts it."""

from typing import Literal, TypedDict

from integration.patterns.table import Call, Pattern, Seq
from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel


class Verdict(BaseModel):
    """What the evaluator thinks."""

    accepted: bool
    feedback: str


class State(TypedDict, total=False):
    topic: str
    slogan: str
    feedback: str
    accepted: bool


def prompt(state: State) -> str:
    advice = f" Mind: {state['feedback']}" if state.get("feedback") else ""
    return f"A slogan for {state['topic']}.{advice}"


def decide(state: State) -> Literal["generate", "__end__"]:
    return END if state["accepted"] else "generate"


def build(llm: BaseChatModel):
    judge = llm.with_structured_output(Verdict, method="json_mode")

    def generate(state: State) -> State:
        return {"slogan": llm.invoke(prompt(state)).text}

    def evaluate(state: State) -> State:
        return judge.invoke(f"As JSON, judge: {state['slogan']}").model_dump()

    return _graph(generate, evaluate)


def abuild(llm: BaseChatModel):
    judge = llm.with_structured_output(Verdict, method="json_mode")

    async def generate(state: State) -> State:
        return {"slogan": (await llm.ainvoke(prompt(state))).text}

    async def evaluate(state: State) -> State:
        return (await judge.ainvoke(f"As JSON, judge: {state['slogan']}")).model_dump()

    return _graph(generate, evaluate)


def _graph(generate, evaluate):
    graph = StateGraph(State)
    graph.add_node("generate", generate)
    graph.add_node("evaluate", evaluate)
    graph.add_edge(START, "generate")
    graph.add_edge("generate", "evaluate")
    graph.add_conditional_edges("evaluate", decide)
    return graph.compile()


PATTERN = Pattern(
    build,
    abuild=abuild,
    inputs=({"topic": "soap"},),
    expected=Seq(
        Call("generate:1", 1, ("user: A slogan for soap.",), "Soap."),
        Call(
            "evaluate:1",
            2,
            ("user: As JSON, judge: Soap.",),
            '{"accepted": false, "feedback": "too short"}',
        ),
        Call("generate:2", 3, ("user: A slogan for soap. Mind: too short",), "Soap, and all is clean."),
        Call(
            "evaluate:2",
            4,
            ("user: As JSON, judge: Soap, and all is clean.",),
            '{"accepted": true, "feedback": ""}',
        ),
    ),
)

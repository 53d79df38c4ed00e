"""Orchestrator and workers: a plan fans out with `Send`; each worker calls twice, in its own branch."""

import operator
from typing import Annotated, TypedDict

from integration.patterns.table import Call, Par, Pattern, Seq, tool
from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from pydantic import BaseModel


class Plan(BaseModel):
    """Sections of a report."""

    sections: list[str]


class State(TypedDict, total=False):
    topic: str
    sections: list[str]
    written: Annotated[list[str], operator.add]
    report: str


class Section(TypedDict):
    section: str


def assign(state: State) -> list[Send]:
    return [Send("write", {"section": section}) for section in state["sections"]]


def report(state: State) -> State:
    return {"report": "\n".join(sorted(state["written"]))}


def build(llm: BaseChatModel):
    planner = llm.with_structured_output(Plan, method="function_calling")

    def plan(state: State) -> State:
        return {"sections": planner.invoke(f"Plan: {state['topic']}").sections}

    def write(work: Section) -> State:
        outline = llm.invoke(f"Outline {work['section']}").text
        return {"written": [llm.invoke(f"Write {work['section']} from: {outline}").text]}

    return _graph(plan, write)


def abuild(llm: BaseChatModel):
    planner = llm.with_structured_output(Plan, method="function_calling")

    async def plan(state: State) -> State:
        return {"sections": (await planner.ainvoke(f"Plan: {state['topic']}")).sections}

    async def write(work: Section) -> State:
        outline = (await llm.ainvoke(f"Outline {work['section']}")).text
        return {"written": [(await llm.ainvoke(f"Write {work['section']} from: {outline}")).text]}

    return _graph(plan, write)


def _graph(plan, write):
    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("write", write)
    graph.add_node("report", report)
    graph.add_edge(START, "plan")
    graph.add_conditional_edges("plan", assign, ["write"])
    graph.add_edge("write", "report")
    graph.add_edge("report", END)
    return graph.compile()


def worker(number: int, section: str) -> Seq:
    branch, outline, text = f"write:{number}", f"{section}: one, two", f"{section} text."
    return Seq(
        Call(branch, 2, (f"user: Outline {section}",), outline),
        Call(branch, 2, (f"user: Write {section} from: {outline}",), text, call_index=1),
    )


PATTERN = Pattern(
    build,
    abuild=abuild,
    inputs=({"topic": "bees"},),
    expected=Seq(
        Call("plan:1", 1, ("user: Plan: bees",), (tool("Plan", sections=["hive", "honey", "sting"]),)),
        Par(worker(1, "hive"), worker(2, "honey"), worker(3, "sting")),
    ),
)

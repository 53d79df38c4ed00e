"""Parallelisation: three nodes start together, a fourth joins what they said.

The branches are LCEL chains (prompt, model, parser), as many users write them: sync and async at once.
"""

from typing import TypedDict

from integration.patterns.table import Call, Par, Pattern, Seq
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel
from langgraph.graph import END, START, StateGraph

FORMS = ("joke", "poem", "story")


class State(TypedDict, total=False):
    topic: str
    joke: str
    poem: str
    story: str
    best: str


def build(llm: BaseChatModel):
    graph = StateGraph(State)
    for form in FORMS:
        prompt = ChatPromptTemplate.from_messages([("system", f"You write a {form}."), ("user", "{topic}")])
        graph.add_node(f"write_{form}", RunnableParallel({form: prompt | llm | StrOutputParser()}))
        graph.add_edge(START, f"write_{form}")
    pick = ChatPromptTemplate.from_template("Best of: {joke} / {poem} / {story}")
    graph.add_node("pick", RunnableParallel({"best": pick | llm | StrOutputParser()}))
    graph.add_edge([f"write_{form}" for form in FORMS], "pick")
    graph.add_edge("pick", END)
    return graph.compile()


PATTERN = Pattern(
    build,
    inputs=({"topic": "rain"},),
    expected=Seq(
        Par(
            Call("write_joke:1", 1, ("system: You write a joke.", "user: rain"), "Wet fun."),
            Call("write_poem:1", 1, ("system: You write a poem.", "user: rain"), "Drip, drop."),
            Call("write_story:1", 1, ("system: You write a story.", "user: rain"), "It rained."),
        ),
        Call("pick:1", 2, ("user: Best of: Wet fun. / Drip, drop. / It rained.",), "Drip, drop."),
    ),
)

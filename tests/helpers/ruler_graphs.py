"""What tests of judging graphs share: a scripted model that also judges, agents, and what they are asked."""

import itertools
import threading
from collections import Counter
from typing import Any, TypedDict

from fakes.vllm_server import FakeVLLM
from helpers.judges import perfect
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from art_core.rewards import Ruler
from art_core.store import Store
from art_langgraph import LangChainJudge, RulerNode
from art_langgraph.graph_records import ScoreRecord

THREAD = {"configurable": {"thread_id": "1"}}


class State(TypedDict, total=False):
    trajectories: list[str]
    scores: list[ScoreRecord]


class Script:
    """Answers agents with a quality that counts up, and judges perfectly; ``told`` says what was asked."""

    def __init__(self) -> None:
        self._count = itertools.count(1)
        self._lock = threading.Lock()
        self.told: Counter[str] = Counter()
        self.silent = False

    def __call__(self, request: dict[str, Any]) -> str:
        with self._lock:
            if "<<<run" in str(request["messages"]):
                self.told["judge"] += 1
                return "I would rather not." if self.silent else perfect(request["messages"])
            self.told["agent"] += 1
            return f"I did it with quality={next(self._count) % 9 / 10:.4f}"


def chat(server: FakeVLLM) -> ChatOpenAI:
    return ChatOpenAI(model="m", base_url=server.base_url, api_key="none", max_retries=0)  # type: ignore[arg-type]


def a_ruler(server: FakeVLLM, **options: Any) -> Ruler:
    return Ruler(LangChainJudge(chat(server), name="judge"), **options)


def an_agent(llm: Any, checkpointer: Any = None) -> Any:
    """One node that calls a model; it fails when it is told to."""

    async def act(state: MessagesState) -> Any:
        said = await llm.ainvoke(state["messages"])
        if "fail" in str(state["messages"][0].content):
            raise ValueError("no such mailbox")
        return {"messages": [said]}

    graph = StateGraph(MessagesState).add_node("act", act).add_edge(START, "act").add_edge("act", END)
    return graph.compile(checkpointer=checkpointer)


def one_node(node: RulerNode, schema: Any = State) -> Any:
    return (
        StateGraph(schema).add_node("judge", node).add_edge(START, "judge").add_edge("judge", END).compile()
    )


def asked(*names: str) -> dict[str, Any]:
    return {"scenarios": [{"id": name, "inputs": {"messages": [("user", name)]}} for name in names]}


def history(store: Store, trajectory_id: str) -> list[tuple[str, float]]:
    return [(score.author, score.reward) for score in store.scores(trajectory_id)]

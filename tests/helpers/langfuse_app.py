"""A LangGraph application in production, traced by Langfuse's own handler, and what it is asked and says."""

from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from fakes.langfuse_server import LangfuseServer
from fakes.vllm_server import FakeVLLM, ToolCall
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langfuse import Langfuse
from langfuse.langchain import CallbackHandler
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from langgraph.types import RetryPolicy

from art_core.store import Store
from art_core.types import Trajectory


@dataclass
class App:
    """A LangGraph application in production: stock ChatOpenAI, stock CallbackHandler."""

    server: LangfuseServer
    llm: FakeVLLM
    sdk: Langfuse

    def run(self, text: str, **metadata: Any) -> str:
        """Ask it something; the trace's id."""
        handler = CallbackHandler(public_key=self.server.public_key)
        try:
            graph(self.llm).invoke(
                {"messages": [("user", text)]}, config={"callbacks": [handler], "metadata": metadata}
            )
        except ZeroDivisionError:
            assert text == "break"
        self.sdk.flush()
        assert handler.last_trace_id is not None
        return handler.last_trace_id

    def score(self, trace: str, name: str, value: Any, **more: Any) -> None:
        self.sdk.create_score(trace_id=trace, name=name, value=value, **more)
        self.sdk.flush()


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def graph(llm: FakeVLLM) -> Any:
    @tool
    def look(cell: int) -> str:
        """Look at a cell."""
        return f"cell {cell} is free"

    model = ChatOpenAI(model="gpt-x", base_url=llm.base_url, api_key="k", temperature=0.5)  # type: ignore[arg-type]
    flaky = {"tries": 0}

    def agent(state: State) -> dict[str, Any]:
        if state["messages"][-1].content == "break":
            raise ZeroDivisionError("no more")
        return {"messages": [model.bind_tools([look]).invoke(state["messages"])]}

    def critic(state: MessagesState) -> dict[str, Any]:
        answer = model.invoke([("system", "Judge."), ("user", str(state["messages"][-1].content))])
        flaky["tries"] += 1
        if flaky["tries"] == 1:
            raise ConnectionError("the network is down")
        return {"messages": [answer]}

    inner = StateGraph(MessagesState)
    inner.add_node("critic", critic, retry_policy=RetryPolicy(max_attempts=2, initial_interval=0.01))
    inner.add_edge(START, "critic")
    outer = StateGraph(State)
    outer.add_node("agent", agent)
    outer.add_node("tools", ToolNode([look]))
    outer.add_node("review", inner.compile())
    outer.add_edge(START, "agent")
    outer.add_conditional_edges(
        "agent", lambda s: "tools" if s["messages"][-1].tool_calls else "review", ["tools", "review"]
    )
    outer.add_edge("tools", "agent")
    outer.add_edge("review", END)
    return outer.compile()


def say(request: dict[str, Any]) -> Any:
    last = request["messages"][-1]
    if request["messages"][0]["role"] == "system":
        return "good"
    return [ToolCall("look", '{"cell": 3}')] if last["role"] == "user" else "it is free"


def only(store: Store) -> Trajectory:
    (trajectory,) = store.trajectories()
    return trajectory

"""A ReAct agent over a mailbox, as a LangGraph user writes it: model, tools, and an edge back.

The graph knows nothing of training. Its model is any chat model that calls tools; hand it `ChatART` and every
call is recorded with its exact tokens. A run ends when the agent answers, or after `MOST_TURNS` calls of the
model without an answer; a turn without a usable tool call is told so, and the run goes on.
"""

from typing import Annotated, Any, TypedDict, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from pydantic import ValidationError

from art_core.inference.endpoint import PolicyEndpoint
from art_langgraph import ChatART
from examples.email_research.mailbox import Mailbox, prepared
from examples.email_research.tools import mail_tools, tool_node

T = TypeVar("T")

MOST_TURNS = 8
"""Calls of the model in one run."""
MOST_TOKENS = 160
"""Sampled in one call; a tool call needs about 40."""

SYSTEM = """\
You answer questions about the mailbox of {owner}. Search it, read what you need, then call answer. \
Every turn is one tool call. Facts change: the newest mail that settles a fact counts, not quotations, \
questions or hearsay. Answer with the name, date or number alone, and give the ids of the mails it is from."""

NO_OBJECT = "(a tool call whose arguments were no object)"
"""What stands for such a call in the conversation: LangChain's messages cannot hold it."""
NO_CALL = "Error: that was no tool call. Call search, read or answer."


def first(one: T | None, other: T | None) -> T | None:
    """The answer that was given first: two in one turn are one answer too many."""
    return other if one is None else one


class Research(TypedDict, total=False):
    """The graph's state; ``inbox``, ``owner`` and ``question`` are its inputs."""

    inbox: str
    owner: str
    question: str
    messages: Annotated[list[AnyMessage], add_messages]
    turns: int
    answer: Annotated[str | None, first]
    sources: Annotated[list[str] | None, first]


def build_graph(llm: BaseChatModel, mailbox: Mailbox | None = None) -> CompiledStateGraph:
    """The agent around a chat model.

    Args:
        llm: calls tools.
        mailbox: what is searched; None: the one of seed 0.
    """
    tools = mail_tools(mailbox or prepared())
    model = llm.bind_tools(tools)

    def begin(state: Research) -> Research:
        return {
            "messages": [SystemMessage(SYSTEM.format(owner=state["owner"])), HumanMessage(state["question"])],
            "turns": 0,
            "answer": None,
            "sources": None,
        }

    async def agent(state: Research) -> Research:
        try:
            reply = readable(await model.ainvoke(state["messages"]))
        except ValidationError:
            reply = AIMessage(NO_OBJECT)
        return {"messages": [reply], "turns": state["turns"] + 1}

    def remind(state: Research) -> Research:
        return {"messages": [HumanMessage(NO_CALL)]}

    def after_agent(state: Research) -> str:
        last = state["messages"][-1]
        return "tools" if isinstance(last, AIMessage) and last.tool_calls else "remind"

    def after_turn(state: Research) -> str:
        return END if state["answer"] is not None or state["turns"] >= MOST_TURNS else "agent"

    graph = StateGraph(Research)
    graph.add_node("begin", begin)
    graph.add_node("agent", agent)
    graph.add_node("tools", tool_node(tools))
    graph.add_node("remind", remind)
    graph.add_edge(START, "begin")
    graph.add_edge("begin", "agent")
    graph.add_conditional_edges("agent", after_agent, ["tools", "remind"])
    graph.add_conditional_edges("tools", after_turn, ["agent", END])
    graph.add_conditional_edges("remind", after_turn, ["agent", END])
    return graph.compile()


def readable(reply: AIMessage) -> AIMessage:
    """A reply as it can be sent back: calls that are no JSON become text, which servers cannot refuse."""
    if not reply.invalid_tool_calls:
        return reply
    broken = " ".join(f"{call['name']}({call['args']})" for call in reply.invalid_tool_calls)
    return AIMessage(f"{reply.text} {broken}".strip(), tool_calls=reply.tool_calls, id=reply.id)


def sampling_agent(
    model: PolicyEndpoint, mailbox: Mailbox | None = None, **options: Any
) -> CompiledStateGraph:
    """The agent as it is trained: answers are drawn as the policy thinks them likely."""
    return build_graph(ChatART(model, **{"temperature": 1.0, "max_tokens": MOST_TOKENS, **options}), mailbox)


def greedy_agent(model: PolicyEndpoint, mailbox: Mailbox | None = None, **options: Any) -> CompiledStateGraph:
    """The agent as it may be deployed: always the likeliest token."""
    return build_graph(ChatART(model, **{"temperature": 0.0, "max_tokens": MOST_TOKENS, **options}), mailbox)

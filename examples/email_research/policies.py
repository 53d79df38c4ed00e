"""Scripted players of the agent's part: one that knows the answers, and one that knows nothing.

The expert shows that the questions can be answered with the tools, is what rewards are checked against, and
gives the conversations of the warm start. It searches as a person would, and reads only what its searches
have shown; what it does not have to find out is which of them is right.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool

from art_core import Scenario

Act = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""
Policy = Callable[[Sequence[BaseMessage]], Act]
"""What to do next, given the messages so far; the question is the second one."""


class Scripted(BaseChatModel):
    """A chat model that does what a function says.

    Attributes:
        policy: the function.
    """

    policy: Policy

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, AIMessage]:
        """Itself; the tools are kept with each call."""
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        name, arguments = self.policy(messages)
        call = {"name": name, "args": arguments, "id": f"call_{len(messages)}"}
        return ChatResult(generations=[ChatGeneration(message=AIMessage("", tool_calls=[call]))])


def expert(scenarios: Sequence[Scenario]) -> Scripted:
    """Finds, reads and cites the mails that settle a question, and answers it."""
    known = {scenario.inputs["question"]: scenario.metadata for scenario in scenarios}

    def policy(messages: Sequence[BaseMessage]) -> Act:
        asked = known[messages[1].text]
        done = [call for m in messages if isinstance(m, AIMessage) for call in m.tool_calls]
        opened = {call["args"]["mail_id"] for call in done if call["name"] == "read"}
        for source, words in zip(asked["sources"], asked["searches"], strict=True):
            if source in opened:
                continue
            seen = [m.text for m in messages if isinstance(m, ToolMessage)]
            if any(re.search(rf"^{source} ", text, re.MULTILINE) for text in seen):
                return "read", {"mail_id": source}
            tried = [
                call["args"] for call in done if call["name"] == "search" and call["args"]["query"] == words
            ]
            if not tried:
                return "search", {"query": words}
            if len(tried) == 1:  # perhaps there is something newer than all that was found
                days = re.findall(r"^m\d+ (\d{4}-\d\d-\d\d) ", seen[-1], re.MULTILINE)
                return "search", {"query": words, "after": max(days)}
            break
        told = "\n".join(m.text for m in messages if isinstance(m, ToolMessage))
        return "answer", {
            "text": spoken(asked, told),
            "sources": [s for s in asked["sources"] if s in opened],
        }

    return Scripted(policy=policy)


def spoken(asked: Mapping[str, Any], told: str) -> str:
    """The answer in the form in which some text has it, if it has."""
    answer = asked["answer"]
    forms = [answer]
    if asked["answer_kind"] == "date":
        day = date.fromisoformat(answer)
        forms = [f"{day.day} {day:%B %Y}", f"{day:%B} {day.day}, {day.year}", answer]
    elif asked["kind"] == "how_much":
        amount = f"{int(answer):,}"
        forms = [f"EUR {amount}", f"{amount} euros", f"€{amount}"]
    return next((form for form in forms if form in told), forms[0])


def clueless(seed: int = 0) -> Scripted:
    """Calls tools at random, with words and mails that it has seen."""
    draw = random.Random(seed)

    def policy(messages: Sequence[BaseMessage]) -> Act:
        seen = re.findall(r"\bm\d+\b", " ".join(m.text for m in messages[2:])) or ["m1"]
        asked, said = (re.findall(r"\w+", m.text) for m in (messages[1], messages[-1]))
        match draw.choice(("search", "read", "answer")):
            case "search":
                return "search", {"query": " ".join(draw.choices(asked, k=3))}
            case "read":
                return "read", {"mail_id": draw.choice(seen)}
            case _:
                return "answer", {"text": draw.choice(said), "sources": [draw.choice(seen)]}

    return Scripted(policy=policy)

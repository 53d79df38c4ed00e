"""What the agent can do with a mailbox: search, read, answer.

Invariant: a call that makes no sense is answered with a message that begins with ``Error`` and says what
would; it never ends the run. Results are short enough that a whole run fits into a small context.
"""

import re
from typing import Annotated, Any

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, tool
from langgraph.prebuilt import ToolNode, ToolRuntime
from langgraph.prebuilt.tool_node import ToolInvocationError
from langgraph.types import Command
from pydantic import BeforeValidator

from examples.email_research.mailbox import Mailbox, MailboxError

LONGEST_MAIL = 900
"""Characters of a body that are shown; the longest mails quote others."""


def _texts(given: Any) -> Any:
    """Ids as models write them: a list, one text with commas, a number."""
    if isinstance(given, str):
        return re.findall(r"m?\d+", given)
    return [str(one) for one in given] if isinstance(given, list | tuple) else [str(given)]


def as_id(given: str) -> str:
    """``m12`` of ``m12``, ``12``, ``[m12]``, ``M12``; what has no number stays as it is."""
    number = re.search(r"\d+", given)
    return f"m{number.group()}" if number else given


Words = Annotated[str, BeforeValidator(lambda given: str(given) if isinstance(given, int | float) else given)]
Ids = Annotated[list[str], BeforeValidator(_texts)]


def mail_tools(mailbox: Mailbox) -> list[BaseTool]:
    """The tools over a mailbox; whose inbox it is says the graph's state (``inbox``)."""

    @tool(parse_docstring=True)
    def search(
        query: Words,
        runtime: ToolRuntime,
        sender: str = "",
        before: str = "",
        after: str = "",
    ) -> str:
        """Search the mailbox. Shows id, date, sender, subject and an excerpt of the mails that fit best.

        Args:
            query: words to search for.
            sender: only mails of this sender (part of the name).
            before: only mails sent before this date, YYYY-MM-DD.
            after: only mails sent after this date, YYYY-MM-DD.
            runtime: knows whose inbox it is.
        """
        hits = mailbox.search(runtime.state["inbox"], query, sender=sender, before=before, after=after)
        return (
            "\n".join(f"{h.id} {h.sent[:10]} {h.sender}: {h.subject} | {h.snippet}" for h in hits)
            or "No mail fits."
        )

    @tool(parse_docstring=True)
    def read(mail_id: Words, runtime: ToolRuntime) -> str:
        """Read one mail.

        Args:
            mail_id: as search shows it, such as m12.
            runtime: knows whose inbox it is.
        """
        mail = mailbox.read(runtime.state["inbox"], as_id(mail_id))
        body = mail["body"]
        cut = " [...]" if len(body) > LONGEST_MAIL else ""
        return (
            f"{mail['id']}, {mail['sent']}\nFrom: {mail['sender']}\nTo: {mail['recipients']}\n"
            f"Subject: {mail['subject']}\n\n{body[:LONGEST_MAIL]}{cut}"
        )

    @tool(parse_docstring=True)
    def answer(text: Words, sources: Ids, runtime: ToolRuntime) -> Command[Any]:
        """Give the final answer and end. Only once you know it.

        Args:
            text: the answer alone, as short as can be: a name, a date, a number.
            sources: ids of the mails that the answer is from.
            runtime: knows which call this is.
        """
        said = ToolMessage("Answered.", tool_call_id=runtime.tool_call_id or "")
        cited = [as_id(source) for source in sources]
        return Command(update={"answer": text, "sources": cited, "messages": [said]})

    return [search, read, answer]


def tool_node(tools: list[BaseTool]) -> ToolNode:
    """LangGraph's tool node, which tells the model what was wrong with a call."""
    return ToolNode(tools, handle_tool_errors=_explained)


def _explained(error: MailboxError | ToolInvocationError) -> str:
    if isinstance(error, MailboxError):
        return f"Error: {error}"
    wrong = error.filtered_errors or []
    told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in wrong)
    return f"Error: {error.tool_name} was called with wrong arguments: {told}"

"""What a request's tools and tool choice mean for the prompt and for the text.

Invariant: nothing is put into the completion that the model did not sample. A call that must be made
is begun in the *prompt* (``<tool_call>`` and, for a named function, its name), so ``prompt_token_ids``
holds what was forced and ``token_ids`` what was sampled.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from art_core.inference.openai_schema import ChatRequest, InvalidParameterError, NamedToolChoice, Tool
from art_core.inference.tool_parsing import CLOSE, OPEN


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How tools are handled.

    Attributes:
        tools: what the chat template is given; None for none.
        forced: text that the prompt ends with, and that the assistant's message begins with.
        stop: ends the completion after the first call, where only one is wanted.
    """

    tools: Sequence[Tool] | None = None
    forced: str = ""
    stop: tuple[str, ...] = ()


def tool_use(wanted: ChatRequest, *, readable: bool = True) -> ToolUse:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Args:
        wanted: the request.
        readable: whether calls are read out of texts.

    Raises:
        InvalidParameterError: a call is asked for and there is no such tool, or calls are not read.
    """
    choice = wanted.tool_choice
    if not wanted.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidParameterError("tool_choice asks for a call, but tools is empty", "tool_choice")
        return ToolUse()
    if choice == "none":
        return ToolUse()
    if not readable:
        raise InvalidParameterError(
            "tools: this engine was started with tool_call_parser=None, so it reads no calls", "tools"
        )
    stop = (CLOSE,) if wanted.parallel_tool_calls is False else ()
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        known = [tool.function.name for tool in wanted.tools]
        if name not in known:
            raise InvalidParameterError(
                f"tool_choice names {name!r}, which is not among the tools: {', '.join(known)}", "tool_choice"
            )
        # A call of one function is one call: what follows it was not asked for.
        # It ends where a token of most vocabularies does: the space after it belongs to what comes next.
        opening = f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments":'
        return ToolUse(wanted.tools, opening, (CLOSE,))
    if choice == "required":
        return ToolUse(wanted.tools, f"{OPEN}\n", stop)
    return ToolUse(wanted.tools, "", stop)

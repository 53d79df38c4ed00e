"""What a request's tools and tool choice mean for the prompt and for the text.

Invariant: nothing is put into the completion that the model did not sample. A call that must be made
is begun in the *prompt* (for a named function, with its name), so ``prompt_token_ids`` holds what was forced
and ``token_ids`` what was sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from art_core.inference.embedded.parsing import Forms
from art_core.inference.openai_schema import ChatRequest, InvalidParameterError, NamedToolChoice, Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How tools are handled.

    Attributes:
        tools: what the chat template is given; None for none.
        forced: text that the prompt ends with, and that the assistant's message begins with.
        stop: ends the completion after the first call, where only one is wanted and its form has an end.
        single: whether only the first call is wanted.
    """

    tools: Sequence[Tool] | None = None
    forced: str = ""
    stop: tuple[str, ...] = ()
    single: bool = False


def tool_use(wanted: ChatRequest, forms: Forms) -> ToolUse:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Args:
        wanted: the request.
        forms: what is read out of texts.

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
    form = forms.tools
    if form is None:
        raise InvalidParameterError(f"tools: {forms.refusal}", "tools")
    stop = () if form.end is None else (form.end,)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        known = [tool.function.name for tool in wanted.tools]
        if name not in known:
            raise InvalidParameterError(
                f"tool_choice names {name!r}, which is not among the tools: {', '.join(known)}", "tool_choice"
            )
        # A call of one function is one call: what follows it was not asked for.
        return ToolUse(wanted.tools, form.opening(name), stop, single=True)
    single = wanted.parallel_tool_calls is False
    opening = form.opening(None) if choice == "required" else ""
    return ToolUse(wanted.tools, opening, stop if single else (), single)

"""From messages to prompt tokens, by the model's own chat template.

Invariant: the ids are those of the rendered text, special tokens of the template included and none
added; messages that cannot be rendered faithfully are refused.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from art_core.errors import ChatTemplateError
from art_core.inference.openai_schema import ChatMessage, InvalidParameterError, Tool


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt's text, up to where the assistant begins.

    Raises:
        ChatTemplateError: the template refuses the messages (its own words), or there is no template.
        InvalidParameterError: a message has content other than text.
    """
    plain = [_plain(message, index) for index, message in enumerate(messages)]
    if not tokenizer.chat_template:
        raise ChatTemplateError(
            "this model's tokenizer has no chat template; use an instruction-tuned model, or name a template "
            "with EngineConfig.chat_template"
        )
    try:
        text = tokenizer.apply_chat_template(
            plain,
            tools=[tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
            tokenize=False,
            add_generation_prompt=True,
            **(template_kwargs or {}),
        )
    except (TemplateError, TypeError, ValueError, KeyError) as refused:
        raise ChatTemplateError(f"the chat template refuses these messages: {refused}") from refused
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Rendered text to ids."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message as templates expect it: text content, arguments as objects."""
    plain = message.model_dump(exclude_unset=True)
    plain["content"] = _text(message.content, index)
    # vLLM and its clients have two names for it; templates know this one.
    if isinstance(thoughts := plain.pop("reasoning", None), str):
        plain.setdefault("reasoning_content", thoughts)
    calls: list[dict[str, Any]] | None = plain.get("tool_calls")
    if calls:
        for call in calls:
            call["function"]["arguments"] = _arguments(call["function"].get("arguments", "{}"))
    else:
        plain.pop("tool_calls", None)
    return plain


def _arguments(text: str) -> Any:
    """Templates write arguments with ``tojson``; a string would be quoted twice. Broken JSON stays text."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        return text
    return parsed if isinstance(parsed, dict) else text


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidParameterError(
                f"messages.{index}.content: only text parts are supported, got {part.get('type')!r}",
                "messages",
            )
    return "\n".join(part["text"] for part in content)

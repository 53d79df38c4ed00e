"""Messages as Langfuse keeps them, in OpenAI's wire format.

Invariant: what is a message in any of the forms that its integrations write (OpenAI's, LangChain's fields,
LangChain's serialisation) comes out in one form; what is none comes out as it was.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

_ROLES = {
    "human": "user", "HumanMessage": "user", "HumanMessageChunk": "user", "user": "user",
    "ai": "assistant", "AIMessage": "assistant", "AIMessageChunk": "assistant", "assistant": "assistant",
    "system": "system", "SystemMessage": "system", "developer": "developer",
    "tool": "tool", "ToolMessage": "tool", "function": "function", "FunctionMessage": "function",
}  # fmt: skip
_KEPT = ("name", "tool_call_id", "refusal", "reasoning_content")

Wire = dict[str, Any]


def parsed(value: Any) -> Any:
    """A value that came as text: what its JSON holds, where it is JSON of more than a bare word."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def asked(value: Any) -> tuple[tuple[Wire, ...], tuple[Wire, ...]]:
    """The messages and the tools of a generation's input."""
    value = parsed(value)
    tools: list[Any] = []
    if isinstance(value, Mapping):
        given = cast("Mapping[str, Any]", value)
        tools += cast("list[Any]", given.get("tools") or [])
        value = given.get("messages", given if as_message(given) else [given])
    items = list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else [value]
    if len(items) == 1 and isinstance(items[0], list):
        items = cast("list[Any]", items[0])  # a batch of one
    messages: list[Wire] = []
    for item in items:
        if (tool := _as_tool(item)) is not None:
            tools.append(tool)
        elif item is not None:
            messages.append(as_message(item) or {"role": "user", "content": _text(item)})
    return tuple(messages), tuple(tool for tool in tools if isinstance(tool, dict))


def answered(value: Any) -> Wire | None:
    """The assistant's message of a generation's output; the first one where it has several."""
    value = parsed(value)
    if isinstance(value, list) and value:
        value = cast("list[Any]", value)[0]
    if value is None or value == []:
        return None
    message = as_message(value)
    if message is None:
        return {"role": "assistant", "content": _text(value)}
    return message | {"role": "assistant"}


def as_message(value: Any) -> Wire | None:
    """A message in OpenAI's format; None when the value is no message."""
    if isinstance(value, list | tuple):
        pair = list(cast("Sequence[Any]", value))
        if len(pair) == 2 and all(isinstance(part, str) for part in pair) and pair[0] in _ROLES:
            return {"role": _ROLES[pair[0]], "content": pair[1]}
        return None
    if not isinstance(value, Mapping):
        return None
    given = dict(cast("Mapping[str, Any]", value))
    role = given.get("role")
    if given.get("lc") and isinstance(given.get("kwargs"), Mapping):
        role = cast("list[str]", given.get("id") or [""])[-1]
        given = cast("dict[str, Any]", given["kwargs"])
    elif role is None and "content" in given:
        role = given.get("type")
    if not isinstance(role, str) or not ("content" in given or given.get("tool_calls")):
        return None
    role = _ROLES.get(role, role if "role" in given else None)
    if role is None:
        return None
    extra: Mapping[str, Any] = given.get("additional_kwargs") or {}
    message: Wire = {"role": role, "content": given.get("content")}
    for name in _KEPT:
        if (kept := given.get(name) or extra.get(name)) is not None:
            message[name] = kept
    if calls := [*(given.get("tool_calls") or ()), *(given.get("invalid_tool_calls") or ())]:
        message["tool_calls"] = [_as_call(call) for call in calls]
        message["content"] = message["content"] or None
    return message


def plain(value: Any) -> Any:
    """A graph's input or output with its messages in OpenAI's format."""
    value = parsed(value)
    if (message := as_message(value)) is not None:
        return message
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    return value


def _as_call(call: Mapping[str, Any]) -> Wire:
    if "function" in call:
        return {"id": call.get("id"), "type": "function", "function": dict(call["function"])}
    arguments = call.get("args")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    function = {"name": call.get("name"), "arguments": text}
    return {"id": call.get("id"), "type": "function", "function": function}


def _as_tool(item: Any) -> Any:
    """A tool's definition, which Langfuse's callback handler puts among the messages."""
    if not isinstance(item, Mapping):
        return None
    given = cast("Mapping[str, Any]", item)
    content = given.get("content")
    if given.get("role") == "tool" and "tool_call_id" not in given and isinstance(content, Mapping):
        return dict(cast("Mapping[str, Any]", content))
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

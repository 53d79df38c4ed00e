"""LangChain's objects as JSON could hold them."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from langchain_core.messages import BaseMessage, RemoveMessage, convert_to_openai_messages
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError


def plain(value: Any) -> Any:
    """A graph's output as JSON could hold it: messages in OpenAI's format, objects as dicts.

    What has no such form stays as it is.
    """
    if isinstance(value, BaseMessage):
        return value if isinstance(value, RemoveMessage) else convert_to_openai_messages(value)
    if isinstance(value, BaseModel):
        try:
            return value.model_dump(mode="json")
        except PydanticSerializationError:  # a field of a type of the user's own
            return value
    if is_dataclass(value) and not isinstance(value, type):
        # Not asdict: it copies what the fields hold, and a client or a lock can't be copied.
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in cast("Iterable[Any]", value)]
    return value

"""LangChain's objects as JSON could hold them."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, cast

from langchain_core.messages import BaseMessage, convert_to_openai_messages
from pydantic import BaseModel


def plain(value: Any) -> Any:
    """A graph's output as JSON could hold it: messages in OpenAI's format, objects as dicts."""
    if isinstance(value, BaseMessage):
        return convert_to_openai_messages(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in cast("Iterable[Any]", value)]
    return value

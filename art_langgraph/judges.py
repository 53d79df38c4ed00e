"""Any LangChain chat model as a judge.

Invariant: a judge's calls are nobody's rollout, and the answer is the model's own text (or the arguments of
its tool call): nothing is parsed here, so that a bad answer is asked again by whoever judges.

A schema goes to the model's structured output where it has one. Where it has none, or its server refuses
the request, the model is asked in words alone, which the messages do anyway.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.runnables import Runnable

from art_core.errors import ConfigError
from art_core.recording import set_current_rollout
from art_core.rewards.judge import Answer, Usage
from art_core.types import Message

logger = logging.getLogger(__name__)

_REFUSALS = frozenset({400, 404, 415, 422, 501})
"""HTTP codes by which servers refuse a parameter that they do not know."""


class LangChainJudge:
    """A judge made of a chat model.

    Args:
        model: any chat model, `ChatART` on an engine of ours included; or ``provider:model``, which
            ``langchain`` makes into one (``openai:gpt-5-mini``).
        structured: ask for structured output where the model has it.
        name: what its verdicts are kept under; None: the model's own name. Two judges of one name share
            cached verdicts.
        options: for a ``provider:model`` only: the model's arguments (``temperature=0``, ``base_url=...``).

    Raises:
        ConfigError: ``langchain`` or the provider's package is missing, the provider is unknown, there are
            options for a model that is made already, or it is no chat model.
    """

    def __init__(
        self, model: BaseChatModel | str, *, structured: bool = True, name: str | None = None, **options: Any
    ) -> None:
        if isinstance(model, str):
            self._model = _made(model, options)
            self.name = name or model
        elif not isinstance(cast(object, model), Runnable):  # one with fallbacks is no BaseChatModel
            raise ConfigError(f"{model!r} is no chat model; give one, or 'provider:model'")
        elif options:
            raise ConfigError(
                f"options {', '.join(options)} are for a judge named 'provider:model'; give them to "
                f"{type(model).__name__} itself"
            )
        else:
            self._model = model
            self.name = name or _name(model)
        self._structured = structured

    async def ask(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> Answer:
        """Answer once.

        Raises:
            Exception: what the model raises.
        """
        # In a task, and so in a context, of its own: the caller's rollout stays the caller's.
        return await asyncio.create_task(self._ask(messages, schema))

    async def _ask(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> Answer:
        set_current_rollout(None)
        given = convert_to_messages([dict(message) for message in messages])
        if not self._structured or (bound := self._bound(schema)) is None:
            return _answer(await self._model.ainvoke(given))
        try:
            said = cast("dict[str, Any]", await bound.ainvoke(given))
        except Exception as failure:
            if getattr(failure, "status_code", None) not in _REFUSALS:
                raise
            # It may be refused for another reason; then this is, too, and its error is raised.
            answer = _answer(await self._model.ainvoke(given))
            logger.warning("judge %s refuses structured output (%s); asked in words", self.name, failure)
            self._structured = False
            return answer
        return _answer(said["raw"])

    def _bound(self, schema: Mapping[str, Any]) -> Any:
        """The model held to a schema; None when it cannot be."""
        if not self._can_be_held:
            return None
        try:
            return self._model.with_structured_output(dict(schema), include_raw=True)
        except (NotImplementedError, ValueError) as failure:
            logger.info("judge %s has no structured output (%s); asked in words", self.name, failure)
            self._structured = False
            return None

    @cached_property
    def _can_be_held(self) -> bool:
        kind = type(self._model)
        own = kind.with_structured_output is not BaseChatModel.with_structured_output
        return own or kind.bind_tools is not BaseChatModel.bind_tools


def _made(name: str, options: Mapping[str, Any]) -> BaseChatModel:
    try:
        from langchain.chat_models import init_chat_model
    except ImportError as missing:
        raise ConfigError(
            f"a judge named {name!r} needs langchain: pip install langchain, or give a chat model itself"
        ) from missing
    try:
        return cast("BaseChatModel", init_chat_model(name, **options))
    except (ImportError, ValueError) as failure:
        raise ConfigError(f"no judge {name!r}: {failure}") from failure


def _name(model: BaseChatModel) -> str:
    for attribute in ("model_name", "model", "model_id"):
        if isinstance(value := getattr(model, attribute, None), str) and value:
            return value
    return type(model).__name__


def _answer(said: BaseMessage) -> Answer:
    calls = said.tool_calls if isinstance(said, AIMessage) else []
    text = json.dumps(calls[0]["args"]) if calls else said.text
    told = said.usage_metadata if isinstance(said, AIMessage) else None
    if told is None:
        return Answer(text)
    return Answer(text, Usage(1, told["input_tokens"], told["output_tokens"]))

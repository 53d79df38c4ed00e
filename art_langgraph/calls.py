"""LLM calls as callbacks tell of them, and the steps that they become.

Invariant: one call becomes the steps of its completion where a gateway kept it, or one step at the level
of text that says why it cannot be trained; never both, and never none.

A stock ``ChatOpenAI`` that goes through a gateway carries the completion's key in ``system_fingerprint``:
in the message when it worked, in the error's response when it did not.
"""

import asyncio
import os
import re
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, Generation, LLMResult

from art_core.capture import Call, failed_step, steps_from
from art_core.errors import CaptureError
from art_core.inference.gateway_log import KEY_PREFIX
from art_core.inference.gateway_proxy import KEY_HEADER
from art_core.recording import Rollout
from art_core.types import Message, Step, StepIdentity
from art_langgraph.spans import jsonable

_KEY = re.compile(rf"{KEY_PREFIX}[0-9a-f]+-\d+")
"""A key, at the beginning: LangChain joins the fingerprints of several choices of a stream to one text."""

_NOT_SENT = frozenset({"_type", "model_name", "model", "tools", "stream", "stream_options", "messages"})


@dataclass(slots=True)
class OpenCall:
    """A call that has started.

    Attributes:
        model: the name that is asked for.
        base_url: what the model calls, where it is of OpenAI's kind.
        task: who waits for it, where it is async.
        loop: that the task runs on.
        streamed: what has been streamed of it so far.
        time_to_first_token: seconds until the first of it came; None when it is not streamed.
        key: of the gateway's completion, once it is known.
    """

    run_id: UUID
    rollout: Rollout
    identity: StepIdentity
    request: dict[str, Any]
    model: str
    base_url: str | None
    started_at: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    task: "weakref.ref[asyncio.Task[Any]] | None" = None
    loop: asyncio.AbstractEventLoop | None = None
    streamed: list[str] = field(default_factory=list[str])
    time_to_first_token: float | None = None
    key: str | None = None

    def token(self, token: Any, chunk: Any) -> None:
        """A part of a streamed answer has come; ``token`` is empty where a tool call, or a role, has."""
        if self.time_to_first_token is None and (token or _calls_tools(chunk)):
            self.time_to_first_token = time.perf_counter() - self.clock
        if isinstance(token, str):
            self.streamed.append(token)
        self.key = self.key or key_of_chunk(chunk)

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for it any more: its end will not come."""
        if self.task is None:
            return False
        task = self.task()
        # Who asks has gone on from the call, if it was its own.
        return task is None or task.done() or task is current_task()

    def call(self) -> Call:
        """As capture knows calls."""
        return Call(
            request=self.request,
            rollout_id=self.rollout.id,
            policy=None,
            started_at=self.started_at,
            duration=time.perf_counter() - self.clock,
            time_to_first_token=self.time_to_first_token,
            identity=self.identity,
            call_id=str(self.run_id),
        )

    def answered(self, response: LLMResult, why: str) -> tuple[Step, ...]:
        """The steps of an answer at the level of text; ``why`` says why it cannot be trained."""
        try:
            return steps_from(self.call(), _as_body(response), untrainable=why)
        except CaptureError as empty:
            return (failed_step(self.call(), str(empty)),)

    def failed(self, error: str) -> tuple[Step, ...]:
        """The step of a call that was not answered."""
        return (failed_step(self.call(), error),)

    def no_tokens(self) -> str:
        """Why an answer has no tokens."""
        return (
            f"no token ids: {self.model} is not served through a gateway "
            "(point its base_url at one, or use ChatART)"
        )


def current_task() -> "asyncio.Task[Any] | None":
    """The task that runs here; None outside of event loops."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def current_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs here."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def chat_request(messages: Sequence[BaseMessage], params: Mapping[str, Any]) -> dict[str, Any]:
    """A request in OpenAI's format, as far as callbacks know it."""
    wire = cast(list[Message], convert_to_openai_messages(list(messages)))
    return _request({"messages": wire}, params)


def text_request(prompt: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """A request of a model that completes text."""
    return _request({"prompt": prompt}, params)


def _request(body: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {k: jsonable(v) for k, v in params.items() if k not in _NOT_SENT and v is not None}
    tools = [jsonable(tool) for tool in params.get("tools") or ()]
    return {**sampling, **body, "model": model_of(params), **({"tools": tools} if tools else {})}


def model_of(params: Mapping[str, Any]) -> str:
    """The name of the model, by the names that integrations use."""
    for name in ("model", "model_name", "model_id", "_type"):
        if params.get(name):
            return str(params[name])
    return "unknown"


def base_url_of(serialized: Mapping[str, Any] | None) -> str | None:
    """The address that a model of OpenAI's kind calls."""
    kwargs: Any = (serialized or {}).get("kwargs") or {}
    url = kwargs.get("openai_api_base") or kwargs.get("base_url")
    url = url or os.environ.get("OPENAI_API_BASE") or os.environ.get("OPENAI_BASE_URL")
    return url if isinstance(url, str) else None


# -- keys --------------------------------------------------------------------------------------------


def find_key(fingerprint: Any) -> str | None:
    """The key in a ``system_fingerprint``; None when no gateway wrote it."""
    found = _KEY.match(fingerprint) if isinstance(fingerprint, str) else None
    return found.group() if found else None


def key_of_result(response: LLMResult) -> str | None:
    """The key that an answer carries."""
    message = _message(_first(response))
    metadata = message.response_metadata if message is not None else {}
    return find_key(metadata.get("system_fingerprint")) or find_key(
        (response.llm_output or {}).get("system_fingerprint")
    )


def _calls_tools(chunk: Any) -> bool:
    return bool(getattr(getattr(chunk, "message", None), "tool_call_chunks", None))


def key_of_chunk(chunk: Any) -> str | None:
    """The key that a chunk of a stream carries; only last ones do."""
    info: Any = getattr(chunk, "generation_info", None)
    return find_key(info.get("system_fingerprint")) if info else None


def key_of_error(error: BaseException, response: Any) -> str | None:
    """The key of a completion that was answered, but could not be read or was an error."""
    # OpenAI's LengthFinishReasonError and ContentFilterFinishReasonError carry the completion.
    completion = getattr(error, "completion", None)
    if (key := find_key(getattr(completion, "system_fingerprint", None))) is not None:
        return key
    message = _message(_first(response)) if isinstance(response, LLMResult) else None
    metadata: dict[str, Any] = message.response_metadata if message is not None else {}
    body, headers = metadata.get("body"), metadata.get("headers")
    return find_key(_get(body, "system_fingerprint")) or find_key(_get(headers, KEY_HEADER))


def _get(mapping: Any, name: str) -> Any:
    return cast(Mapping[str, Any], mapping).get(name) if isinstance(mapping, Mapping) else None


def is_cache_hit(response: LLMResult) -> bool:
    """Whether LangChain answered from its cache (which marks its answers as free of cost)."""
    message = _message(_first(response))
    usage: Any = message.usage_metadata if message is not None else None
    return bool(usage) and usage.get("total_cost") == 0


# -- answers -----------------------------------------------------------------------------------------


def _first(response: LLMResult) -> Generation | None:
    return response.generations[0][0] if response.generations and response.generations[0] else None


def _message(generation: Any) -> AIMessage | None:
    message = generation.message if isinstance(generation, ChatGeneration) else None
    return message if isinstance(message, AIMessage) else None


def said(response: LLMResult) -> list[Any]:
    """What was answered, as JSON."""
    return [_as_choice(0, g).get("message") or g.text for batch in response.generations for g in batch]


def _as_body(response: LLMResult) -> dict[str, Any]:
    generations = response.generations[0] if response.generations else []
    body: dict[str, Any] = {
        "choices": [_as_choice(index, generation) for index, generation in enumerate(generations)]
    }
    message = _message(_first(response))
    usage: Any = message.usage_metadata if message is not None else None
    if usage:
        body["usage"] = {
            "prompt_tokens": usage.get("input_tokens"),
            "completion_tokens": usage.get("output_tokens"),
            "total_tokens": usage.get("total_tokens"),
        }
    return body


def _as_choice(index: int, generation: Any) -> dict[str, Any]:
    message = _message(generation)
    if message is None:
        info = generation.generation_info or {}
        return {"index": index, "text": generation.text, "finish_reason": info.get("finish_reason")}
    wire: dict[str, Any] = convert_to_openai_messages(message)
    for call in message.invalid_tool_calls:
        function = {"name": call["name"], "arguments": call["args"]}
        wire.setdefault("tool_calls", []).append({"type": "function", "id": call["id"], "function": function})
    if reasoning := message.additional_kwargs.get("reasoning_content"):
        wire["reasoning_content"] = reasoning
    return {
        "index": index,
        "message": wire,
        "finish_reason": message.response_metadata.get("finish_reason"),
    }

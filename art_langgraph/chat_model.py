"""ChatART: the chat model of a policy that learns, in place of ``ChatOpenAI``.

Invariant: a graph sees what it would with ``ChatOpenAI``; every completion that the server sampled, and
every call that failed, is a step of the rollout that made it, or is counted as unattributed.

How it records. LangChain's code paths into a model are many (invoke, stream, structured output with and
without parsing, streams that callbacks ask for), and some raise after the server has answered. So nothing
is read out of LangChain's results: `art_core.tap` keeps each answer in the HTTP transport, below OpenAI's
SDK, and the four methods through which every path goes (``_generate``, ``_agenerate``, ``_stream``,
``_astream``) only open an exchange before the call and record it after. Which run a stream belongs to is
not handed to ``_stream`` on every path, but told to every handler: `RunWatch` notes it.
"""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    BaseCallbackManager,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI
from pydantic import ConfigDict, Field, SkipValidation

from art_core.capture import Call, failed_step, steps_from
from art_core.errors import ArtError, CaptureError, ConfigError, RolloutTooLongError
from art_core.inference.availability import availability_of
from art_core.inference.endpoint import PolicyEndpoint, raw_logprobs_of, served_name, temperature_of
from art_core.recording import ROLLOUT_HEADER, Rollout
from art_core.tap import (
    AsyncKeepingClient,
    AsyncKeepingTransport,
    AsyncThrough,
    Exchange,
    KeepingClient,
    KeepingTransport,
    Through,
    async_keeping_client,
    keeping_client,
)
from art_core.types import PolicyVersion, Step, StepIdentity
from art_langgraph.attribution import keep, rollout_of
from art_langgraph.identity import Run, identity_of
from art_langgraph.run_watch import RunWatch
from art_langgraph.under_way import CallUnderWay

logger = logging.getLogger(__name__)

RECORDS_ITSELF = "chat-art"
"""ChatART's type in LangChain's events: a handler that records calls leaves these to the model."""

UNREGISTERED = "http://policy.invalid/v1"
"""The address of a policy that is not served yet; the real one is looked up when a call is made."""


class ChatART(ChatOpenAI):
    """A drop-in for ``ChatOpenAI`` whose calls go to a policy, and are recorded with their exact tokens.

    Everything that ``ChatOpenAI`` can do over chat completions works as there. Which version of the policy
    answers is decided when a call is made, and each step says which it was. In a rollout that has a seed
    (``agather(..., seed=0)``), each call without a seed of its own is given one.

    Args:
        endpoint: the policy: a `TrainableModel`, or a `StaticEndpoint` for a server that you run.
        pin_version: whether all calls of one rollout go to the version that its first call went to.
        max_connections: most connections to open at once, in one event loop and over all threads; further
            calls wait for one.
        **kwargs: ``ChatOpenAI``'s. ``model`` and ``base_url`` are the endpoint's to say.

    Raises:
        ConfigError: a setting contradicts the endpoint, or asks for the Responses API.
        RolloutTooLongError: (when called) the rollout has made its most calls already.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    endpoint: Annotated[PolicyEndpoint, SkipValidation] = Field(exclude=True, repr=False)
    pin_version: bool = False
    max_connections: int = Field(default=64, ge=1)
    own_key: bool = Field(default=False, exclude=True, repr=False)

    def __init__(self, endpoint: PolicyEndpoint | None = None, **kwargs: Any) -> None:
        if endpoint is None:
            raise ConfigError("ChatART needs the policy that it is to call: ChatART(model, ...)")
        if isinstance(cast("object", endpoint), str):
            raise ConfigError(
                f"ChatART({endpoint!r}): expected the policy itself, a TrainableModel, or "
                "StaticEndpoint(base_url, model) for a server that you run"
            )
        super().__init__(**_settings(endpoint, kwargs))

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """False: it holds a policy that is alive."""
        return False

    @property
    def _llm_type(self) -> str:
        return RECORDS_ITSELF

    # -- calls -------------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self._recorded(RunWatch.take(run_manager), kwargs) as asked:
            return super()._generate(messages, stop=stop, run_manager=run_manager, **asked)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self._recorded(RunWatch.take(run_manager), kwargs) as asked:
            return await super()._agenerate(messages, stop=stop, run_manager=run_manager, **asked)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with self._recorded(RunWatch.take(run_manager), kwargs) as asked:
            yield from super()._stream(messages, stop=stop, run_manager=run_manager, **asked)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with self._recorded(RunWatch.take(run_manager), kwargs) as asked:
            chunks = super()._astream(messages, stop=stop, run_manager=run_manager, **asked)
            try:
                async for chunk in chunks:
                    yield chunk
            finally:
                # Leaving the loop early does not close the stream below; the step is read from it.
                await cast(AsyncGenerator[Any], chunks).aclose()

    # -- recording ---------------------------------------------------------------------------------

    @contextmanager
    def _recorded(self, run: Run | None, kwargs: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Record what is called inside; gives the keyword arguments to call with."""
        rollout = rollout_of(run)
        if rollout is not None and rollout.max_calls is not None and rollout.count_call() > rollout.max_calls:
            raise RolloutTooLongError(
                f"rollout {rollout.id} may make {rollout.max_calls} policy calls, and asks for one more; "
                "raise rollout_length (or max_calls), or end the agent sooner"
            )
        started_at, clock = time.time(), time.perf_counter()
        identity = identity_of(run, rollout)
        place = {} if rollout is None else {ROLLOUT_HEADER: rollout.id}
        with ExitStack() as leases:
            version, name = self._version(rollout, kwargs.get("model"), leases)
            exchange = Exchange(
                self.endpoint.base_url,
                model=name,
                api_key=None if self.own_key else self.endpoint.api_key,
                server=availability_of(self.endpoint),
            )
            asked = {
                **self._seed(rollout, kwargs),
                **self._temperature(kwargs),
                **kwargs,
                "extra_headers": {**(kwargs.get("extra_headers") or {}), **exchange.headers, **place},
            }
            raw = version is not None and raw_logprobs_of(self.endpoint)

            def record(why: str | None) -> None:
                ended = exchange.ended_at or time.perf_counter()
                keep(
                    rollout,
                    self.endpoint.name,
                    lambda owner: _steps(
                        exchange, why, owner, identity, version, started_at, clock, ended - clock, raw
                    ),
                )
                if rollout is not None and exchange.attempts > 1:
                    rollout.count_fault("retried_requests")

            call = CallUnderWay(rollout, exchange, record)
            error: BaseException | None = None
            try:
                yield asked
            except BaseException as raised:
                error = raised
                raise
            finally:
                call.end(error)

    def _temperature(self, kwargs: dict[str, Any]) -> dict[str, float]:
        """What the model's temperature knob was turned to, unless the user chose one."""
        if self.temperature is not None or "temperature" in kwargs:
            return {}
        turned = temperature_of(self.endpoint)
        return {} if turned is None else {"temperature": turned}

    def _seed(self, rollout: Rollout | None, kwargs: dict[str, Any]) -> dict[str, int]:
        """The rollout's seed for this call, unless the user chose one."""
        if rollout is None or self.seed is not None or "seed" in kwargs:
            return {}
        seed = rollout.next_seed()
        return {} if seed is None else {"seed": seed}

    def _version(
        self, rollout: Rollout | None, asked: str | None, leases: ExitStack
    ) -> tuple[PolicyVersion | None, str]:
        """Hold the version to call until ``leases`` is closed; None for a model that is not this policy."""
        if asked is not None and asked != self.endpoint.name:
            named = PolicyVersion.parse(asked)
            if named is None or named.model != self.endpoint.name:
                return None, asked
            return leases.enter_context(self.endpoint.lease(named)), asked
        if self.pin_version and rollout is not None:
            pinned = rollout.hold(f"version of {self.endpoint.name}", self.endpoint.lease)
            version = leases.enter_context(self.endpoint.lease(pinned))
        else:
            version = leases.enter_context(self.endpoint.lease())
        return version, served_name(self.endpoint, version)

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """``ChatOpenAI``'s, with the messages where OpenAI's SDK sends them as they are.

        Elsewhere it walks through them to rename keys, which takes longer than all that is recorded here; and
        they are in their form for the wire already.
        """
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        extra = {"messages": payload["messages"], **(payload.get("extra_body") or {})}
        return {**payload, "messages": [], "extra_body": extra}

    # -- what ChatOpenAI leaves out of the answers of other servers --------------------------------

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        choices: Any = response.get("choices") if isinstance(response, dict) else response.choices
        for generation, choice in zip(result.generations, choices, strict=False):
            message: Any = choice["message"] if isinstance(choice, dict) else choice.message
            extra: Any = message if isinstance(message, dict) else message.model_extra or {}
            if (reasoning := _reasoning(extra)) is not None and isinstance(generation.message, AIMessage):
                generation.message.additional_kwargs["reasoning_content"] = reasoning
        return result

    def _convert_chunk_to_generation_chunk(
        self,
        chunk: dict[str, Any],
        default_chunk_class: type,
        base_generation_info: dict[str, Any] | None,
    ) -> ChatGenerationChunk | None:
        converted = super()._convert_chunk_to_generation_chunk(
            chunk, default_chunk_class, base_generation_info
        )
        choices = chunk.get("choices") or chunk.get("chunk", {}).get("choices")
        if converted is not None and choices and isinstance(converted.message, AIMessageChunk):
            reasoning = _reasoning(choices[0].get("delta") or {})
            if reasoning is not None:
                converted.message.additional_kwargs["reasoning_content"] = reasoning
        return converted


def _settings(endpoint: PolicyEndpoint, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``ChatOpenAI``'s settings for this endpoint.

    The same names come back when LangChain copies a model with other settings (``configurable_fields``),
    so what was set here before is accepted.
    """
    named = kwargs.pop("model", None) or kwargs.pop("model_name", None)
    if named is not None and named != endpoint.name:
        raise ConfigError(
            f"model={named!r} contradicts the policy {endpoint.name!r}; the version is chosen at each call "
            f"(bind(model='{endpoint.name}@3') asks for one by name)"
        )
    base_url = kwargs.pop("base_url", None) or kwargs.pop("openai_api_base", None)
    known = _base_url(endpoint)
    if base_url not in (None, known, UNREGISTERED):
        raise ConfigError(
            f"base_url={base_url!r} contradicts the policy's {known}; for a server that you run, "
            "pass StaticEndpoint(base_url, model)"
        )
    if kwargs.get("use_responses_api"):
        raise ConfigError("use_responses_api=True: policies speak chat completions; leave it out")
    api_key = kwargs.pop("api_key", None) or kwargs.pop("openai_api_key", None)
    own_key = bool(kwargs.pop("own_key", api_key is not None))
    settings = {
        **kwargs,
        "endpoint": endpoint,
        "model": endpoint.name,
        "base_url": known,
        "api_key": api_key or "none",
        "own_key": own_key,
        "use_responses_api": False,
        "callbacks": _watched(kwargs.get("callbacks")),
        **_clients(kwargs),
    }
    settings.setdefault("stream_usage", True)
    return settings


def _base_url(endpoint: PolicyEndpoint) -> str:
    try:
        return endpoint.base_url
    except ArtError:
        return UNREGISTERED


def _clients(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The HTTP clients: ours, over the user's where they gave some."""
    limit = int(kwargs.get("max_connections") or 64)
    http, ahttp = kwargs.get("http_client"), kwargs.get("http_async_client")
    if http is None:
        http = keeping_client(limit)
    elif not isinstance(http, KeepingClient):
        transport = KeepingTransport(limit, Through(http))
        http = KeepingClient(transport=transport, timeout=None, follow_redirects=True)
    if ahttp is None:
        ahttp = async_keeping_client(limit)
    elif not isinstance(ahttp, AsyncKeepingClient):
        atransport = AsyncKeepingTransport(limit, AsyncThrough(ahttp))
        ahttp = AsyncKeepingClient(transport=atransport, timeout=None, follow_redirects=True)
    return {"http_client": http, "http_async_client": ahttp}


def _watched(callbacks: Any) -> Any:
    """The model's own callbacks, and ours."""
    if isinstance(callbacks, BaseCallbackManager):
        callbacks = callbacks.copy()
        if not any(isinstance(h, RunWatch) for h in callbacks.handlers):
            callbacks.add_handler(RunWatch(), inherit=False)
        return callbacks
    handlers = cast(list[Any], callbacks or [])
    return handlers if any(isinstance(h, RunWatch) for h in handlers) else [*handlers, RunWatch()]


def _steps(
    exchange: Exchange,
    why: str | None,
    rollout_id: str,
    identity: StepIdentity,
    version: PolicyVersion | None,
    started_at: float,
    clock: float,
    duration: float,
    raw_logprobs: bool,
) -> tuple[Step, ...]:
    """What one exchange came to; nothing if no request was sent. ``why`` says why there is no answer."""
    if exchange.request is None:
        return ()
    call = Call(
        request=exchange.request,
        rollout_id=rollout_id,
        policy=version,
        identity=identity,
        started_at=started_at,
        duration=duration,
        time_to_first_token=exchange.time_to_first_token(clock),
        raw_logprobs=raw_logprobs,
    )
    problem = exchange.problem
    if exchange.answer is not None:
        try:
            return steps_from(call, exchange.answer)
        except CaptureError as unreadable:
            problem = str(unreadable)
    return (failed_step(call, problem or why or "no answer came"),)


def _reasoning(message: Any) -> str | None:
    """The reasoning that a parser took out of the text; vLLM has renamed its field."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return reasoning if isinstance(reasoning, str) else None

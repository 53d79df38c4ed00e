"""Runs inside vLLM's own processes: answers whose exact tokens are packed instead of spelled out.

Invariant: an answer is packed only for a request whose header says that its client can read that, and is
otherwise the plain answer, field for field; a request that asks for more than the sampled tokens' ids and
logprobs, and a vLLM that this module does not know, get the standard form.

Why: vLLM looks up the text of every logprob, makes objects of it and spells them out as JSON, which costs an
API process several times what the completion itself costs; and its engine sends three arrays a token to get
them there. Here logprobs are kept as floats where they arise, travel once, and leave as base64.

Data flows like this. In the engine's process `register` (a ``vllm.general_plugins`` entry point) makes the
scheduler keep a marked request's logprobs until it ends. In the API process `PackedTokens` (an ASGI
``--middleware``) wraps two methods of two objects when the server starts: the chat handler's
``create_chat_completion``, which takes the wish for logprobs off the request and puts the packed tokens on
the answer, and the engine client's ``generate``, which marks the request and sees what was sampled.

This file alone is put on the server's path: it imports nothing of ours, and of vLLM only inside functions.
"""

import base64
import contextvars
import functools
import inspect
import json
import logging
import sys
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import aclosing
from typing import Any

logger = logging.getLogger("vllm.art")

HEADER = "x-art-tokens"
"""Request header of a client that reads packed tokens: ``x-art-tokens: packed``."""
PACKED = "packed"
FIELD = "art_tokens"
"""Top-level field of an answer, or of the chunk before a stream's end, that holds them."""
STATUS_PATH = "/art/tokens"
"""``GET`` says which form this server answers in."""

_MARK = "art_tokens"
"""Key in a request's ``SamplingParams.extra_args``, which every process sees."""
_AT_END, _AT_EACH_TOKEN = "at end", "at each token"
_LOWEST = -9999.0
"""What vLLM's own answers have in place of minus infinity."""
_DONE = "data: [DONE]\n\n"


class UnknownVLLMError(Exception):
    """This vLLM is not built as this module expects."""


# -- the engine's process --------------------------------------------------------------------------------


def register() -> None:
    """Entry point of the plugin group ``vllm.general_plugins``; called in each of vLLM's processes."""
    try:
        from vllm.v1.core.sched.scheduler import Scheduler

        keep_logprobs_until_the_end(Scheduler)
    except Exception as unknown:
        logger.warning("art: logprobs travel one by one, as in plain vLLM: %s", unknown)
    else:
        logger.info("art: logprobs of packed answers travel once")


class _StepLogprobs:
    """Stands for the ``LogprobsLists`` of one step while the scheduler cuts it up.

    The scheduler knows it by ``slice_request`` alone; here that only notes which rows were asked for.
    """

    def __init__(self, lists: Any) -> None:
        self.lists = lists
        self.starts: list[int] | None = lists.cu_num_generated_tokens
        self.values: list[float] = lists.logprobs[:, 0].tolist()  # the first column: the sampled tokens'

    def slice_request(self, index: int, positions: int) -> tuple[int, int]:
        return index, positions

    def rows(self, index: int, positions: int) -> list[float]:
        start = index if self.starts is None else self.starts[index]
        return self.values[start : start + positions]

    def whole(self, kept: "array[float]") -> Any:
        """All logprobs of a request as vLLM's own type; ids and ranks, which nobody reads, are left out."""
        import numpy as np

        return self.lists._replace(
            logprob_token_ids=np.zeros((1, 1), dtype=np.int32),
            logprobs=np.frombuffer(kept, dtype=np.float32).reshape(-1, 1),
            sampled_token_ranks=np.zeros(1, dtype=np.int32),
            cu_num_generated_tokens=None,
        )


def keep_logprobs_until_the_end(scheduler: Any) -> None:
    """Make a scheduler class hand out the logprobs of marked requests once, with their last token.

    Raises:
        UnknownVLLMError: it treats logprobs in a way that is not known here.
    """
    original = scheduler.update_from_output
    if getattr(original, "of_art", False):
        return
    if list(inspect.signature(original).parameters) != ["self", "scheduler_output", "model_runner_output"]:
        raise UnknownVLLMError("Scheduler.update_from_output has other parameters")
    source = inspect.getsource(original)
    if source.count("logprobs.slice_request(") != 1 or source.count("model_runner_output.logprobs\n") != 1:
        raise UnknownVLLMError("Scheduler.update_from_output uses logprobs in another way")

    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        lists = model_runner_output.logprobs
        if lists is None:
            return original(self, scheduler_output, model_runner_output)
        requests = self.requests.copy()  # those that end in this step are gone afterwards
        step = _StepLogprobs(lists)
        model_runner_output.logprobs = step
        try:
            outputs = original(self, scheduler_output, model_runner_output)
        finally:
            model_runner_output.logprobs = lists
        for batch in outputs.values():
            for output in batch.outputs:
                if type(output.new_logprobs) is tuple:
                    _settle(output, requests[output.request_id], step)
        return outputs

    update_from_output.of_art = True  # type: ignore[attr-defined]
    scheduler.update_from_output = update_from_output


def _settle(output: Any, request: Any, step: _StepLogprobs) -> None:
    """Put the place of an output's logprobs right. Done for every token: it takes a microsecond."""
    index, positions = output.new_logprobs
    kept = request.__dict__.get("art_logprobs")  # on the request itself: what is aborted is forgotten
    if kept is None:
        if _mark(request.sampling_params) != _AT_END:
            output.new_logprobs = step.lists.slice_request(index, positions)
            return
        kept = request.art_logprobs = array("f")
    if positions == 1 and step.starts is None:
        kept.append(step.values[index])
    else:
        kept.extend(step.rows(index, positions))
    output.new_logprobs = None if output.finish_reason is None else step.whole(kept)


def _mark(params: Any) -> str | None:
    extra = params.extra_args
    return extra.get(_MARK) if extra else None


# -- the API process -------------------------------------------------------------------------------------


class _Logprobs:
    """The logprobs of one completion, as far as they have come.

    vLLM takes it for a list of what belongs to the newest tokens, and cuts and joins it while it streams.
    Every cut is the whole, so that whoever has the last piece has all.
    """

    def __init__(self) -> None:
        self.values = array("f")

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, _: Any) -> "_Logprobs":
        return self

    def extend(self, _: Any) -> None:
        pass


def keep_logprobs_as_floats(processor: Any) -> None:
    """Make a ``LogprobsProcessor`` class keep the logprobs of marked requests without text and objects.

    Raises:
        UnknownVLLMError: it is made or fed in a way that is not known here.
    """
    if getattr(processor, "of_art", False):
        return
    original = processor.from_new_request.__func__
    if list(inspect.signature(original).parameters) != ["cls", "tokenizer", "request"]:
        raise UnknownVLLMError("LogprobsProcessor.from_new_request has other parameters")
    if list(inspect.signature(processor.update_from_output).parameters) != ["self", "output"]:
        raise UnknownVLLMError("LogprobsProcessor.update_from_output has other parameters")

    class FloatLogprobs(processor):
        def update_from_output(self, output: Any) -> None:
            if output.new_logprobs is not None:
                self.logprobs.values.extend(output.new_logprobs.logprobs[:, 0].tolist())

    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        if _mark(request.sampling_params) is None:
            return original(cls, tokenizer, request)
        made = original(FloatLogprobs, tokenizer, request)
        made.logprobs = _Logprobs()
        made.cumulative_logprob = None
        return made

    processor.from_new_request = classmethod(from_new_request)
    processor.of_art = True


class _Sampled:
    """What was sampled for one request."""

    def __init__(self) -> None:
        self.prompt: list[int] | None = None
        self._ids: dict[int, Any] = {}
        self._logprobs: dict[int, Any] = {}

    def take(self, output: Any, *, deltas: bool) -> None:
        """See a ``RequestOutput``; with ``deltas`` it has only the newest tokens."""
        self.prompt = output.prompt_token_ids
        for completion in output.outputs:
            index = completion.index
            if deltas:
                self._ids.setdefault(index, array("i")).extend(completion.token_ids)
            else:
                self._ids[index] = completion.token_ids
            if completion.logprobs is not None:
                self._logprobs[index] = completion.logprobs

    def packed(self) -> dict[str, Any]:
        """All of it, for the answer."""
        return {
            "prompt": _base64("i", self.prompt or ()),
            "choices": [
                {"index": index, "ids": _base64("i", ids), "logprobs": self._packed_logprobs(index)}
                for index, ids in sorted(self._ids.items())
            ],
        }

    def _packed_logprobs(self, index: int) -> str:
        kept = self._logprobs.get(index)
        values = kept.values if isinstance(kept, _Logprobs) else ()
        return _base64("f", [_LOWEST if value < _LOWEST else value for value in values])


def _base64(kind: str, values: Iterable[Any]) -> str:
    """Numbers as base64 of four little-endian bytes each."""
    numbers = array(kind, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


_sampled: contextvars.ContextVar[_Sampled | None] = contextvars.ContextVar("art_sampled", default=None)
"""Of the request that is being handled now, if its answer is to be packed."""


def pack_answers(handler: Any, engine: Any) -> None:
    """Wrap the two methods through which a chat completion passes.

    Args:
        handler: has ``create_chat_completion(request, raw_request)``.
        engine: has ``generate(prompt, sampling_params, request_id, ...)``.

    Raises:
        UnknownVLLMError: they have not.
    """
    create, generate = handler.create_chat_completion, engine.generate
    if list(inspect.signature(create).parameters)[:2] != ["request", "raw_request"]:
        raise UnknownVLLMError("create_chat_completion has other parameters")
    if list(inspect.signature(generate).parameters)[:3] != ["prompt", "sampling_params", "request_id"]:
        raise UnknownVLLMError("generate has other parameters")

    @functools.wraps(create)
    async def create_chat_completion(request: Any, raw_request: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not _can_be_packed(request, raw_request):
            return await create(request, raw_request, *args, **kwargs)
        request.logprobs = False
        request.return_token_ids = None
        sampled = _Sampled()
        token = _sampled.set(sampled)
        try:
            answer = await create(request, raw_request, *args, **kwargs)
        finally:
            _sampled.reset(token)
        if inspect.isasyncgen(answer):
            return _stream(answer, sampled)
        if hasattr(answer, "choices"):  # otherwise it is an error
            setattr(answer, FIELD, sampled.packed())
        return answer

    @functools.wraps(generate)
    def generate_and_see(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        sampled = _sampled.get()
        if sampled is None:
            return generate(prompt, sampling_params, *args, **kwargs)
        sampling_params.logprobs = 0  # the sampled token's alone
        # A stop string is found out there, where the engine's last word does not arrive in time.
        when = _AT_EACH_TOKEN if sampling_params.stop else _AT_END
        sampling_params.extra_args = {**(sampling_params.extra_args or {}), _MARK: when}
        deltas = sampling_params.output_kind.name == "DELTA"
        return _see(generate(prompt, sampling_params, *args, **kwargs), sampled, deltas=deltas)

    handler.create_chat_completion = create_chat_completion
    engine.generate = generate_and_see


_MORE = (
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "use_beam_search",
    "return_tokens_as_token_ids",
)
"""Wishes that packed tokens do not fulfil."""


def _can_be_packed(request: Any, raw_request: Any) -> bool:
    if raw_request is None or raw_request.headers.get(HEADER) != PACKED:
        return False
    return (
        bool(request.logprobs and request.return_token_ids)
        and not any(getattr(request, name, None) for name in _MORE)
        and getattr(request, "include_reasoning", True)  # hidden reasoning is not to be had from its tokens
    )


async def _see(outputs: Any, sampled: _Sampled, *, deltas: bool) -> AsyncGenerator[Any, None]:
    async with aclosing(outputs):
        async for output in outputs:
            sampled.take(output, deltas=deltas)
            yield output


async def _stream(events: Any, sampled: _Sampled) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for event in events:
            if event == _DONE and sampled.prompt is not None:
                chunk = {"object": "chat.completion.chunk", "choices": [], FIELD: sampled.packed()}
                yield f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"
            yield event


Message = MutableMapping[str, Any]


class PackedTokens:
    """ASGI middleware, named on the command line: ``--middleware art_vllm.PackedTokens``."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._state = {"encoding": "standard", "detail": "the server is starting"}

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Pass everything on; install at the server's start, when its state is complete."""
        if scope["type"] == "lifespan":
            self._state = _install(scope["app"].state)
        elif scope["type"] == "http" and scope["path"] == STATUS_PATH:
            body = json.dumps(self._state).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)


def _install(state: Any) -> dict[str, str]:
    try:
        from vllm.v1.engine.logprobs import LogprobsProcessor

        handler, engine = state.openai_serving_chat, state.engine_client
        if handler is None or getattr(handler, "engine_client", None) is not engine:
            raise UnknownVLLMError("the server has no chat handler of its own engine")
        keep_logprobs_as_floats(LogprobsProcessor)
        pack_answers(handler, engine)
    except Exception as unknown:
        detail = f"{type(unknown).__name__}: {unknown}"
        logger.warning("art: answers stay in the standard form, which is slower: %s", detail)
        return {"encoding": "standard", "detail": detail}
    logger.info("art: answers to %s: %s are packed", HEADER, PACKED)
    return {"encoding": PACKED, "detail": ""}

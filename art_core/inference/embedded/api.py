"""The HTTP face: requests to jobs, outcomes to OpenAI's shapes.

Invariant: every request is answered, with a completion or with an error in OpenAI's format that says
what to change; a client that leaves frees its place.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pydantic_core
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive
from transformers import PreTrainedTokenizerBase

from art_core.config import EngineConfig
from art_core.errors import ArtError, ChatTemplateError
from art_core.inference.embedded.answer import Answer
from art_core.inference.embedded.job import Job
from art_core.inference.embedded.parsing import Forms, MessageParser
from art_core.inference.embedded.prompt import encode, render
from art_core.inference.embedded.sampling import SamplingParams
from art_core.inference.embedded.scheduler import Scheduler
from art_core.inference.embedded.shaping import Shaping
from art_core.inference.embedded.spelling import Speller
from art_core.inference.embedded.stream import AnswerStream
from art_core.inference.embedded.tools import tool_use
from art_core.inference.embedded.versions import ServedVersions, UnknownModelError
from art_core.inference.openai_schema import (
    ChatRequest,
    InvalidParameterError,
    error_response,
    parse_chat_request,
)
from art_core.inference.reasoning_parsing import CLOSE as END_OF_THOUGHT
from art_core.inference.reasoning_parsing import opened_by

CLIENT_CLOSED = 499
"""What nobody reads: the client has gone."""


def build_app(
    tokenizer: PreTrainedTokenizerBase,
    end_token_ids: frozenset[int],
    config: EngineConfig,
    versions: ServedVersions,
    scheduler: Scheduler,
    forms: Forms,
) -> FastAPI:
    """The application.

    Args:
        tokenizer: used by the server's thread only.
        end_token_ids: what ends a completion unless ``ignore_eos``.
        config: for its limits.
        versions: what ``model`` may name.
        scheduler: who decodes.
        forms: what is read out of texts.
    """
    api = _Api(tokenizer, end_token_ids, config, versions, scheduler, forms)
    app = FastAPI(title="art-langgraph embedded engine", openapi_url=None, docs_url=None, redoc_url=None)
    # Plain routes: requests are read by pydantic in one place, so that errors have OpenAI's format.
    app.add_route("/health", api.health, methods=["GET"])
    app.add_route("/v1/models", api.models, methods=["GET"])
    app.add_route("/v1/chat/completions", api.chat, methods=["POST"])
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(Exception, _fault)
    return app


def _json(body: Any, status: int = 200) -> Response:
    return Response(pydantic_core.to_json(body), status, media_type="application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    message = (
        f"{request.method} {request.url.path} is not served here; this engine has POST /v1/chat/completions, "
        "GET /v1/models and GET /health"
    )
    return _json(error_response(message, kind="invalid_request_error"), status)


async def _fault(request: Request, error: Exception) -> Response:
    message = f"the embedded engine failed: {type(error).__name__}: {error}"
    return _json(error_response(message, kind="server_error"), 500)


def _refuse(error: ArtError) -> Response:
    message = str(error)
    match error:
        case InvalidParameterError():
            body = error_response(message, kind="invalid_request_error", param=error.parameter)
            return _json(body, 400)
        case ChatTemplateError():
            return _json(error_response(message, kind="invalid_request_error", param="messages"), 400)
        case UnknownModelError():
            body = error_response(message, kind="not_found_error", param="model", code="model_not_found")
            return _json(body, 404)
        case _:
            return _json(error_response(message, kind="server_error"), 500)


class _Api:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: frozenset[int],
        config: EngineConfig,
        versions: ServedVersions,
        scheduler: Scheduler,
        forms: Forms,
    ) -> None:
        self._forms = forms
        self._spell = Speller(tokenizer)
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._config = config
        self._versions = versions
        self._scheduler = scheduler
        self._started = int(time.time())
        tags = () if forms.tools is None else forms.tools.tags
        self._tags_are_special = not set(tags).isdisjoint(tokenizer.all_special_tokens)

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def models(self, request: Request) -> Response:
        served = [version.name for version in self._versions.list()]
        names = [*served, self._versions.model] if served else []
        data = [{"id": n, "object": "model", "created": self._started, "owned_by": "art"} for n in names]
        return _json({"object": "list", "data": data})

    async def chat(self, request: Request) -> Response:
        try:
            wanted = parse_chat_request(await request.body())
            answer = self._begin(wanted)
        except ArtError as error:
            return _refuse(error)
        waiter = _Waiter(answer, self._scheduler, request.receive)
        return await (_stream(answer, waiter) if wanted.stream else _whole(answer, waiter))

    def _begin(self, wanted: ChatRequest) -> Answer:
        self._versions.resolve(wanted.model)  # refused before any work is done
        if wanted.top_logprobs and not wanted.logprobs:
            raise InvalidParameterError("top_logprobs needs logprobs=true", "top_logprobs")
        if wanted.stream_options is not None and not wanted.stream:
            raise InvalidParameterError("stream_options needs stream=true", "stream_options")
        use = tool_use(wanted, self._forms)
        text = render(self._tokenizer, wanted.messages, use.tools, wanted.chat_template_kwargs)
        forced = use.forced
        if forced and self._forms.reasoning and opened_by(text):
            forced = f"{END_OF_THOUGHT}\n\n{forced}"  # a call inside a thought is none
        prompt = encode(self._tokenizer, text)
        if forced:
            prompt += encode(self._tokenizer, forced)
        params = self._params(wanted, len(prompt), use.stop)
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        with self._versions.entering(wanted.model) as version:
            job = Job(
                version.name,
                prompt,
                params,
                n=wanted.n or 1,
                keep_special=use.tools is not None and self._tags_are_special,
                follow=bool(wanted.stream),
                notify=lambda: _notify(loop, changed),
            )
            self._scheduler.submit(job)
        return Answer(
            wanted,
            job,
            self._tokenizer,
            changed,
            spell=self._spell,
            parser=lambda: MessageParser(
                tools=None if use.tools is None else self._forms.tools,
                reasoning=self._forms.reasoning,
                prompt=text,
                single=use.single,
            ),
            forced=forced,
        )

    def _params(self, wanted: ChatRequest, prompt_tokens: int, tool_stop: tuple[str, ...]) -> SamplingParams:
        limit = self._config.max_model_len
        room = limit - prompt_tokens
        if room < 1:
            raise InvalidParameterError(
                f"the prompt has {prompt_tokens} tokens, but prompt and completion together must fit into "
                f"max_model_len={limit}; shorten the messages or raise EngineConfig.max_model_len",
                "messages",
            )
        asked = wanted.completion_limit
        if asked is not None and asked > room:
            raise InvalidParameterError(
                f"max_tokens={asked} after a prompt of {prompt_tokens} tokens exceeds max_model_len={limit}; "
                f"at most {room} tokens are left for the completion",
                "max_tokens" if wanted.max_completion_tokens is None else "max_completion_tokens",
            )
        given = frozenset(wanted.stop_token_ids or ())
        ends = given if wanted.ignore_eos else given | self._end_token_ids
        most = room if asked is None else asked
        return SamplingParams(
            max_tokens=most,
            temperature=1.0 if wanted.temperature is None else wanted.temperature,
            top_p=1.0 if wanted.top_p is None else wanted.top_p,
            top_k=max(0, wanted.top_k or 0),
            seed=wanted.seed,
            stop=(*wanted.stop, *tool_stop),
            stop_token_ids=ends,
            min_p=wanted.min_p or 0.0,
            shaping=self._shaping(wanted, ends, most),
            top_logprobs=wanted.top_logprobs or 0,
        )

    def _shaping(self, wanted: ChatRequest, ends: frozenset[int], most: int) -> Shaping:
        bias = wanted.logit_bias or {}
        if unknown := [token for token in bias if not 0 <= token < len(self._tokenizer)]:
            raise InvalidParameterError(
                f"logit_bias: {unknown[0]} is no token id; there are {len(self._tokenizer)}", "logit_bias"
            )
        if wanted.min_tokens is not None and wanted.min_tokens > most:
            raise InvalidParameterError(
                f"min_tokens={wanted.min_tokens} exceeds the most tokens that may be sampled, {most}",
                "min_tokens",
            )
        return Shaping(
            bias=bias,
            presence=wanted.presence_penalty or 0.0,
            frequency=wanted.frequency_penalty or 0.0,
            repetition=1.0 if wanted.repetition_penalty is None else wanted.repetition_penalty,
            min_tokens=wanted.min_tokens or 0,
            ends=ends,
        )


def _notify(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(changed.set)
    except RuntimeError:
        # The server's loop has ended, and with it everyone who could wait.
        return


class _Waiter:
    """Waits for a job's news, and cancels the job when its client leaves."""

    def __init__(self, answer: Answer, scheduler: Scheduler, receive: Receive) -> None:
        self._answer = answer
        self._scheduler = scheduler
        self._watch = asyncio.ensure_future(_disconnected(receive))
        self._watch.add_done_callback(lambda _: answer.changed.set())

    @property
    def gone(self) -> bool:
        return self._watch.done()

    async def news(self) -> None:
        await self._answer.changed.wait()
        self._answer.changed.clear()

    def end(self) -> None:
        self._watch.cancel()
        if not self._answer.job.done:
            self._scheduler.cancel(self._answer.job)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(answer: Answer, waiter: _Waiter) -> Response:
    try:
        while not answer.job.done and not waiter.gone:
            await waiter.news()
        if answer.job.error is not None:
            return _refuse(answer.job.error)
        return _json(answer.response()) if answer.job.done else Response(status_code=CLIENT_CLOSED)
    finally:
        waiter.end()


async def _stream(answer: Answer, waiter: _Waiter) -> Response:
    # The status line is sent with the first token: what fails before that fails as an HTTP error.
    handed_over = False
    try:
        while not answer.job.done and not waiter.gone and not any(o.sampled for o in answer.job.outputs):
            await waiter.news()
        if answer.job.error is not None:
            return _refuse(answer.job.error)
        handed_over = True
        return StreamingResponse(_events(answer, waiter), media_type="text/event-stream")
    finally:
        if not handed_over:
            waiter.end()


async def _events(answer: Answer, waiter: _Waiter) -> AsyncIterator[bytes]:
    stream = AnswerStream(answer)
    try:
        for chunk in stream.first():
            yield _event(chunk)
        while not waiter.gone:
            for chunk in stream.news():
                yield _event(chunk)
            if answer.job.error is not None:
                yield _event(error_response(str(answer.job.error), kind="server_error"))
                return
            if stream.finished:
                break
            await waiter.news()
        for chunk in stream.last():
            yield _event(chunk)
        yield b"data: [DONE]\n\n"
    finally:
        waiter.end()


def _event(body: Any) -> bytes:
    return b"data: " + pydantic_core.to_json(body) + b"\n\n"

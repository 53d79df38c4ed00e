"""The HTTP face: requests to jobs, outcomes to OpenAI's shapes.

Invariant: every request is answered, with a completion or with an error in OpenAI's format that says
what to change; a client that leaves frees its place.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pydantic_core
from fastapi import FastAPI, Request, Response
from transformers import PreTrainedTokenizerBase

from art_core.config import EngineConfig
from art_core.errors import ArtError, ChatTemplateError, EngineError
from art_core.inference.embedded.answer import Answer
from art_core.inference.embedded.job import Job
from art_core.inference.embedded.prompt import encode, render
from art_core.inference.embedded.sampling import SamplingParams
from art_core.inference.embedded.scheduler import Scheduler
from art_core.inference.embedded.versions import ServedVersions, UnknownModelError
from art_core.inference.openai_schema import (
    ChatRequest,
    InvalidParameterError,
    error_response,
    parse_chat_request,
)

CLIENT_CLOSED = 499
"""What nobody reads: the client has gone."""


def build_app(
    tokenizer: PreTrainedTokenizerBase,
    end_token_ids: frozenset[int],
    config: EngineConfig,
    versions: ServedVersions,
    scheduler: Scheduler,
) -> FastAPI:
    """The application.

    Args:
        tokenizer: used by the server's thread only.
        end_token_ids: what ends a completion unless ``ignore_eos``.
        config: for its limits.
        versions: what ``model`` may name.
        scheduler: who decodes.
    """
    api = _Api(tokenizer, end_token_ids, config, versions, scheduler)
    app = FastAPI(title="art-langgraph embedded engine", openapi_url=None, docs_url=None, redoc_url=None)
    # Plain routes: requests are read by pydantic in one place, so that errors have OpenAI's format.
    app.add_route("/health", api.health, methods=["GET"])
    app.add_route("/v1/models", api.models, methods=["GET"])
    app.add_route("/v1/chat/completions", api.chat, methods=["POST"])
    return app


def _json(body: Any, status: int = 200) -> Response:
    return Response(pydantic_core.to_json(body), status, media_type="application/json")


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
    ) -> None:
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._config = config
        self._versions = versions
        self._scheduler = scheduler
        self._started = int(time.time())
        self._count = 0

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
        return await _whole(answer, request.receive)

    def _begin(self, wanted: ChatRequest) -> Answer:
        version = self._versions.resolve(wanted.model)
        if wanted.tool_choice not in (None, "none", "auto"):
            raise InvalidParameterError(
                f"tool_choice={wanted.tool_choice!r} is not supported; use 'auto' or 'none'", "tool_choice"
            )
        if wanted.top_logprobs and not wanted.logprobs:
            raise InvalidParameterError("top_logprobs needs logprobs=true", "top_logprobs")
        tools = wanted.tools if wanted.tools and wanted.tool_choice != "none" else None
        text = render(self._tokenizer, wanted.messages, tools, wanted.chat_template_kwargs)
        prompt = encode(self._tokenizer, text)
        params = self._params(wanted, len(prompt))
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._count += 1
        job = Job(
            version.name,
            prompt,
            params,
            n=wanted.n or 1,
            notify=lambda: _notify(loop, changed),
        )
        self._scheduler.submit(job)
        return Answer(wanted, job, self._tokenizer, changed, parse_tools=tools is not None)

    def _params(self, wanted: ChatRequest, prompt_tokens: int) -> SamplingParams:
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
        ends = frozenset(wanted.stop_token_ids or ())
        return SamplingParams(
            max_tokens=room if asked is None else asked,
            temperature=1.0 if wanted.temperature is None else wanted.temperature,
            top_p=1.0 if wanted.top_p is None else wanted.top_p,
            top_k=max(0, wanted.top_k or 0),
            seed=wanted.seed,
            stop=wanted.stop,
            stop_token_ids=ends if wanted.ignore_eos else ends | self._end_token_ids,
            top_logprobs=wanted.top_logprobs or 0,
        )


def _notify(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(changed.set)
    except RuntimeError:
        # The server's loop has ended, and with it everyone who could wait.
        return


async def _whole(answer: Answer, receive: Callable[[], Awaitable[Any]]) -> Response:
    done = asyncio.ensure_future(answer.wait())
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            return Response(status_code=CLIENT_CLOSED)
        if answer.job.error is not None:
            error = answer.job.error
            return _refuse(error if isinstance(error, ArtError) else EngineError(str(error)))
        return _json(answer.response())
    finally:
        if not answer.job.done:
            answer.job.cancel()
        done.cancel()
        gone.cancel()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""Answers of the completion APIs as vLLM spells them: JSON, chunks of a stream, packed tokens."""

import asyncio
import base64
import json
import math
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fakes.replies import Reply, decode, deltas, logprob_entry, prompt_ids, wire_call


class CompletionWire:
    """Replies, with their tokens and logprobs settled, as bodies and chunks.

    Args:
        chunk_tokens: tokens in each chunk of a stream.
        chunk_delay: seconds between chunks.
        token_ids: whether ``return_token_ids`` is understood.
        logprobs: whether ``logprobs`` is understood.
        tempered_logprobs: whether the likeliest token's logprob depends on the temperature.
        usage: whether answers carry token counts.
        reasoning_field: ``reasoning_content`` or ``reasoning`` (vLLM's newer name).
        packed: whether tokens are packed for clients that read them so, as by the plugin of ours.
    """

    def __init__(
        self,
        *,
        chunk_tokens: int = 4,
        chunk_delay: float = 0.0,
        token_ids: bool = True,
        logprobs: bool = True,
        tempered_logprobs: bool = True,
        usage: bool = True,
        reasoning_field: str = "reasoning_content",
        packed: bool = False,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.chunk_delay = chunk_delay
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.tempered_logprobs = tempered_logprobs
        self.usage = usage
        self.reasoning_field = reasoning_field
        self.packed = packed
        self._released = threading.Event()
        self._released.set()
        self._ids = 0

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, requests come in and no answer ends: of a stream only the first text is sent.

        So a test can look at what goes on meanwhile, on a machine of any speed.
        """
        self._released.clear()
        try:
            yield
        finally:
            self._released.set()

    async def _let_go(self) -> None:
        while not self._released.is_set():
            await asyncio.sleep(0.005)

    def _message(self, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None, "tool_calls": []}
        if reply.reasoning is not None:
            message[self.reasoning_field] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [wire_call(c, i) for i, c in enumerate(reply.tool_calls)]
        elif not reply.text:
            message["content"] = ""
        return message

    def _logprobs_json(
        self, request: Mapping[str, Any], reply: Reply, start: int = 0, end: int | None = None
    ) -> str:
        pairs = zip((reply.tokens or ())[start:end], (reply.logprobs or ())[start:end], strict=False)
        likeliest = None
        if request.get("top_logprobs"):
            likeliest = -0.5 * (request.get("temperature", 1) if self.tempered_logprobs else 1)
        count = int(request.get("top_logprobs") or 0)
        return '{"content": [' + ", ".join(logprob_entry(t, p, likeliest, count) for t, p in pairs) + "]}"

    def _packs(self, request: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
        asked = request.get("return_token_ids") and request.get("logprobs")
        return bool(self.packed and asked and headers.get("x-art-tokens") == "packed")

    def _packed(self, prompt: Sequence[int], choices: Sequence[Reply]) -> dict[str, Any]:
        def numbers(kind: str, values: Sequence[Any]) -> str:
            return base64.b64encode(struct.pack(f"<{len(values)}{kind}", *values)).decode()

        tokens = [
            {
                "index": index,
                "ids": numbers("i", reply.tokens or ()),
                "logprobs": numbers("f", [math.nan if p is None else p for p in reply.logprobs or ()]),
            }
            for index, reply in enumerate(choices)
        ]
        return {"prompt": numbers("i", prompt), "choices": tokens}

    def _usage(self, prompt: Sequence[int], choices: Sequence[Reply]) -> dict[str, int]:
        sampled = sum(len(c.tokens or ()) for c in choices)
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": sampled,
            "total_tokens": len(prompt) + sampled,
        }

    def _head(self, request: Mapping[str, Any], kind: str) -> dict[str, Any]:
        self._ids += 1
        return {
            "id": f"chatcmpl-{self._ids}",
            "object": kind,
            "created": int(time.time()),
            "model": request.get("model"),
        }

    def _chat(self, request: dict[str, Any], choices: Sequence[Reply], *, packs: bool = False) -> bytes:
        prompt = prompt_ids(request)
        if packs:
            request = {**request, "return_token_ids": None, "logprobs": None}
        wants_ids = self.token_ids and request.get("return_token_ids")
        wants_logprobs = self.logprobs and request.get("logprobs")
        parts: list[str] = []
        for index, reply in enumerate(choices):
            choice: dict[str, Any] = {
                "index": index,
                "message": self._message(reply),
                "finish_reason": reply.finish_reason,
                "stop_reason": None,
            }
            if wants_ids:
                choice["token_ids"] = reply.tokens
            logprobs = self._logprobs_json(request, reply) if wants_logprobs else "null"
            parts.append(f'{json.dumps(choice)[:-1]}, "logprobs": {logprobs}}}')
        body = self._head(request, "chat.completion")
        if self.usage:
            body["usage"] = self._usage(prompt, choices)
        if wants_ids:
            body["prompt_token_ids"] = prompt
        if packs:
            body["art_tokens"] = self._packed(prompt, choices)
        return f'{json.dumps(body)[:-1]}, "choices": [{", ".join(parts)}]}}'.encode()

    def _text(self, request: dict[str, Any], choices: Sequence[Reply]) -> bytes:
        prompt = prompt_ids(request)
        body = self._head(request, "text_completion")
        body["choices"] = []
        for index, reply in enumerate(choices):
            choice: dict[str, Any] = {
                "index": index,
                "text": reply.rendered,
                "finish_reason": reply.finish_reason,
                "logprobs": None,
            }
            if self.token_ids and request.get("return_token_ids"):
                choice |= {"token_ids": reply.tokens, "prompt_token_ids": prompt}
            if self.logprobs and request.get("logprobs") is not None:
                choice["logprobs"] = {
                    "tokens": [decode((t,)) for t in reply.tokens or ()],
                    "token_logprobs": reply.logprobs,
                    "top_logprobs": None,
                    "text_offset": list(range(len(reply.tokens or ()))),
                }
            body["choices"].append(choice)
        if self.usage:
            body["usage"] = self._usage(prompt, choices)
        return json.dumps(body).encode()

    async def _chat_stream(
        self, request: dict[str, Any], choices: Sequence[Reply], *, packs: bool = False
    ) -> AsyncIterator[bytes]:
        prompt = prompt_ids(request)
        if packs:
            request = {**request, "return_token_ids": None, "logprobs": None}
        head = self._head(request, "chat.completion.chunk")
        wants_ids = self.token_ids and request.get("return_token_ids")
        wants_logprobs = self.logprobs and request.get("logprobs")

        def chunk(index: int, delta: dict[str, Any], finish: str | None, extra: str, **top: Any) -> bytes:
            choice = {"index": index, "delta": delta, "finish_reason": finish}
            body = {**head, **top}
            choices_json = f"[{json.dumps(choice)[:-1]}{extra}}}]"
            return f'data: {json.dumps(body)[:-1]}, "choices": {choices_json}}}\n\n'.encode()

        top = {"prompt_token_ids": prompt} if wants_ids else {}
        for index in range(len(choices)):
            yield chunk(index, {"role": "assistant", "content": ""}, None, ', "logprobs": null', **top)
        for index, reply in enumerate(choices):
            ids = reply.tokens or ()
            pieces = deltas(reply, self.chunk_tokens, self.reasoning_field)
            for position, (start, end, delta) in enumerate(pieces):
                last = position == len(pieces) - 1
                if packs and not (delta or last):
                    continue  # such chunks are sent for their tokens alone
                extra = f', "token_ids": {json.dumps(ids[start:end])}' if wants_ids else ""
                logprobs = self._logprobs_json(request, reply, start, end) if wants_logprobs else "null"
                extra += f', "logprobs": {logprobs}'
                if self.chunk_delay:
                    await asyncio.sleep(self.chunk_delay)
                if position:
                    await self._let_go()
                yield chunk(index, delta, reply.finish_reason if last else None, extra)
        if self.usage and (request.get("stream_options") or {}).get("include_usage"):
            body = {**head, "choices": [], "usage": self._usage(prompt, choices)}
            yield f"data: {json.dumps(body)}\n\n".encode()
        if packs:
            body = {"object": head["object"], "choices": [], "art_tokens": self._packed(prompt, choices)}
            yield f"data: {json.dumps(body)}\n\n".encode()
        yield b"data: [DONE]\n\n"


def error_body(message: str) -> bytes:
    """An error as OpenAI's API spells it."""
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": None}}).encode()

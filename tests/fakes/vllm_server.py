"""A vLLM server without a model: real HTTP on loopback, scripted answers, exact token ids, faults on demand.

Answers and their token ids are those of `replies`; `scripted_model` says them, `vllm_wire` spells them,
`vllm_faults` breaks them, and `loopback_server` carries them.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fakes.loopback_server import LoopbackServer, send, send_stream
from fakes.replies import (
    END,
    GENERATE,
    Reply,
    Script,
    Scripted,
    ToolCall,
    completion_ids,
    decode,
    encode,
    logprob,
    prompt_ids,
    prompt_text,
)
from fakes.scripted_model import ScriptedModel
from fakes.vllm_faults import FAULTS, Faults, do_fault
from fakes.vllm_wire import CompletionWire, error_body

__all__ = [
    "END",
    "FAULTS",
    "GENERATE",
    "FakeVLLM",
    "Reply",
    "ToolCall",
    "completion_ids",
    "decode",
    "encode",
    "logprob",
    "prompt_ids",
    "prompt_text",
]


@dataclass(frozen=True, slots=True)
class Answered:
    """One request as the server received it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    at: float


class FakeVLLM(CompletionWire, LoopbackServer):
    """The server; a context manager.

    Args:
        reply: what the model says, see `ScriptedModel`; when a list is at its end, the answer is 500.
        models: names served; None: any name, as ``name@n`` with adapters loaded.
        latency: seconds before each answer.
        null_logprobs: positions whose logprob is sent as null.
        nan_logprobs: positions whose logprob is sent as NaN.
        port: to listen on, shared with others that allow it, as vLLM does; 0 for any free one.
        wire: how answers are spelled, see `CompletionWire`.
    """

    def __init__(
        self,
        reply: Scripted | Script | None = None,
        *,
        models: Sequence[str] | None = None,
        latency: float = 0.0,
        null_logprobs: Sequence[int] = (),
        nan_logprobs: Sequence[int] = (),
        port: int = 0,
        **wire: Any,
    ) -> None:
        CompletionWire.__init__(self, **wire)
        LoopbackServer.__init__(self, port)
        self.models = models
        self.latency = latency
        self.requests: list[Answered] = []
        self.faults: Counter[str] = Counter()
        self._model = ScriptedModel("ok" if reply is None else reply, null_logprobs, nan_logprobs)
        self._failing: Faults | None = None

    # -- what tests use ----------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        """Ending in ``/v1``."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The bodies of the completion requests received, in order of arrival."""
        return [r.body for r in self.requests if r.path.endswith("completions")]

    def script(self, reply: Scripted | Script) -> None:
        """Answer like this from now on."""
        self._model.script(reply)

    def fail(
        self, rate: float, kinds: Sequence[str] = FAULTS, seed: int = 0, *, times: int | None = None
    ) -> None:
        """Fail this share of the completion requests from now on; 0 stops it. Counted in ``faults``.

        ``times`` stops it after so many failures.
        """
        unknown = set(kinds) - set(FAULTS)
        if unknown:
            raise ValueError(f"no such faults: {sorted(unknown)}; known: {FAULTS}")
        self._failing = Faults(rate, tuple(kinds), random.Random(seed), times) if rate else None

    # -- what is answered --------------------------------------------------------------------------

    async def _respond(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        raw: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if not path.endswith("completions"):
            send(writer, *self._plain(method, path, raw))
            return
        try:
            body: dict[str, Any] = json.loads(raw)
        except ValueError:
            send(writer, 400, error_body("the body is not JSON"))
            return
        self.requests.append(Answered(path, body, headers, time.time()))
        fault = self._failing.draw() if self._failing else None
        if fault == "cut_stream" and not body.get("stream"):
            fault = "drop"
        if fault:
            self.faults[fault] += 1
            if await do_fault(fault, reader, writer, streaming=bool(body.get("stream"))):
                return
        if self.models is not None and body.get("model") not in self.models:
            send(writer, 404, error_body(f"The model `{body.get('model')}` does not exist."))
            return
        try:
            choices = self._model.choices(body)
        except LookupError as exhausted:
            send(writer, 500, error_body(str(exhausted)))
            return
        wait = self.latency + max(c.delay for c in choices)
        if wait:
            await asyncio.sleep(wait)
        if not body.get("stream"):
            await self._let_go()
        packs = self._packs(body, headers)
        if not path.endswith("/chat/completions"):
            send(writer, 200, self._text(body, choices))
        elif body.get("stream"):
            await send_stream(
                writer, self._chat_stream(body, choices, packs=packs), cut=fault == "cut_stream"
            )
        else:
            send(writer, 200, self._chat(body, choices, packs=packs))

    def _plain(self, method: str, path: str, raw: bytes) -> tuple[int, bytes]:
        if path == "/health":
            return 200, b""
        if path == "/art/tokens" and self.packed:
            return 200, b'{"encoding": "packed", "detail": ""}'
        if path == "/v1/models":
            names = self.models or ()
            return 200, json.dumps(
                {"object": "list", "data": [{"id": n, "object": "model"} for n in names]}
            ).encode()
        return 404, error_body(f"no such route: {method} {path}")

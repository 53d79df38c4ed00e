"""One call of a policy as it passes through HTTP: what was asked, and what the server really said.

Invariant: the client is answered as it would be without capture; an `Exchange` holds the whole answer, also
where the client then cannot read it (an answer that does not parse was still sampled).
"""

import json
import time
import weakref
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast

from art_core.capture import Asked, read_completion, request_extras, says_nothing, strip, usage_of
from art_core.errors import CaptureError
from art_core.fast_json import read_json
from art_core.inference.availability import ALWAYS, Availability
from art_core.packed import HEADER as TOKENS_HEADER
from art_core.packed import PACKED
from art_core.recording import new_id
from art_core.sdk_http import httpx
from art_core.streaming import DONE, Body, EventDecoder, StreamAssembler, brings_token, shown

HEADER = "x-art-exchange"
_HEADER_BYTES = HEADER.encode()
_PACKED_HEADER = (TOKENS_HEADER.encode(), PACKED.encode())

UNFINISHED = "the stream ended before the completion did"
"""The problem of a stream that was cut, or that its reader left."""

_under_way: "weakref.WeakValueDictionary[str, Exchange]" = weakref.WeakValueDictionary()


def exchange_of(request: httpx.Request) -> "Exchange | None":
    """The exchange that a request belongs to."""
    return _under_way.get(request.headers.get(HEADER, ""))


@lru_cache(maxsize=64)
def _url(base_url: str, path: str) -> httpx.URL:
    """Where a request goes that was made for ``path`` (up to ``/v1`` of a base URL that may be outdated)."""
    return httpx.URL(base_url + path[path.index("/v1") + 3 :])


# Made once: `json.dumps` would make an encoder at every call that is not at its defaults.
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_ASCII_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _compact(value: Any) -> bytes:
    try:
        return _ENCODER.encode(value).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as a model may well sample: escape instead
        return _ASCII_ENCODER.encode(value).encode()


class Exchange:
    """One call on its way: where it goes, what was asked, and what came.

    Args:
        base_url: where the policy answers now, ending in ``/v1``.
        model: the name to send; None: the one that the request has.
        api_key: sent as the bearer token; None: what the request has.
        server: says whether the server can be asked now, and again after a failure.

    Attributes:
        request: the JSON body as the client meant it, under the name that was sent; None until it was.
        answer: what the server said, whole; None until then.
        problem: why there is no answer, as far as HTTP can tell.
        attempts: requests sent; more than one when the SDK retried, or the server was restarted.
        ended_at: `time.perf_counter` when the answer's last byte came.
        first_token_at: `time.perf_counter` when a stream's first token came; None where none did.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        server: Availability = ALWAYS,
    ) -> None:
        self.id = new_id("x")
        self.server = server
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.api_key = api_key
        self.request: Body | None = None
        self.answer: Body | None = None
        self.problem: str | None = None
        self.attempts = 0
        self.ended_at: float | None = None
        self.first_token_at: float | None = None
        self._asked = Asked()
        _under_way[self.id] = self

    @property
    def headers(self) -> dict[str, str]:
        """What binds a request to this exchange."""
        return {HEADER: self.id}

    # -- the request -------------------------------------------------------------------------------

    def prepare(self, request: httpx.Request, body: bytes) -> None:
        """Make the request what is to go out."""
        self.attempts += 1
        self.answer = self.problem = self.first_token_at = None
        asked: dict[str, Any] = json.loads(body)
        if self.model is not None:
            asked["model"] = self.model
        self.request, self._asked = asked, Asked.of(asked)
        content = _compact({**asked, **request_extras(asked)})
        request.url = url = _url(self.base_url, request.url.path)
        request.stream = httpx.ByteStream(content)
        ours = [(b"Host", url.netloc), (b"Content-Length", b"%d" % len(content))]
        replaced = {_HEADER_BYTES, _PACKED_HEADER[0], b"host", b"content-length"}
        if self._asked.may_be_packed:
            ours.append(_PACKED_HEADER)
        if self.api_key is not None:
            ours.append((b"Authorization", f"Bearer {self.api_key}".encode()))
            replaced.add(b"authorization")
        kept = [header for header in request.headers.raw if header[0].lower() not in replaced]
        request.headers = httpx.Headers(ours + kept)
        # Waiting for a connection is back-pressure, not a fault.
        timeout = request.extensions.get("timeout")
        if timeout:
            request.extensions = {**request.extensions, "timeout": {**timeout, "pool": None}}

    @staticmethod
    def suspicious(status: int) -> bool:
        """Whether a server that dies, or has lost a version, may answer like this."""
        return status >= 500 or status == 404

    @staticmethod
    def dropped(failed: Exception) -> bool:
        """Whether a connection was refused or broke, and no time ran out."""
        return isinstance(failed, httpx.TransportError) and not isinstance(failed, httpx.TimeoutException)

    # -- the answer --------------------------------------------------------------------------------

    def time_to_first_token(self, since: float) -> float | None:
        """Seconds from a moment of `time.perf_counter` until a stream's first token; None where none came."""
        return None if self.first_token_at is None else self.first_token_at - since

    def keep(self, status: int, raw: bytes) -> bytes:
        """Keep an answer that came whole; returns it as the client asked for it."""
        self.ended_at = time.perf_counter()
        if status != 200:
            self.problem = f"HTTP {status}: {raw[:500].decode(errors='replace')}"
            return raw
        try:
            body: Any = read_json(raw)
        except ValueError:
            self.problem = f"the server's answer is not JSON: {shown(raw.decode(errors='replace'))}"
            return raw
        if not isinstance(body, dict):
            self.problem = f"the server's answer is no JSON object: {shown(body)}"
            return raw
        self.answer = body = cast(dict[str, Any], body)
        if not body.get("usage"):
            with suppress(CaptureError):  # said again, and recorded, when the answer is read
                body = {**body, "usage": usage_of(body, read_completion(body)) or None}
        return _compact(strip(body, self._asked))

    def streaming(self) -> "StreamKeeper":
        """Keeps an answer that comes in chunks."""
        return StreamKeeper(self, self._asked)

    def fail(self, error: BaseException) -> None:
        """The transport raised."""
        self.ended_at = time.perf_counter()
        self.problem = f"{type(error).__name__}: {error}".removesuffix(": ")


class StreamKeeper:
    """Reads the events of one stream on their way to the client."""

    def __init__(self, exchange: Exchange, asked: Asked) -> None:
        self._exchange = exchange
        self._asked = asked
        self._events = EventDecoder()
        self._assembler = StreamAssembler()
        self._usage = False

    def take(self, piece: bytes) -> bytes:
        """Some bytes of the stream; returns what the client is to see of them."""
        return b"".join([self._pass(event) for event in self._events.feed(piece)])

    def end(self) -> bytes:
        """The stream has ended, or was closed by its reader."""
        rest = b"".join([self._pass(event) for event in self._events.close()])
        self._settle()
        return rest

    def broke(self, error: BaseException) -> None:
        """The connection broke."""
        if not self._assembler.complete:
            self._exchange.fail(error)
        self._settle()

    def _settle(self) -> None:
        exchange = self._exchange
        if exchange.problem is None and exchange.answer is None:
            exchange.ended_at = time.perf_counter()
            if self._assembler.complete:
                exchange.answer = self._assembler.body()
            else:
                exchange.problem = UNFINISHED

    def _pass(self, event: bytes) -> bytes:
        if event == DONE:
            return self._missing_usage() + b"data: [DONE]\n\n"
        try:
            chunk: Any = read_json(event)
            self._assembler.feed(chunk)
        except (ValueError, CaptureError) as unreadable:
            reason = unreadable if isinstance(unreadable, CaptureError) else f"not JSON: {event[:200]!r}"
            self._exchange.problem = f"the stream cannot be read: {reason}"
            return b"data: %b\n\n" % event
        if self._exchange.first_token_at is None and brings_token(chunk):
            self._exchange.first_token_at = time.perf_counter()
        self._usage = self._usage or bool(chunk.get("usage"))
        seen = strip(chunk, self._asked)
        if says_nothing(seen):
            return b""
        return b"data: %b\n\n" % _compact(seen)

    def _missing_usage(self) -> bytes:
        """The chunk with token counts that was asked for and did not come, counted from the ids."""
        if self._usage or not self._asked.usage or not self._assembler.complete:
            return b""
        body = self._assembler.body()
        usage = usage_of(body, read_completion(body))
        if not usage:
            return b""
        chunk = {k: body[k] for k in ("id", "created", "model") if k in body}
        chunk |= {"object": "chat.completion.chunk", "choices": [], "usage": usage}
        return b"data: %b\n\n" % _compact(chunk)

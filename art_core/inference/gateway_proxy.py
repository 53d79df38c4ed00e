"""One call on its way through the gateway: client -> policy server -> client.

Invariant: the client sees what it would see without a gateway, plus a key in ``system_fingerprint``; the
log sees on top what the server was asked for (token ids, logprobs), before the client has the last byte.

The answer is stripped of what the client did not ask for and handed on: at once when whole, event by event
when streamed. Reading from the server and writing to the client are separate, so that a slow client holds
neither a connection to the server nor a lease on a version.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from art_core.capture import Asked, StreamAssembler, request_extras, says_nothing, strip
from art_core.errors import CaptureError
from art_core.inference.endpoint import raw_logprobs_of
from art_core.inference.gateway_call import GatewayCall, last_usage, read_object, read_request, to_json
from art_core.inference.gateway_log import CLIENT_GONE as CLIENT_GONE
from art_core.inference.gateway_log import Completion, CompletionLog
from art_core.inference.gateway_metrics import GatewayMetrics, token_counts
from art_core.inference.gateway_reply import raw_headers, send_refusal, send_whole, write_stream
from art_core.inference.gateway_routing import routing_key
from art_core.inference.gateway_stream import DONE, EventSplitter, as_event, event_data
from art_core.inference.gateway_transport import ServerAnswer
from art_core.inference.gateway_upstream import RefusalError, Upstream, forwarded
from art_core.packed import HEADER as TOKENS_HEADER
from art_core.packed import PACKED
from art_core.plain_http import HttpError
from art_core.recording import ROLLOUT_HEADER
from art_core.streaming import brings_token

logger = logging.getLogger(__name__)

KEY_HEADER = "x-art-completion"
"""Response header with the key that ``system_fingerprint`` holds."""

POLICY_HEADER = "x-art-policy"
"""Response header with the version that answered."""

REPLICA_HEADER = "x-art-replica"
"""Response header with the replica that answered."""

LAST_BYTES = 65536
"""How much of the end of a stream is looked at for its token counts, where nothing else of it is."""

FINISH_SECONDS = 30.0
"""How long a structured stream is read to its end for the record after its client has left."""

Keep = Callable[[Completion], Awaitable[str]]
"""Records a completion into a rollout, whose id it returns."""


class Proxy:
    """Serves completion requests.

    Args:
        upstream: who answers them.
        log: keeps each completion.
        metrics: counts them.
    """

    def __init__(self, upstream: Upstream, log: CompletionLog, metrics: GatewayMetrics) -> None:
        self._upstream = upstream
        self._log = log
        self._metrics = metrics

    async def serve(
        self,
        path: str,
        scope: Scope,
        receive: Receive,
        send: Send,
        keep: Keep | None = None,
        rollout_id: str | None = None,
    ) -> None:
        """Serve one request (the rest is ASGI's); a client that goes away cancels the call upstream.

        Args:
            path: ``/chat/completions`` or ``/completions``.
            scope: of the request.
            receive: its body comes from here.
            send: the answer goes here.
            keep: where the completion goes in place of the log.
            rollout_id: the rollout that it is part of, where that is known; its calls go to one replica.
        """
        raw = await _body(receive)
        if raw is None:
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        try:
            exchange = _Exchange(self, path, raw, headers, send, keep, rollout_id)
        except RefusalError as refusal:
            await send_refusal(send, refusal)
            return
        loop, work = asyncio.get_running_loop(), asyncio.current_task()
        assert work is not None
        late: list[asyncio.TimerHandle] = []

        def leave(_: "asyncio.Future[None]") -> None:
            late.append(loop.call_later(FINISH_SECONDS if exchange.structured else 0, work.cancel))

        gone = asyncio.ensure_future(_gone(receive))
        gone.add_done_callback(leave)
        try:
            await exchange.run()
        except asyncio.CancelledError:
            if not late:
                raise  # not the client left: the gateway is being closed
            work.uncancel()
        finally:
            gone.remove_done_callback(leave)
            gone.cancel()
            for timer in late:
                timer.cancel()

    @property
    def upstream(self) -> Upstream:
        """Who answers."""
        return self._upstream

    @property
    def log(self) -> CompletionLog:
        """What was answered."""
        return self._log

    @property
    def metrics(self) -> GatewayMetrics:
        """What was counted."""
        return self._metrics


class _Exchange:
    """One request and its answer."""

    def __init__(
        self,
        proxy: Proxy,
        path: str,
        raw: bytes,
        headers: Mapping[str, str],
        send: Send,
        keep: Keep | None,
        rollout_id: str | None,
    ) -> None:
        self._proxy = proxy
        self._headers = headers
        self._send = send
        self._keep = keep
        self._call = GatewayCall(proxy.log.new_key(), path, raw, read_request(raw))
        self._asked = Asked.of(self._call.body, packed=headers.get(TOKENS_HEADER) == PACKED)
        self._kept = False
        self._recorded_by_client = headers.get(ROLLOUT_HEADER)
        self._rollout_id = rollout_id or self._recorded_by_client

    @property
    def structured(self) -> bool:
        """Whether this is a stream that OpenAI's client parses while it comes.

        It leaves such a stream at the first character that does not parse. The rest is read all the same:
        a whole completion that breaks the schema is a good negative sample.
        """
        wanted: Any = self._call.body.get("response_format")
        return self._asked.stream and isinstance(wanted, dict) and not self._transparent

    async def run(self) -> None:
        try:
            finish = await self._forward()
        except RefusalError as refusal:
            self._call.status = self._call.status or refusal.status
            await self._keep_completion(b"", str(refusal))
            await send_refusal(self._send, refusal)
            return
        except asyncio.CancelledError:
            if not self._kept:
                await self._keep_completion(b"", CLIENT_GONE)
            raise
        await finish()

    async def _forward(self) -> Callable[[], Awaitable[None]]:
        """Get the answer; what it returns ends the response once lease and connection are free again."""
        call, upstream = self._call, self._proxy.upstream
        with upstream.route(call.body.get("model")) as (name, call.policy):
            call.raw_logprobs = call.policy is not None and raw_logprobs_of(upstream.endpoint)
            wire = call.body | request_extras(call.body)
            if "model" in wire:
                wire["model"] = name
            content = to_json(wire)
            headers = self._headers
            if self._asked.may_be_packed and not self._asked.packed:
                headers = {**headers, TOKENS_HEADER: PACKED}
            async with upstream.post(
                call.path, content, headers, version=call.policy, key=self._routing_key
            ) as (response, replica):
                call.status, call.replica = response.status, replica.name
                kind = response.headers.get("content-type", "")
                if response.status == 200 and kind.startswith("text/event-stream"):
                    return await self._streamed(response)
                return await self._whole(response)

    def _routing_key(self) -> str:
        return self._rollout_id or routing_key(self._call.body)

    # -- whole answers -----------------------------------------------------------------------------

    @property
    def _transparent(self) -> bool:
        """Whether the client records the call, and has asked for all that we would: it gets what came."""
        return (
            self._keep is None
            and self._recorded_by_client is not None
            and self._asked.logprobs
            and self._asked.token_ids
        )

    async def _whole(self, response: ServerAnswer) -> Callable[[], Awaitable[None]]:
        try:
            raw = await response.read()
        except HttpError as cut:
            raise RefusalError(502, f"the server broke off its answer ({cut})", "upstream_error") from cut
        self._call.mark_first_byte()
        shown, error = raw, None
        if response.status != 200:
            error = f"HTTP {response.status}: {raw[:500].decode(errors='replace')}"
        else:
            try:
                body = read_object(raw)
            except ValueError:
                error = f"the server's answer is not a JSON object: {raw[:200].decode(errors='replace')}"
            else:
                self._call.usage = token_counts(body)
                shown = raw if self._transparent else self._shown(body)
        await self._keep_completion(raw, error)
        headers = self._response_headers(response)
        return lambda: send_whole(self._send, response.status, shown, headers)

    def _shown(self, body: dict[str, Any]) -> bytes:
        shown = strip(body, self._asked)
        shown["system_fingerprint"] = self._call.key
        return to_json(shown)

    # -- streams -----------------------------------------------------------------------------------

    async def _streamed(self, response: ServerAnswer) -> Callable[[], Awaitable[None]]:
        outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        pump = self._pass_on if self._transparent else self._pump
        head = {
            "type": "http.response.start",
            "status": 200,
            "headers": raw_headers(self._response_headers(response)),
        }
        writing = asyncio.ensure_future(write_stream(self._send, head, outbox))
        try:
            whole = await pump(response, outbox)
        except BaseException:
            writing.cancel()
            raise
        outbox.put_nowait(None)

        async def finish() -> None:
            try:
                await writing
            finally:
                writing.cancel()
            if whole:
                await self._send({"type": "http.response.body", "body": b""})
            # Otherwise the response ends without its end: the client's connection is cut like ours was.

        return finish

    async def _pump(self, response: ServerAnswer, outbox: "asyncio.Queue[bytes | None]") -> bool:
        """Move events from the server to the outbox; False when the server cut the stream."""
        splitter, assembler = EventSplitter(), StreamAssembler()
        problems: list[str] = []
        try:
            async for data in response.pieces():
                self._call.mark_first_byte()
                for event in splitter.feed(data):
                    shown = await self._event(event, assembler, problems)
                    if shown is not None:
                        outbox.put_nowait(shown)
        except HttpError as cut:
            problems.append(f"the server cut the stream ({cut})")
            return False
        except asyncio.CancelledError:
            if not assembler.complete:
                problems.append(CLIENT_GONE)
            raise
        finally:
            if splitter.rest:
                outbox.put_nowait(splitter.rest)
            if not self._kept:
                await self._keep_stream(assembler, problems)
        return True

    async def _pass_on(self, response: ServerAnswer, outbox: "asyncio.Queue[bytes | None]") -> bool:
        """Move bytes as they come, for a client that reads and records all of them itself."""
        last, problem = b"", "the stream ended before its end"
        try:
            async for data in response.pieces():
                self._call.mark_first_byte()
                outbox.put_nowait(data)
                last = (last + data)[-LAST_BYTES:]
        except HttpError as cut:
            problem = f"the server cut the stream ({cut})"
            return False
        except asyncio.CancelledError:
            problem = CLIENT_GONE
            raise
        finally:
            events = [data for event in EventSplitter().feed(last) if (data := event_data(event))]
            if whole := events[-1:] == [DONE]:
                self._call.usage = last_usage(events)
            await self._keep_completion(b"", None if whole else problem)
        return True

    async def _event(self, event: bytes, assembler: StreamAssembler, problems: list[str]) -> bytes | None:
        data = event_data(event)
        if data is None:
            return event
        if data == DONE:
            await self._keep_stream(assembler, problems)
            return event
        try:
            chunk = read_object(data)
        except ValueError:
            problems.append(
                f"an event of the stream is not a JSON object: {data[:200].decode(errors='replace')}"
            )
            return event
        try:
            assembler.feed(chunk)
        except CaptureError as broken:
            problems.append(str(broken))
            return event
        if self._call.time_to_first_token is None and brings_token(chunk):
            self._call.mark_first_token()
        shown = strip(chunk, self._asked)
        if not self._asked.token_ids and says_nothing(shown):
            return None
        shown["system_fingerprint"] = self._call.key
        return as_event(to_json(shown))

    async def _keep_stream(self, assembler: StreamAssembler, problems: list[str]) -> None:
        body = assembler.body()
        self._call.usage = token_counts(body)
        if not problems and not assembler.complete:
            problems.append("the stream ended before every choice had its finish_reason")
        await self._keep_completion(json.dumps(body).encode(), "; ".join(problems) or None)

    # -- both --------------------------------------------------------------------------------------

    async def _keep_completion(self, response: bytes, error: str | None) -> None:
        self._kept = True
        completion = self._call.completed(response, error)
        self._proxy.metrics.finished(completion, self._call.replica, self._call.usage, self._asked.stream)
        if self._keep is not None:
            self._proxy.log.recorded(completion.key, await self._keep(completion))
        elif self._recorded_by_client is not None:
            self._proxy.log.recorded(completion.key, self._recorded_by_client)
        else:
            self._proxy.log.put(completion)

    def _response_headers(self, response: ServerAnswer) -> dict[str, str]:
        headers = {**forwarded(response.headers), KEY_HEADER: self._call.key}
        if self._call.policy is not None:
            headers[POLICY_HEADER] = self._call.policy.name
        if self._call.replica is not None:
            headers[REPLICA_HEADER] = self._call.replica
        return headers


async def _body(receive: Receive) -> bytes | None:
    """The whole request; None when its client left before it was there."""
    pieces: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)
    return None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

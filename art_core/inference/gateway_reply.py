"""What a gateway sends to its client: whole answers, streams as they come, refusals.

Invariant: what came from the server together goes out in one write; a stream's head waits for its first
chunk, but not for long.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from starlette.types import Message, Send

from art_core.inference.gateway_upstream import RefusalError

HEAD_SECONDS = 0.005
"""How long the head of a stream waits for its first chunk."""


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI wants them."""
    return [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]


async def write_stream(send: Send, head: Message, outbox: "asyncio.Queue[bytes | None]") -> None:
    """Send a stream: its head, then what comes through the outbox, until None does."""
    chunks: list[bytes | None] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(HEAD_SECONDS):  # head and first chunk in one write, if they come together
            chunks.append(await outbox.get())
    await send(head)
    while True:
        if not chunks:
            chunks.append(await outbox.get())
        while not outbox.empty():  # what came in one read goes out in one write
            chunks.append(outbox.get_nowait())
        if body := b"".join(chunk for chunk in chunks if chunk is not None):
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if chunks[-1] is None:
            return
        chunks.clear()


async def send_whole(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a response that is all there."""
    full = {"content-type": "application/json", **headers, "content-length": str(len(body))}
    await send({"type": "http.response.start", "status": status, "headers": raw_headers(full)})
    await send({"type": "http.response.body", "body": body})


async def send_refusal(send: Send, refusal: RefusalError) -> None:
    """Send the gateway's own answer."""
    await send_whole(send, refusal.status, refusal.body, refusal.headers)

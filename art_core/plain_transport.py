"""`art_core.plain_http` as a transport of httpx: what OpenAI's SDK sends to ``http://`` goes the short way.

Invariant: whoever uses it sees responses and errors of httpx, as from httpx's own transport.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing

from art_core.plain_http import Answer, HttpError, HttpPool, request_bytes
from art_core.sdk_http import httpx

_ERRORS: dict[str, type[httpx.TransportError]] = {
    "connect": httpx.ConnectError,
    "connect_timeout": httpx.ConnectTimeout,
    "read": httpx.RemoteProtocolError,
    "read_timeout": httpx.ReadTimeout,
}


class PlainTransport(httpx.AsyncBaseTransport):
    """Sends what needs no TLS by itself. Belongs to one event loop.

    Args:
        others: what sends the rest.
    """

    def __init__(self, others: httpx.AsyncBaseTransport) -> None:
        self._others = others
        self._pool = HttpPool()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request."""
        url, content = request.url, request.stream
        if url.scheme != "http" or not isinstance(content, httpx.ByteStream):
            return await self._others.handle_async_request(request)
        wire = request_bytes(request.method, url.raw_path, request.headers.raw, b"".join(content))
        timeouts = request.extensions.get("timeout", {})
        try:
            answer = await self._pool.send(
                (url.host, url.port or 80),
                wire,
                connect_timeout=timeouts.get("connect"),
                read_timeout=timeouts.get("read"),
            )
            if "event-stream" in answer.header(b"content-type"):
                return httpx.Response(answer.status, headers=answer.headers, stream=_Body(answer, request))
            body = await answer.read()
        except HttpError as error:
            raise _as_httpx(error, request) from error
        return httpx.Response(answer.status, headers=answer.headers, content=body)

    async def aclose(self) -> None:
        """Close the connections."""
        self._pool.close()
        await self._others.aclose()


class _Body(httpx.AsyncByteStream):
    """The body of an answer that comes in pieces."""

    def __init__(self, answer: Answer, request: httpx.Request) -> None:
        self._answer, self._request = answer, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self._answer.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
        except HttpError as error:
            raise _as_httpx(error, self._request) from error

    async def aclose(self) -> None:
        self._answer.close()


def _as_httpx(error: HttpError, request: httpx.Request) -> httpx.TransportError:
    return _ERRORS[error.kind](str(error), request=request)

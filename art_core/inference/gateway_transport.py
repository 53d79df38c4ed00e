"""How a request gets to one server, and its answer back: the short way, or through httpx.

Invariant: an answer's body is read once, to its end or not at all; a connection whose answer was left early
is closed.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from art_core.plain_http import KEPT_SECONDS, Answer, HttpError, HttpPool, request_bytes

CONNECT_SECONDS = 10.0
"""How long a server may take to accept a connection. Waiting for its answer is the client's choice."""


class ServerAnswer(Protocol):
    """What a server says; its body is read once."""

    @property
    def status(self) -> int:
        """HTTP status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """To be looked up in lower case."""
        ...

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            HttpError: it did not come to its end.
        """
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes; raises what `read` raises."""
        ...

    async def aclose(self) -> None:
        """Give the connection back, or close it if the body was not read to its end."""
        ...


class _PlainAnswer:
    """An answer that came the short way."""

    def __init__(self, answer: Answer) -> None:
        self.status = answer.status
        self.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in answer.headers}
        self.read = answer.read
        self.pieces = answer.pieces
        self._answer = answer

    async def aclose(self) -> None:
        self._answer.close()


class _HttpxAnswer:
    """An answer that came through TLS or a proxy."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self._response = response

    async def read(self) -> bytes:
        try:
            return await self._response.aread()
        except httpx.HTTPError as cut:
            raise HttpError("read", said(cut)) from cut

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._response.aiter_raw():
                yield piece
        except httpx.HTTPError as cut:
            raise HttpError("read", said(cut)) from cut

    async def aclose(self) -> None:
        await self._response.aclose()


class BegunAnswer:
    """An answer of which the first bytes have been read already: the whole of it, or a stream's first piece.

    Args:
        answer: the answer.
        begun: what was read of its body.
        rest: what is still to come; None when that was all.
    """

    def __init__(self, answer: ServerAnswer, begun: bytes, rest: AsyncIterator[bytes] | None = None) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.aclose = answer.aclose
        self._begun = begun
        self._rest = rest

    async def read(self) -> bytes:
        """The whole body."""
        if self._rest is None:
            return self._begun
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        yield self._begun
        if self._rest is not None:
            async for piece in self._rest:
                yield piece


class _Place:
    """Where a server is, taken apart once."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        parts = urlsplit(base_url)
        local = is_local(base_url)
        # No TLS, and no proxy in between: there is a shorter way than httpx.
        self.plain = parts.scheme == "http" and (local or not getproxies())
        self.address = (parts.hostname or "", parts.port or 80)
        self.host = parts.netloc.rpartition("@")[2].encode()
        self.path = parts.path


def is_local(base_url: str) -> bool:
    """Whether an address is this machine's own."""
    return urlsplit(base_url).hostname in ("127.0.0.1", "localhost", "::1")


class Transport:
    """The connections to servers. Belongs to the event loop that it is made on.

    Args:
        max_idle: connections that are kept through httpx.
        local: whether every server is on this machine.
    """

    def __init__(self, *, max_idle: int, local: bool) -> None:
        self._places: dict[str, _Place] = {}
        self._pool = HttpPool(resends=True)  # sampling twice is harmless
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=max_idle, keepalive_expiry=KEPT_SECONDS
            ),
            trust_env=not local,  # no proxy of the environment stands between us and this machine
        )

    async def close(self) -> None:
        """Close the connections."""
        self._pool.close()
        await self._client.aclose()

    async def post(self, base_url: str, path: str, content: bytes, headers: dict[str, str]) -> ServerAnswer:
        """Send a request; the answer's body is still to be read, and the answer to be closed.

        Raises:
            HttpError: no answer came; of kind ``connect`` or ``connect_timeout`` when nothing was sent.
        """
        place = self._places.get(base_url)
        if place is None:
            place = self._places[base_url] = _Place(base_url)
        if place.plain:
            wire = [(b"host", place.host), (b"content-length", b"%d" % len(content))]
            wire += [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
            request = request_bytes("POST", (place.path + path).encode(), wire, content)
            return _PlainAnswer(
                await self._pool.send(place.address, request, connect_timeout=CONNECT_SECONDS)
            )
        built = self._client.build_request("POST", base_url + path, content=content, headers=headers)
        try:
            return _HttpxAnswer(await self._client.send(built, stream=True))
        except httpx.ConnectTimeout as late:
            raise HttpError("connect_timeout", said(late)) from late
        except httpx.ConnectError as unreachable:
            raise HttpError("connect", said(unreachable)) from unreachable
        except httpx.HTTPError as down:
            raise HttpError("read", said(down)) from down

    async def get(
        self, base_url: str, path: str, headers: Mapping[str, str], *, timeout: float | None = None
    ) -> httpx.Response:
        """GET a path, relative to the server's root.

        Raises:
            HttpError: no answer came.
        """
        url = base_url.removesuffix("/v1") + path
        try:
            limit = httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout or CONNECT_SECONDS))
            return await self._client.get(url, headers=headers, timeout=limit)
        except (httpx.ConnectError, httpx.ConnectTimeout) as unreachable:
            raise HttpError("connect", said(unreachable)) from unreachable
        except httpx.HTTPError as down:
            raise HttpError("read", said(down)) from down


def said(error: httpx.HTTPError) -> str:
    """An error of httpx in words; some have none."""
    return f"{type(error).__name__}: {str(error) or 'no reason given'}"

"""The servers behind a gateway: which version answers, which server is asked, over how many connections.

Invariant: a call for the plain policy name goes to the version that is current when it is made, and holds
that version until the server has answered in full; no more calls than ``max_connections`` are under way,
further ones wait their turn.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from art_core.errors import ArtError
from art_core.inference.endpoint import PolicyEndpoint, served_name
from art_core.plain_http import Answer, HttpError, HttpPool, request_bytes
from art_core.types import PolicyVersion

CONNECT_SECONDS = 10.0
"""How long a server may take to accept a connection. Waiting for its answer is the client's choice."""

_NOT_FORWARDED = {
    "accept-encoding", "connection", "content-encoding", "content-length", "date", "host", "keep-alive",
    "proxy-authenticate", "proxy-authorization", "proxy-connection", "server", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
"""Headers that belong to one hop (RFC 9110, 7.6.1), or that this hop writes itself."""


class RefusalError(ArtError):
    """The gateway answers a request itself, with this status and an error in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's clients would try again on some that no other try can mend."""
        retry = {} if self.status >= 500 else {"x-should-retry": "false"}
        return {"content-type": "application/json", **retry}

    @property
    def body(self) -> bytes:
        """The error, as JSON."""
        error = {"message": str(self), "type": self.kind, "param": None, "code": None}
        return json.dumps({"error": error}).encode()


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that go on to the next hop."""
    return {k.lower(): v for k, v in headers.items() if k.lower() not in _NOT_FORWARDED}


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


class _PlainAnswer:
    """An answer that came the short way."""

    def __init__(self, answer: Answer) -> None:
        self.status = answer.status
        self.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in answer.headers}
        self.read = answer.read
        self.pieces = answer.pieces


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
            raise HttpError("read", _said(cut)) from cut

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._response.aiter_raw():
                yield piece
        except httpx.HTTPError as cut:
            raise HttpError("read", _said(cut)) from cut


class _Server:
    """One server, and how many calls it is busy with."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.busy = 0
        parts = urlsplit(base_url)
        self.local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        # No TLS, and no proxy in between: there is a shorter way than httpx.
        self.plain = parts.scheme == "http" and (self.local or not getproxies())
        self.place = (parts.hostname or "", parts.port or 80)
        self.host = parts.netloc.rpartition("@")[2].encode()
        self.path = parts.path


class Upstream:
    """One policy, on one or more servers. Belongs to the event loop that it is made on.

    Args:
        servers: base URLs that end in ``/v1``.
        endpoint: resolves the plain policy name to a version and leases it; None passes names on as they are.
        max_connections: the most calls under way at a time.
    """

    def __init__(
        self, servers: Sequence[str], endpoint: PolicyEndpoint | None, *, max_connections: int
    ) -> None:
        self._servers = [_Server(url.rstrip("/")) for url in servers]
        self._endpoint = endpoint
        self._slots = asyncio.Semaphore(max_connections)
        local = all(server.local for server in self._servers)
        self._pool = HttpPool()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_connections),
            trust_env=not local,  # no proxy of the environment stands between us and this machine
        )

    async def close(self) -> None:
        """Close the connections."""
        self._pool.close()
        await self._client.aclose()

    @contextmanager
    def route(self, asked: Any) -> Generator[tuple[Any, PolicyVersion | None]]:
        """The name to send for the one that was asked for, and the version behind it, held inside the block.

        Raises:
            RefusalError: the version is not served.
        """
        endpoint = self._endpoint
        named = PolicyVersion.parse(asked) if isinstance(asked, str) else None
        if endpoint is None:
            yield asked, named or (PolicyVersion(asked, 0) if isinstance(asked, str) and asked else None)
            return
        if asked != endpoint.name and (named is None or named.model != endpoint.name):
            yield asked, None
            return
        with ExitStack() as held:
            try:
                version = held.enter_context(endpoint.lease(named))
            except ArtError as unserved:
                raise RefusalError(404, str(unserved)) from unserved
            yield served_name(endpoint, version), version

    @asynccontextmanager
    async def post(
        self, path: str, content: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[ServerAnswer]:
        """Send a request to the least busy server; the answer's body is still to be read.

        Raises:
            RefusalError: the server cannot be reached, or closed the connection without an answer.
        """
        async with self._slots:
            server = min(self._servers, key=lambda s: s.busy)
            server.busy += 1
            try:
                send = self._send_plain if server.plain else self._send
                async with send(server, path, content, self._headers(headers)) as answer:
                    yield answer
            finally:
                server.busy -= 1

    @asynccontextmanager
    async def _send_plain(
        self, server: _Server, path: str, content: bytes, headers: dict[str, str]
    ) -> AsyncGenerator[ServerAnswer]:
        wire = [(b"host", server.host), (b"content-length", b"%d" % len(content))]
        wire += [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        request = request_bytes("POST", (server.path + path).encode(), wire, content)
        try:
            answer = await self._pool.send(server.place, request, connect_timeout=CONNECT_SECONDS)
        except HttpError as down:
            raise _down(server, str(down)) from down
        try:
            yield _PlainAnswer(answer)
        finally:
            answer.close()

    @asynccontextmanager
    async def _send(
        self, server: _Server, path: str, content: bytes, headers: dict[str, str]
    ) -> AsyncGenerator[ServerAnswer]:
        request = self._client.build_request("POST", server.base_url + path, content=content, headers=headers)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as down:
            raise _down(server, _said(down)) from down
        try:
            yield _HttpxAnswer(response)
        finally:
            await response.aclose()

    async def get(self, path: str, headers: Mapping[str, str]) -> httpx.Response:
        """GET a path from the first server that answers; ``path`` is relative to the server's root.

        Raises:
            RefusalError: none answers.
        """
        problem = RefusalError(502, "no server is behind this gateway", "upstream_error")
        for server in self._servers:
            url = server.base_url.removesuffix("/v1") + path
            try:
                return await self._client.get(url, headers=self._headers(headers))
            except httpx.HTTPError as down:
                problem = _down(server, _said(down))
        raise problem

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        kept = forwarded(headers)
        kept["accept-encoding"] = "identity"  # a compressed stream comes in lumps
        if self._endpoint is not None:
            kept["authorization"] = f"Bearer {self._endpoint.api_key}"
        return kept


def _said(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {str(error) or 'no reason given'}"


def _down(server: _Server, reason: str) -> RefusalError:
    return RefusalError(502, f"the server at {server.base_url} did not answer ({reason})", "upstream_error")

"""The servers behind a gateway: which version answers, which server is asked, over how many connections.

Invariant: a call for the plain policy name goes to the version that is current when it is made, and holds
that version until the server has answered in full; no more calls than ``max_connections`` are under way,
further ones wait their turn.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from art_core.errors import ArtError
from art_core.inference.endpoint import PolicyEndpoint, served_name
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


@dataclass(slots=True)
class _Server:
    base_url: str
    busy: int = 0


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
        local = all(httpx.URL(s.base_url).host in ("127.0.0.1", "localhost", "::1") for s in self._servers)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_connections),
            trust_env=not local,  # no proxy of the environment stands between us and this machine
        )

    async def close(self) -> None:
        """Close the connections."""
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
    ) -> AsyncGenerator[httpx.Response]:
        """Send a request to the least busy server; the response's body is still to be read.

        Raises:
            RefusalError: the server cannot be reached, or closed the connection without an answer.
        """
        async with self._slots:
            server = min(self._servers, key=lambda s: s.busy)
            server.busy += 1
            try:
                request = self._client.build_request(
                    "POST", server.base_url + path, content=content, headers=self._headers(headers)
                )
                try:
                    response = await self._client.send(request, stream=True)
                except httpx.HTTPError as down:
                    raise _down(server, down) from down
                try:
                    yield response
                finally:
                    await response.aclose()
            finally:
                server.busy -= 1

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
                problem = _down(server, down)
        raise problem

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        kept = forwarded(headers)
        kept["accept-encoding"] = "identity"  # a compressed stream comes in lumps
        if self._endpoint is not None:
            kept["authorization"] = f"Bearer {self._endpoint.api_key}"
        return kept


def _down(server: _Server, cause: httpx.HTTPError) -> RefusalError:
    what = str(cause) or "no reason given"
    return RefusalError(
        502,
        f"the server at {server.base_url} did not answer ({type(cause).__name__}: {what})",
        "upstream_error",
    )

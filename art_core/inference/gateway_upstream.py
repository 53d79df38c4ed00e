"""The servers behind a gateway: which version answers, and how a call gets its answer although servers fail.

Invariant: a call for the plain policy name goes to the version that is current when it is made, and holds
that version until a server has answered in full; no more calls than ``max_connections`` are under way,
further ones wait their turn.

A call is made again, elsewhere if there is an elsewhere, as long as its client has seen nothing of an answer:
the connection was refused, closed without an answer, or broken off before the first bytes (the last byte,
where the answer comes whole). Sampling twice is harmless: an answer that nobody has seen is recorded nowhere.
A policy's only server that is restarted when it dies is waited for (`art_core.inference.availability`).
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx

from art_core.errors import ArtError, EngineError
from art_core.inference.availability import ALWAYS, MAX_LIVES, HeldTooLongError, availability_of
from art_core.inference.endpoint import PolicyEndpoint, served_name
from art_core.inference.gateway_routing import Replica, ReplicaState, Router
from art_core.inference.gateway_transport import BegunAnswer, ServerAnswer, Transport, is_local
from art_core.inference.vllm_plugin import OWNER_HEADERS
from art_core.plain_http import HttpError
from art_core.types import PolicyVersion

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Servers that may fail one call after they took it. A call that kills what it reaches must find an end."""

PROBE_SECONDS = 0.5
"""How often a server that was found down is asked whether it is back, and how soon it must answer."""

LOOK_SECONDS = 0.05
"""How often a call that found no server up looks again."""

_NOT_FORWARDED = {
    "accept-encoding", "connection", "content-encoding", "content-length", "date", "host", "keep-alive",
    "proxy-authenticate", "proxy-authorization", "proxy-connection", "server", "te", "trailer",
    "transfer-encoding", "upgrade", *OWNER_HEADERS,
}  # fmt: skip
"""Headers of one hop (RFC 9110, 7.6.1), that this hop writes itself, or that are not a client's to send."""


class RefusalError(ArtError):
    """The gateway answers a request itself, with this status and an error in OpenAI's form."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", *, again: bool | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.again = status >= 500 if again is None else again

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's clients would try again on some that no other try can mend."""
        retry = {} if self.again else {"x-should-retry": "false"}
        return {"content-type": "application/json", **retry}

    @property
    def body(self) -> bytes:
        """The error, as JSON."""
        error = {"message": str(self), "type": self.kind, "param": None, "code": None}
        return json.dumps({"error": error}).encode()


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that go on to the next hop."""
    return {k.lower(): v for k, v in headers.items() if k.lower() not in _NOT_FORWARDED}


class Upstream:
    """One policy, on one or more servers. Belongs to the event loop that it is made on.

    Args:
        router: the servers, and which of them is asked.
        endpoint: resolves the plain policy name to a version and leases it; None passes names on as they are.
        max_connections: the most calls under way at a time.
        patience: seconds that a call waits for a server to come up when none is; with 0, servers that were
            found down are tried all the same, and the gateway itself asks them whether they are back.
        keep_key: whether a client's bearer token goes on to the servers; False where it is the gateway's own.

    Attributes:
        queued: calls that wait for one of the connections, or for a server to come up.
        repeated: calls that were made again, by the replica that failed them.
    """

    def __init__(
        self,
        router: Router,
        endpoint: PolicyEndpoint | None,
        *,
        max_connections: int,
        patience: float = 0.0,
        keep_key: bool = True,
    ) -> None:
        self.router = router
        self.queued = 0
        self.repeated: dict[str, int] = dict.fromkeys((r.name for r in router.replicas), 0)
        self._endpoint = endpoint
        self._patience = patience
        self._keep_key = keep_key
        alone = endpoint is not None and len(router.replicas) == 1
        self._server = availability_of(endpoint) if alone else ALWAYS
        self._slots = asyncio.Semaphore(max_connections)
        self._transport = Transport(
            max_idle=max_connections, local=all(is_local(r.base_url) for r in router.replicas)
        )
        self._probes: dict[str, asyncio.Task[None]] = {}
        if patience == 0:
            router.on_suspect = self._probe

    @property
    def endpoint(self) -> PolicyEndpoint | None:
        """The policy's, if it is one of ours."""
        return self._endpoint

    async def close(self) -> None:
        """Close the connections."""
        for probe in self._probes.values():
            probe.cancel()
        await self._transport.close()

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

    # -- completions -------------------------------------------------------------------------------

    @asynccontextmanager
    async def post(
        self,
        path: str,
        content: bytes,
        headers: Mapping[str, str],
        *,
        version: PolicyVersion | None,
        key: Callable[[], str],
    ) -> AsyncGenerator[tuple[ServerAnswer, Replica]]:
        """Send a request to a server that serves the version; the answer's body is still to be read.

        Args:
            path: below ``/v1``.
            content: the body.
            headers: the client's.
            version: which version is to answer; None for models that are not policies of ours.
            key: makes the routing key.

        Raises:
            RefusalError: no server answered, or none came up in time.
        """
        self.queued += 1
        try:
            await self._slots.acquire()
        finally:
            self.queued -= 1
        try:
            answer, replica = await self._answered(path, content, forwarded(headers), version, key)
            try:
                yield answer, replica
            finally:
                self.router.ended(replica)
                await answer.aclose()
        finally:
            self._slots.release()

    async def _answered(
        self,
        path: str,
        content: bytes,
        headers: dict[str, str],
        version: PolicyVersion | None,
        key: Callable[[], str],
    ) -> tuple[ServerAnswer, Replica]:
        """An answer that may be shown, and the replica that gives it, which counts as busy with it."""
        tried: list[Replica] = []
        failures, lives = 0, 1
        deadline = time.monotonic() + self._patience
        while True:
            life = await self._life()
            replica = await self._next(version, key, tried, deadline)
            try:
                answer = await self._attempt(replica, path, content, headers)
            except HttpError as down:
                failures += down.kind not in ("connect", "connect_timeout")
                dropped = down.kind in ("connect", "read")
                if failures < ATTEMPTS and lives < MAX_LIVES and await self._came_back(life, dropped):
                    lives += 1
                    self.repeated[replica.name] += 1
                    continue
                tried.append(replica)
                self.router.suspect(replica, str(down))
                if failures >= ATTEMPTS or not self._goes_on(tried, deadline):
                    raise _down(replica, str(down)) from down
                self.repeated[replica.name] += 1
                logger.info("a call goes elsewhere: %s failed it (%s)", replica.name, down)
                continue
            failures += answer.status == 404
            if answer.status != 404 or failures >= ATTEMPTS:
                return answer, replica
            should, shown = version in (replica.versions or ()), False  # as who watches over it says
            try:
                shown = not (should or await self._came_back(life, looks_restarted=version is not None))
                if shown:
                    return answer, replica
            finally:
                if not shown:
                    self.router.ended(replica)
                    await answer.aclose()
            self.repeated[replica.name] += 1
            if should:  # otherwise it had lost the version, and has it again
                self.router.suspect(replica, f"it does not know {version}, which it should serve")

    async def _attempt(
        self, replica: Replica, path: str, content: bytes, headers: dict[str, str]
    ) -> ServerAnswer:
        """One replica's answer, as far along as it must be; the replica counts as busy with it.

        Raises:
            HttpError: there is none.
        """
        self.router.began(replica)
        answer: ServerAnswer | None = None
        try:
            answer = await self._transport.post(
                replica.base_url, path, content, self._headers(headers, replica)
            )
            return await self._begun(answer, replica)
        except BaseException:
            self.router.ended(replica)
            if answer is not None:
                await answer.aclose()
            raise

    async def _life(self) -> int:
        """The life of the server that a call goes to; waits while it is restarted."""
        if self._server is ALWAYS:
            return 0
        self.queued += 1
        try:
            return await self._server.aready()
        except HeldTooLongError as held:
            raise RefusalError(503, str(held), "upstream_error", again=False) from held
        except EngineError as dead:
            raise RefusalError(503, str(dead), "upstream_error") from dead
        finally:
            self.queued -= 1

    async def _came_back(self, life: int, looks_restarted: bool) -> bool:
        try:
            return await self._server.alost(life, looks_restarted=looks_restarted)
        except EngineError as dead:
            raise RefusalError(503, str(dead), "upstream_error") from dead

    async def _next(
        self, version: PolicyVersion | None, key: Callable[[], str], tried: list[Replica], deadline: float
    ) -> Replica:
        """The replica to ask; waits for one to come up, as long as there is patience."""
        replica = self.router.choose(version, key, tried)
        if replica is None and not self._patience:
            replica = self.router.last_resort(tried)
            if replica is None:
                raise RefusalError(503, "no server behind this gateway takes calls now", "upstream_error")
        if replica is not None:
            return replica
        tried.clear()
        self.queued += 1
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while (replica := self.router.choose(version, key)) is None:
                    if all(lost.lost for lost in self.router.replicas):
                        raise TimeoutError
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            states = "; ".join(f"{r.name} is {r.state}: {r.detail}"[:300] for r in self.router.replicas)
            raise RefusalError(
                503, f"no replica could answer for {version} within {self._patience:g} s ({states})",
                "upstream_error",
            ) from None  # fmt: skip
        finally:
            self.queued -= 1
        return replica

    def _goes_on(self, tried: list[Replica], deadline: float) -> bool:
        return time.monotonic() < deadline or self.router.last_resort(tried) is not None

    async def _begun(self, answer: ServerAnswer, replica: Replica) -> ServerAnswer:
        """The answer, as far along as it must be before its client may see any of it.

        Raises:
            HttpError: it broke off, or it is the last word of a server that is going down.
        """
        if not self._patience and len(self.router.replicas) == 1 and self._server is ALWAYS:
            return answer  # there is nowhere else to go
        if answer.status < 500 and "event-stream" in answer.headers.get("content-type", ""):
            pieces = answer.pieces()
            async for piece in pieces:
                return BegunAnswer(answer, piece, pieces)
            return BegunAnswer(answer, b"")
        whole = BegunAnswer(answer, await answer.read())
        if answer.status >= 500 and (problem := await self._sick(replica)):
            raise HttpError("read", f"HTTP {answer.status}, and then: {problem}")
        return whole

    # -- everything else ---------------------------------------------------------------------------

    async def get(self, path: str, headers: Mapping[str, str]) -> httpx.Response:
        """GET a path from the first server that answers; ``path`` is relative to the server's root.

        Raises:
            RefusalError: none answers.
        """
        problem = RefusalError(502, "no server is behind this gateway", "upstream_error")
        for replica in sorted(self.router.replicas, key=lambda r: r.state is not ReplicaState.UP):
            try:
                sent = self._headers(forwarded(headers), replica)
                return await self._transport.get(replica.base_url, path, sent)
            except HttpError as down:
                problem = _down(replica, str(down))
        raise problem

    async def health(self) -> list[dict[str, Any]]:
        """How each server is: as whoever watches over it says, or as it says itself."""
        if not self._patience:
            problems = await asyncio.gather(*(self._sick(r) for r in self.router.replicas))
            for replica, problem in zip(self.router.replicas, problems, strict=True):
                if problem:
                    self.router.suspect(replica, problem)
                elif replica.state is ReplicaState.DOWN:
                    self.router.set_state(replica, ReplicaState.UP)
        return [
            {
                "name": r.name,
                "state": str(r.state),
                "detail": r.detail,
                "since": r.since,
                "in_flight": r.busy,
                "versions": None if r.versions is None else sorted(v.name for v in r.versions),
            }
            for r in self.router.replicas
        ]

    async def _sick(self, replica: Replica) -> str:
        """What is wrong with a server; empty if nothing. Some have no ``/health``: any answer will do."""
        try:
            answer = await self._transport.get(
                replica.base_url, "/health", self._headers({}, replica), timeout=4 * PROBE_SECONDS
            )
        except HttpError as down:
            return str(down)
        return f"its /health says {answer.status_code}" if answer.status_code >= 500 else ""

    def _probe(self, replica: Replica) -> None:
        async def until_back() -> None:
            while replica.state is ReplicaState.DOWN:
                if not await self._sick(replica):
                    self.router.set_state(replica, ReplicaState.UP)
                    break
                await asyncio.sleep(PROBE_SECONDS)

        self._probes[replica.name] = asyncio.get_running_loop().create_task(until_back())

    def _headers(self, kept: Mapping[str, str], replica: Replica) -> dict[str, str]:
        headers = {**kept, "accept-encoding": "identity"}  # a compressed stream comes in lumps
        if not self._keep_key:
            headers.pop("authorization", None)
        key = replica.api_key or (self._endpoint.api_key if self._endpoint is not None else None)
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        return headers


def _down(replica: Replica, reason: str) -> RefusalError:
    return RefusalError(502, f"the server at {replica.base_url} did not answer ({reason})", "upstream_error")

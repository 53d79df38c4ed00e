"""ReplicaSet: several engines of one policy, as one engine.

Invariant: a version is current only after every replica that is up serves it; a replica gets calls only while
it answers and serves what it should; a call that a replica never answered is answered by another one.

In front stands a gateway, whose `Router` knows each replica's state; a `Watch`, on a thread of the set's own,
sees to it that the state is right. What the set is told (publish, retire, pause) goes to every replica that
is up, and to the others when they come back.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from art_core.errors import EngineError
from art_core.inference.endpoint import NamesVersions, PolicyEndpoint, raw_logprobs_of
from art_core.inference.engine import Engine, EngineEvent, EngineHealth, Eventful, EventListener
from art_core.inference.external import ExternalEngine
from art_core.inference.gateway import Gateway
from art_core.inference.gateway_routing import Replica, ReplicaState, Router
from art_core.inference.replica_watch import CHECK_SECONDS, Member, Watch
from art_core.loop_thread import LoopThread
from art_core.seeing_through import seen_through
from art_core.types import PolicyVersion

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ReplicaSet:
    """Serves one policy from several engines, behind a gateway.

    Args:
        engines: one for each replica; the set starts and closes them.
        endpoint: resolves the plain policy name to a version; None: names must say the version.
        host: where the gateway listens.
        port: its port; 0 for any free one.
        connections: calls under way for each replica; further ones wait in the gateway.
        patience: seconds that a call waits while no replica is up, and that a publication waits for one.
        replaces: whether a version takes the place of the one before it (``publish="merged"``), for which
            one replica after the other is drained.
        on_event: told when a replica goes out and comes back, from another thread.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        endpoint: PolicyEndpoint | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        connections: int = 256,
        patience: float = 600.0,
        replaces: bool = False,
        on_event: EventListener | None = None,
    ) -> None:
        if not engines:
            raise EngineError("ReplicaSet needs at least one engine")
        self._engines = tuple(engines)
        self._endpoint = endpoint
        self._place = host, port
        self._connections = connections
        self._patience = patience
        self._replaces = replaces
        self._members: list[Member] = []
        self._desired: dict[PolicyVersion, Path | None] = {}
        self._paused = False
        self._publishing = False
        self._gateway: Gateway | None = None
        self._watch: Watch | None = None
        self._thread: LoopThread | None = None
        self.on_event = on_event
        for number, engine in enumerate(self._engines):
            if isinstance(engine, Eventful):
                engine.on_event = _naming(str(number), self._tell)

    # -- what engines have -------------------------------------------------------------------------

    @property
    def gateway(self) -> Gateway:
        """What stands in front.

        Raises:
            EngineError: before `start`.
        """
        if self._gateway is None:
            raise EngineError("the replicas have not been started; call start() first")
        return self._gateway

    @property
    def engines(self) -> tuple[Engine, ...]:
        """One for each replica."""
        return self._engines

    @property
    def one_at_a_time(self) -> bool:
        """Whether a version takes the place of the one before."""
        return self._replaces

    @property
    def base_url(self) -> str:
        """The gateway's, ending in ``/v1``."""
        return self.gateway.base_url

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """How each replica is."""
        return tuple(member.replica for member in self._members)

    @property
    def raw_logprobs(self) -> bool:
        """Whether any replica's log-probabilities are the model's own, before temperature."""
        return any(map(raw_logprobs_of, self._engines))

    def wire_name(self, version: PolicyVersion) -> str:
        """The name by which the replicas know a version."""
        first = self._engines[0]
        return first.wire_name(version) if isinstance(first, NamesVersions) else version.name

    def bind(self, endpoint: PolicyEndpoint) -> None:
        """Resolve the plain policy name by this endpoint; before `start`."""
        self._endpoint = endpoint

    async def start(self) -> None:
        """Start every engine, then the gateway.

        Raises:
            EngineError: an engine did not come up, or the gateway's port is taken; nothing runs then.
        """
        if self._gateway is not None:
            raise EngineError(f"the replicas run already, behind {self.base_url}; close() them first")
        self._thread = LoopThread("art-replicas")
        try:
            await self._there(self._start)
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        started = await asyncio.gather(*(e.start() for e in self._engines), return_exceptions=True)
        for number, problem in enumerate(started):
            if isinstance(problem, BaseException):
                raise EngineError(f"replica {number} did not start: {problem}") from problem
        self._members = [
            Member(engine, Replica(str(number), engine.base_url, versions=frozenset()))
            for number, engine in enumerate(self._engines)
        ]
        names = {e.base_name for e in self._engines if isinstance(e, ExternalEngine)}
        if len(names) > 1:
            raise EngineError(
                f"the replicas call the base model differently ({', '.join(sorted(names))}); serve it under "
                "one name everywhere (vLLM: --served-model-name)"
            )
        for member in self._members:
            if isinstance(member.engine, ExternalEngine):
                member.replica.api_key = member.engine.api_key
            member.life = await member.availability.aready()
        router = Router([member.replica for member in self._members])
        host, port = self._place
        self._gateway = Gateway(
            self._endpoint,
            host=host,
            port=port,
            max_connections=self._connections * len(self._members),
            router=router,
            patience=self._patience,
        ).start()
        self._watch = Watch(
            self._members,
            router,
            desired=self._desired,
            # Who publishes is done with the GPU: what died in its sleep may wake.
            paused=lambda: self._paused and not self._publishing,
            tell=self._tell,
        )

    async def publish(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        """Serve a version from now on: returns when every replica that is up serves it.

        A replica that cannot take it, while another can, goes out until it has it.

        Raises:
            EngineError: no replica took it, or none came up in time.
        """
        await self._there(lambda: self._publish(version, adapter_dir))

    async def _publish(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        if version in self._desired:
            raise EngineError(f"{version} is served already; new weights need a new version number")
        before = dict(self._desired)
        if self._replaces:
            self._desired.clear()
        self._desired[version] = adapter_dir
        self._publishing = True
        try:
            await self._some_up()
            problems = await self._each(lambda member: member.bring_up_to_date(self._desired))
        except BaseException:
            await self._withdraw(version, before)
            raise
        finally:
            self._publishing = False
        took = [m for m in self._members if m.replica.versions and version in m.replica.versions]
        if not took:
            await self._withdraw(version, before)
            raise EngineError(f"no replica took {version}: " + "; ".join(str(p) for p in problems.values()))
        for member, problem in problems.items():
            self._watching.out(member, f"it did not take {version}: {problem}")

    async def _withdraw(self, version: PolicyVersion, before: Mapping[PolicyVersion, Path | None]) -> None:
        """Take back a publication that failed, from those who have it."""
        self._desired.clear()
        self._desired.update(before)
        for member in self._members:
            with suppress(EngineError):  # it is not asked for again
                await member.retire(version)

    async def _each(self, act: Callable[[Member], Coroutine[Any, Any, None]]) -> dict[Member, EngineError]:
        """Do something to every replica that is up, by turns if that interrupts them; what failed."""
        members = [member for member in self._members if member.state is ReplicaState.UP]
        # Requests that a pause holds would never drain; and nobody waits for an answer then.
        if not self._replaces or self._paused or len(members) == 1:
            results = await asyncio.gather(*(act(m) for m in members), return_exceptions=True)
        else:
            results: list[BaseException | None] = []
            for member in members:
                try:
                    await self._watching.drain(member)
                    results += await asyncio.gather(act(member), return_exceptions=True)
                finally:
                    self._watching.undrain(member)
        problems: dict[Member, EngineError] = {}
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineError):
                problems[member] = result
            elif isinstance(result, BaseException):
                raise result
        return problems

    async def _some_up(self) -> None:
        deadline = time.monotonic() + self._patience
        while not any(member.state is ReplicaState.UP for member in self._members):
            if time.monotonic() > deadline or all(member.replica.lost for member in self._members):
                raise EngineError(f"no replica is up: {self._details()}")
            await asyncio.sleep(CHECK_SECONDS / 10)

    async def retire(self, version: PolicyVersion) -> None:
        """Stop serving a version on every replica, once its requests in flight have ended.

        Raises:
            EngineError: it is not served.
        """
        await self._there(lambda: self._retire(version))

    async def _retire(self, version: PolicyVersion) -> None:
        if self._replaces:
            return  # the next one takes its place
        if version not in self._desired:
            served = ", ".join(map(str, self._desired)) or "none"
            raise EngineError(f"{version} is not served; served: {served}")
        del self._desired[version]
        for member, problem in (await self._each(lambda member: member.retire(version))).items():
            self._watching.out(member, f"it did not give up {version}: {problem}")

    def versions(self) -> Sequence[PolicyVersion]:
        """What is served now, oldest first."""
        return tuple(self._desired)

    async def pause(self) -> None:
        """Let requests in flight end and hold new ones, on every replica."""
        self._paused = True
        await self._there(self._pause_all)

    async def resume(self) -> None:
        """Take requests again."""
        self._paused = False
        await self._there(self._pause_all)

    async def _pause_all(self) -> None:
        """Have every replica that is not down hold requests, or not, as the set does."""
        members = [member for member in self._members if member.state is not ReplicaState.DOWN]
        results = await asyncio.gather(*(m.hold(self._paused) for m in members), return_exceptions=True)
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineError):
                self._watching.out(member, str(result))
            elif result is not None:
                raise result

    async def health(self) -> EngineHealth:
        """Whether any replica answers; what is wrong with those that do not."""
        if not self._members:
            return EngineHealth(False, "the replicas are not running")
        up = [member for member in self._members if member.state is not ReplicaState.DOWN]
        return EngineHealth(ok=bool(up), detail=self._details())

    async def close(self) -> None:
        """Stop the gateway and every engine; requests in flight are ended. Closing twice does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await seen_through(self._end(thread))  # what was left running nobody could close any more

    async def _end(self, thread: LoopThread) -> None:
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await asyncio.to_thread(gateway.close)
        await thread.run(self._close)
        await thread.close()
        self._desired.clear()
        self._members.clear()

    async def _close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.close()
        problems = await asyncio.gather(*(e.close() for e in self._engines), return_exceptions=True)
        for number, problem in enumerate(problems):
            if problem is not None:
                logger.error("replica %d did not close: %s", number, problem)

    # -- taking one out on purpose -----------------------------------------------------------------

    async def drain(self, name: str) -> None:
        """Send a replica no new calls, and return when those under way have ended.

        It stays out until `restore`, which publishes what it missed.

        Raises:
            EngineError: there is no such replica.
        """
        member = self._member(name)
        member.drained = True
        await self._there(lambda: self._watching.drain(member))

    async def restore(self, name: str) -> None:
        """Send a drained replica calls again, once it answers and serves what it should.

        Raises:
            EngineError: there is no such replica.
        """
        member = self._member(name)

        async def check() -> None:
            await member.bring_up_to_date(self._desired)
            await member.hold(self._paused)
            self._watching.undrain(member)

        member.drained = False
        await self._there(check)

    def _member(self, name: str) -> Member:
        for member in self._members:
            if member.replica.name == name:
                return member
        known = ", ".join(member.replica.name for member in self._members) or "none, before start()"
        raise EngineError(f"no replica is named {name!r}; there are {known}")

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _watching(self) -> Watch:
        assert self._watch is not None, "only what was started is watched"
        return self._watch

    def _tell(self, event: EngineEvent) -> None:
        logger.warning(event.message)
        if self.on_event is None:
            return
        try:
            self.on_event(event)
        except Exception:  # who watches over the replicas must not end over it
            logger.exception("an event could not be kept: %s", event.message)

    def _details(self) -> str:
        wrong = [m.replica for m in self._members if m.state is not ReplicaState.UP]
        return "; ".join(f"replica {r.name} is {r.state}: {r.detail}" for r in wrong)

    async def _there(self, act: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do something on the set's own loop, whose locks and watchers it may meet."""
        if self._thread is None:
            raise EngineError("the replicas are not running; call start() first")
        return await self._thread.run(act)


def _naming(replica: str, tell: EventListener) -> EventListener:
    """A listener that says which replica an engine's event is about."""

    def listener(event: EngineEvent) -> None:
        data: Mapping[str, Any] = {**event.data, "replica": replica}
        tell(EngineEvent(event.kind, f"replica {replica}: {event.message}", data))

    return listener

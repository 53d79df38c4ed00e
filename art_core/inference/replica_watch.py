"""The engines of a replica set, and who watches over them.

Invariant: a replica that is up answers and serves what it should; whenever that changes, its state says so
and the listener is told, once.

A `Member` is one engine and its `Replica`, the router's view of it. The `Watch` looks at each: every second,
and at once when a call found it down. It takes it out, waits until its engine (or whoever runs it) has it
back, publishes what it lost, and brings it back. All of it runs on one event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from art_core.errors import EngineError
from art_core.inference.availability import ALWAYS, Availability, HeldTooLongError, aup, availability_of
from art_core.inference.engine import Engine, EngineEvent, EventListener
from art_core.inference.gateway_routing import Replica, ReplicaState, Router
from art_core.types import PolicyVersion

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""How often a replica is looked at that nobody complains about."""


class Member:
    """One engine of a set, and how it is.

    Args:
        engine: started.
        replica: what the router knows of it.
    """

    def __init__(self, engine: Engine, replica: Replica) -> None:
        self.engine = engine
        self.replica = replica
        self.availability: Availability = availability_of(engine)
        self.life = 0
        self.suspected = asyncio.Event()
        self.told_out = False
        self.drained = False
        self._published: set[PolicyVersion] = set()
        self._paused = False
        self._acts = asyncio.Lock()

    @property
    def state(self) -> ReplicaState:
        """Whether calls go to it."""
        return self.replica.state

    async def bring_up_to_date(self, desired: Mapping[PolicyVersion, Path | None]) -> None:
        """Publish what it is to serve and does not.

        Raises:
            EngineError: it does not take it.
        """
        async with self._acts:
            for version, adapter_dir in tuple(desired.items()):
                if version not in self._served():
                    await self.engine.publish(version, adapter_dir)
                    self._published.add(version)
            self.replica.versions = frozenset(self._served() & desired.keys())

    async def retire(self, version: PolicyVersion) -> None:
        """Stop serving a version, if it does.

        Raises:
            EngineError: it does not give it up.
        """
        async with self._acts:
            self.replica.versions = (self.replica.versions or frozenset()) - {version}
            had = version in self._served()
            self._published.discard(version)
            if had:
                await self.engine.retire(version)

    @property
    def held(self) -> bool:
        """Whether it was told to hold requests, and not yet to take them again: it may be asleep."""
        return self._paused

    def serves_all(self, desired: Mapping[PolicyVersion, Path | None]) -> bool:
        """Whether it has, or gets back by itself, what it is to serve."""
        return desired.keys() <= self._served()

    async def hold(self, paused: bool) -> None:
        """Hold requests, or take them again.

        Raises:
            EngineError: it does not.
        """
        if self._paused == paused:
            return
        self._paused = paused
        try:
            await (self.engine.pause() if paused else self.engine.resume())
        except BaseException:
            self._paused = True  # it does not take any: to be told again
            raise

    def _served(self) -> set[PolicyVersion]:
        """What it was published and has, or gets back by itself before it is asked again."""
        restores_itself = self.availability is not ALWAYS
        return set(self._published if restores_itself else self.engine.versions())


class Watch:
    """Looks at the members of a set; made on the loop that it belongs to.

    Args:
        members: all of them.
        router: has their states.
        desired: what each is to serve; read whenever one comes back.
        paused: whether they are to hold requests; likewise.
        tell: told what happens.
    """

    def __init__(
        self,
        members: Sequence[Member],
        router: Router,
        *,
        desired: Mapping[PolicyVersion, Path | None],
        paused: Callable[[], bool],
        tell: EventListener,
    ) -> None:
        self._router = router
        self._desired = desired
        self._paused = paused
        self._tell = tell
        loop = asyncio.get_running_loop()
        suspected = {id(member.replica): member.suspected for member in members}

        def suspect(replica: Replica) -> None:
            with suppress(RuntimeError):  # the set is being closed
                loop.call_soon_threadsafe(suspected[id(replica)].set)

        router.on_suspect = suspect
        self._tasks = [loop.create_task(self._watch(member)) for member in members]

    async def close(self) -> None:
        """Look no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def out(self, member: Member, reason: str) -> None:
        """Take one out, until it is found to be well."""
        replica = member.replica
        self._router.set_state(replica, ReplicaState.DOWN, reason)
        member.suspected.set()
        if not member.told_out:
            member.told_out = True
            data = {"replica": replica.name, "base_url": replica.base_url, "reason": reason[:2000]}
            self._tell(EngineEvent("replica_out", f"replica {replica.name} is out: {reason}", data))

    async def drain(self, member: Member) -> None:
        """Send one no new calls; returns when those under way have ended."""
        self._router.set_state(member.replica, ReplicaState.DRAINING, "drained")
        while member.replica.busy and member.state is ReplicaState.DRAINING:
            await asyncio.sleep(CHECK_SECONDS / 50)

    def undrain(self, member: Member) -> None:
        """Send one calls again, unless it went down meanwhile or is to stay drained."""
        if member.state is ReplicaState.DRAINING and not member.drained:
            self._router.set_state(member.replica, ReplicaState.UP)

    async def _watch(self, member: Member) -> None:
        while not member.replica.lost:
            with suppress(TimeoutError):
                await asyncio.wait_for(member.suspected.wait(), CHECK_SECONDS)
            suspected = member.suspected.is_set()
            member.suspected.clear()
            try:
                await self._look(member, suspected)
            except HeldTooLongError:
                continue  # on purpose: see `EngineConfig.colocate`
            except EngineError as problem:
                await self._again(member, str(problem))
            except Exception as bug:
                logger.exception("looking at replica %s failed", member.replica.name)
                await self._again(member, f"{type(bug).__name__}: {bug}")

    async def _again(self, member: Member, reason: str) -> None:
        self.out(member, reason)
        await asyncio.sleep(CHECK_SECONDS / 4)

    async def _look(self, member: Member, suspected: bool) -> None:
        if member.held and member.state is ReplicaState.DOWN and not self._paused():
            await self._resume(member)
        # Nobody restarts one that sleeps, before it is woken: that is not waited for.
        if suspected and not member.held:  # its engine's own watchdog looks first, and restarts it
            reason = member.replica.detail
            if await self._while_it_may_return(member, lambda: member.availability.alost(member.life)):
                self.out(member, reason)
        health = await member.engine.health()
        if not health.ok:
            await self._again(member, health.detail)
            if not member.held:
                await self._while_it_may_return(member, member.availability.aready)
            return
        if member.held:
            if member.state is ReplicaState.DOWN and member.serves_all(self._desired):
                self._back(member)  # whoever asks it waits there
            return
        member.life = await member.availability.aready()
        if member.state is not ReplicaState.DOWN:
            return
        await member.bring_up_to_date(self._desired)
        await member.hold(self._paused())  # it may have missed a pause, or the end of one
        self._back(member)

    async def _resume(self, member: Member) -> None:
        """Have one take requests again that was down when the others were told to."""
        try:
            await member.hold(False)
        except EngineError:
            await self._while_it_may_return(member, lambda: aup(member.availability))
            raise

    async def _while_it_may_return(
        self, member: Member, wait: Callable[[], Coroutine[None, None, int | bool]]
    ) -> int | bool:
        try:
            return await wait()
        except EngineError as dead:
            replica = member.replica
            self.out(member, str(dead))
            replica.lost = True
            data = {"replica": replica.name, "base_url": replica.base_url}
            message = f"replica {replica.name} will not come back: {dead}"
            self._tell(EngineEvent("replica_lost", message, data))
            return False

    def _back(self, member: Member) -> None:
        replica = member.replica
        seconds = time.time() - replica.since
        state = ReplicaState.DRAINING if member.drained else ReplicaState.UP
        self._router.set_state(replica, state, "drained" if member.drained else "")
        member.suspected.clear()
        if member.told_out:
            member.told_out = False
            data = {"replica": replica.name, "base_url": replica.base_url, "seconds": seconds}
            self._tell(
                EngineEvent("replica_back", f"replica {replica.name} is back after {seconds:.1f} s", data)
            )

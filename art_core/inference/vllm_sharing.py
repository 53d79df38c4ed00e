"""A GPU that vLLM and the trainer have in turns.

Invariant: between `lend` and `take_back` vLLM holds next to no GPU memory, is not restarted, and gets no
requests; after `take_back` every version answers as it did before, or the record says what was done about it.

`lend`: the server's door is shut, so that whoever comes waits there, and what is in flight ends; the canaries
are read, the server sleeps. `take_back`: the server wakes, its adapters are loaded again from their files,
which takes a moment, and the canaries are read again. Where one differs by more than its noise explains, the
server is restarted. `release` opens the door. (Adapters do not survive sleep: on an H200 with vLLM 0.26 their
logprobs were off by 1.1 after each one, those of the base model by nothing.)

The door stands inside the server, before its engine (`art_versions`), because not all requests come by us:
gateways, other processes and stock clients know nothing of `ServerLives`. What waits inside the engine would
be aborted by sleeping, and answered by whatever woke up.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from art_core.errors import EngineError
from art_core.inference.availability import ServerLives
from art_core.inference.engine import EngineEvent, EventListener
from art_core.inference.gpu_share import free_cached_memory
from art_core.inference.vllm_canary import Check
from art_core.inference.vllm_compat import RESET_PREFIX_CACHE
from art_core.inference.vllm_process import ServerGoneError, VLLMProcess
from art_core.inference.vllm_sleep import SleepCycle
from art_core.inference.vllm_versions import VersionTable
from art_core.types import PolicyVersion

logger = logging.getLogger(__name__)

Act = Callable[[VLLMProcess], Awaitable[Any]]


class Acting(Protocol):
    """Does something with the server, in whichever life it is; returns the life that did it."""

    async def __call__(self, act: Act, /) -> int: ...  # noqa: D102 - the class says it


class SharedGpu:
    """Takes a server through sleep and back.

    Args:
        cycle: the server's sleep.
        base: the version that the base model answers as, now.
        lives: the server's lives, whose clients are held meanwhile.
        versions: what the server is to serve.
        patience: seconds that a request waits at most, here or at the door.
    """

    def __init__(
        self,
        cycle: SleepCycle,
        *,
        base: Callable[[], PolicyVersion],
        lives: ServerLives,
        versions: VersionTable,
        patience: float,
    ) -> None:
        self._cycle = cycle
        self._base = base
        self._lives = lives
        self._versions = versions
        self._patience = patience

    @property
    def lent(self) -> bool:
        """Whether the trainer has it."""
        return self._cycle.asleep

    async def lend(self, do: Acting, pause: Act, resume: Act) -> None:
        """Give the GPU to the trainer.

        Args:
            do: acts on the server.
            pause: has the server end what is in flight and hold what comes.
            resume: has it take requests again, if it cannot sleep.

        Raises:
            EngineError: the server refuses; it takes requests as before.
        """
        self._lives.hold(self._patience)
        try:
            await do(self._shut_door)
            # Before pausing: a server that is paused answers nobody, not even us.
            await do(lambda server: self._cycle.remember(server, self._base(), self._adapters()))
            await do(partial(self._sleep, pause))
        except BaseException:
            with contextlib.suppress(EngineError):  # the first error says more
                await do(resume)
                await do(VLLMProcess.open_door)
            self._lives.release()
            raise

    async def take_back(self, do: Acting, tell: EventListener) -> None:
        """Wake the server and see that it is what it was; clients stay held until `release`.

        Args:
            do: acts on the server.
            tell: told of what had to be done.

        Raises:
            EngineError: it does not come back.
        """
        if not self._cycle.asleep:
            return
        await asyncio.to_thread(free_cached_memory)
        life = self._lives.life
        try:
            life = await do(self._cycle.wake)
            await self._reload(do)
            checks = await self._check(do)
        except ServerGoneError:
            raise
        except EngineError as refused:
            # Whatever it is now, it is not what it was. A new life has what is served from its files.
            message = f"vLLM did not wake up as it went to sleep and is restarted: {refused}"
            logger.warning("%s", message)
            tell(EngineEvent("wake_failed", message))
            await self._restart(do, life)
            return
        logger.info("canaries after sleeping: %s", ", ".join(map(str, checks)))
        changed = [check for check in checks if check.changed]
        if changed:
            said = ", ".join(map(str, changed))
            _report(tell, f"after sleeping, vLLM did not answer as before and is restarted: {said}", changed)
            await self._restart(do, life)

    async def release(self, do: Acting) -> None:
        """Let requests in again.

        Raises:
            EngineError: the server does not.
        """
        await do(VLLMProcess.open_door)
        self._lives.release()

    async def _shut_door(self, server: VLLMProcess) -> None:
        await server.shut_door(self._patience)

    async def _sleep(self, pause: Act, server: VLLMProcess) -> None:
        await self._shut_door(server)  # again: it may be in another life than when it was shut
        await pause(server)
        await self._cycle.sleep(server)

    def _adapters(self) -> list[PolicyVersion]:
        base = self._base()
        return [version for version in self._versions.served() if version != base]

    async def _check(self, do: Acting) -> list[Check]:
        found: list[Check] = []

        async def look(server: VLLMProcess) -> None:
            found[:] = await self._cycle.check(server, [self._base(), *self._adapters()])

        await do(look)
        return found

    async def _reload(self, do: Acting) -> None:
        """Load every adapter from its files: what sleep has made of those in memory, nobody knows."""
        adapters = {v: path for v in self._versions.served() if (path := self._versions.adapter_dir(v))}
        if not adapters:
            return

        async def again(server: VLLMProcess) -> None:
            for version, adapter_dir in adapters.items():
                await server.unload(version.name)
                await server.load(version.name, adapter_dir)
            # Older versions find cached prefixes by the adapter's name: none of before may be reused.
            await server.steer(RESET_PREFIX_CACHE, None, "forget its prefix cache")

        with self._versions.reloading():
            await do(again)

    async def _restart(self, do: Acting, life: int) -> None:
        if self._lives.life != life:  # it died over it, and is new already
            return
        await do(lambda server: asyncio.to_thread(server.process.kill))
        await self._lives.alost(life)


def _report(tell: EventListener, message: str, changed: list[Check]) -> None:
    logger.warning("%s", message)
    data = {
        "differences": {check.version.name: check.difference for check in changed},
        "noise": {check.version.name: check.noise for check in changed},
        "limits": {check.version.name: check.limit for check in changed},
        "lost": [check.version.name for check in changed if check.lost],
    }
    tell(EngineEvent("sleep_changed_answers", message, data))

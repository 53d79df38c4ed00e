"""A GPU that vLLM and the trainer have in turns.

Invariant: between `lend` and `take_back` vLLM holds next to no GPU memory, is not restarted, and gets no
requests; after `take_back` every version answers as it did before, or the record says what was done about it.

`lend`: clients are held, the canaries read, what is in flight ends, the server sleeps. `take_back`: the
server wakes and the canaries are read again. An adapter that changed is loaded again from its files, which
takes a moment; if that does not help, or the base model changed, the server is restarted.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from art_core.errors import EngineError
from art_core.inference.availability import ServerLives
from art_core.inference.engine import EngineEvent, EventListener
from art_core.inference.gpu_share import free_cached_memory
from art_core.inference.vllm_compat import RESET_PREFIX_CACHE
from art_core.inference.vllm_process import VLLMProcess
from art_core.inference.vllm_sleep import TOLERANCE, Change, SleepCycle
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
    """

    def __init__(
        self,
        cycle: SleepCycle,
        *,
        base: Callable[[], PolicyVersion],
        lives: ServerLives,
        versions: VersionTable,
    ) -> None:
        self._cycle = cycle
        self._base = base
        self._lives = lives
        self._versions = versions

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
        self._lives.hold()
        try:
            # Before pausing: a server that is paused answers nobody, not even us.
            await do(lambda server: self._cycle.remember(server, self._all()))
            await do(pause)
            await do(self._cycle.sleep)
        except BaseException:
            self._lives.release()
            with contextlib.suppress(EngineError):  # the first error says more
                await do(resume)
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
        life = await do(self._cycle.wake)
        changed = await self._changes(do)
        if not changed:
            return
        said = "after sleeping, vLLM did not answer as before: " + ", ".join(map(str, changed))
        data = {"differences": {c.version.name: c.difference for c in changed}, "tolerance": TOLERANCE}
        if all(change.version != self._base() for change in changed):
            await self._reload(do, [change.version for change in changed])
            changed = await self._changes(do)
            if not changed:
                _report(tell, f"{said}; loading the adapters again mended it", data | {"remedy": "reload"})
                return
        _report(tell, f"{said}; vLLM is restarted", data | {"remedy": "restart"})
        await self._restart(do, life)

    def release(self) -> None:
        """Let clients send requests again."""
        self._lives.release()

    def _all(self) -> list[PolicyVersion]:
        base = self._base()
        return [base, *(v for v in self._versions.served() if v != base)]

    async def _changes(self, do: Acting) -> list[Change]:
        found: list[Change] = []

        async def look(server: VLLMProcess) -> None:
            found[:] = await self._cycle.changes(server, self._all())

        await do(look)
        return found

    async def _reload(self, do: Acting, versions: list[PolicyVersion]) -> None:
        async def again(server: VLLMProcess) -> None:
            for version in versions:
                adapter_dir = self._versions.adapter_dir(version)
                assert adapter_dir is not None, "only the base model has none"
                await server.unload(version.name)
                await server.load(version.name, adapter_dir)
            # Whoever does not ask us before sending may have been answered: nothing of that may be reused.
            await server.steer(RESET_PREFIX_CACHE, None, "forget its prefix cache")

        await do(again)

    async def _restart(self, do: Acting, life: int) -> None:
        if self._lives.life != life:  # it died over it, and is new already
            return
        await do(lambda server: asyncio.to_thread(server.process.kill))
        await self._lives.alost(life)


def _report(tell: EventListener, message: str, data: dict[str, Any]) -> None:
    logger.warning("%s", message)
    tell(EngineEvent("sleep_changed_answers", message, data))

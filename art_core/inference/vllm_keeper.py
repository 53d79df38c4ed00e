"""The keeper of one vLLM server: starts it, looks at it, starts it again when it is dead, tells what it did.

Invariant: requests reach a server only after it serves every version that the last one served; it has the
same address in every life, and no port is left to others in between.

A watchdog's thread looks at the server every few seconds, and at once when it ends or a client reports that
it was not answered. Whoever acts on the server does so through `Keeper.do`, which waits for a restart and
acts again on what came back.
"""

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.config import EngineConfig
from art_core.errors import EngineError
from art_core.inference.availability import MAX_LIVES, ServerLives
from art_core.inference.engine import EngineEvent, EngineHealth, EventListener
from art_core.inference.processes import ManagedProcess
from art_core.inference.restarts import RestartBudget
from art_core.inference.vllm_command import InstalledVLLM, installed_vllm
from art_core.inference.vllm_process import ServerGoneError, VLLMProcess, reserved_port
from art_core.inference.vllm_stall import StallWatch, read_progress
from art_core.inference.vllm_start import FIRST_PHASE, StartProgress
from art_core.inference.vllm_versions import VersionTable
from art_core.inference.watchdog import Watchdog
from art_core.types import PolicyVersion

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often a server is looked at that nobody complains about."""
PROBE_SECONDS = 0.25
"""How often a server is asked again that did not answer."""
READING_SECONDS = 30.0
"""How often, at most, a server is asked whether it makes progress."""
LONGEST_BREAK = 30.0
"""Seconds before a restart whose last one failed, at most."""

Act = Callable[[VLLMProcess], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Command:
    """What starts a server.

    Attributes:
        arguments: the command line.
        answers_as: the model's name by which it is known to answer.
        note: what was chosen for it, for whoever watches it start.
    """

    arguments: Sequence[str]
    answers_as: str
    note: str = ""


class Keeper:
    """Keeps one server alive.

    Args:
        name: of what is served, for the threads.
        config: how to serve.
        versions: what it serves; restored in each new life.
        command: what to start, given the vLLM and the port; asked again for each life.
        log_dir: where each start leaves its log file.
        on_progress: told again and again while the server starts.
        on_event: told of what happens, from another thread.

    Attributes:
        lives: of the server, for whoever sends requests.
        server: the one that runs, or ran last; None before `start` and after `close`.
        process: the newest that was started, whether it answers yet or not.
        paused: whether a new life begins paused.
        asleep: whether the server is not to be looked at now.
        served: what is served, for the record.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        versions: VersionTable,
        command: Callable[[InstalledVLLM, int], Command],
        log_dir: Path,
        *,
        on_progress: Callable[[StartProgress], None] | None = None,
        on_event: EventListener | None = None,
    ) -> None:
        self._config = config
        self._versions = versions
        self._command = command
        self._log_dir = log_dir
        self._on_progress = on_progress
        self.on_event = on_event
        # What outlives this object (threads, clients) holds the watchdog, which holds it weakly.
        self.watchdog = Watchdog(self._look, interval=LOOK_SECONDS, name=f"vllm-{name}")
        self.lives = ServerLives(self.watchdog.wake)
        self.server: VLLMProcess | None = None
        self.process: ManagedProcess | None = None
        self.paused = False
        self.asleep: Callable[[], bool] = lambda: False
        self.served: Callable[[], Sequence[PolicyVersion]] = versions.served
        self._budget = RestartBudget(config.max_restarts, config.restart_window)
        self._stalls = StallWatch(config.stall_timeout)
        self._next_reading = 0.0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._installed: InstalledVLLM | None = None
        self._reserved: socket.socket | None = None

    # -- life --------------------------------------------------------------------------------------

    async def installed(self) -> InstalledVLLM:
        """The vLLM that is run.

        Raises:
            EngineError: there is none.
        """
        if self._installed is None:
            python = self._config.python or Path(sys.executable)
            self._installed = await asyncio.to_thread(installed_vllm, python)
        return self._installed

    async def start(self) -> None:
        """Start the server; returns once it answers.

        Raises:
            EngineError: it runs already, vLLM is not installed, the port is taken, or it did not come up.
        """
        if self.server is not None:
            raise EngineError(f"vLLM already runs at {self.server.root}; close() it before starting again")
        self._closing.clear()
        installed = await self.installed()
        reserved = reserved_port(self._config)
        try:
            server = await self._start(installed, reserved.getsockname()[1])
        except BaseException:
            reserved.close()
            raise
        self._reserved, self.server = reserved, server
        self._versions.begin(self.lives.life + 1)
        self.lives.begin()
        self.watchdog.start()

    async def _start(self, installed: InstalledVLLM, port: int) -> VLLMProcess:
        """One start, to the point where it answers; what it started has ended if it fails."""
        command = await asyncio.to_thread(self._command, installed, port)
        server = await asyncio.to_thread(self._launch, command, installed, port)
        if self._on_progress is not None:
            self._on_progress(StartProgress(FIRST_PHASE, 0.0, "", server.process.log, note=command.note))
        try:
            await server.wait_until_it_answers(
                command.answers_as, self._config.start_timeout, self._on_progress
            )
        except BaseException:
            await asyncio.shield(asyncio.to_thread(server.process.close))
            raise
        return server

    def _launch(self, command: Command, installed: InstalledVLLM, port: int) -> VLLMProcess:
        with self._lock:
            if self._closing.is_set():
                raise EngineError("vLLM was closed while it was being started")
            server = VLLMProcess.launch(
                command.arguments,
                installed,
                self._config,
                port=port,
                log_dir=self._log_dir,
                on_exit=self.watchdog.wake,
            )
            self.process = server.process
        return server

    async def health(self) -> EngineHealth:
        """Whether the server answers; if not, how it ended and the last lines of its log."""
        if self.server is None:
            return EngineHealth(ok=False, detail="vLLM is not running; call start() first")
        if self.lives.error is not None:
            return EngineHealth(ok=False, detail=str(self.lives.error))
        health = await self.server.health(10.0)
        if health.ok and not self.lives.up:
            return EngineHealth(ok=False, detail="vLLM is being restarted")
        return health

    async def close(self) -> None:
        """Stop the server and all its processes. Closing twice does nothing; it can be started again."""
        with self._lock:
            self._closing.set()
            process = self.process
        if process is not None:
            await asyncio.to_thread(process.close)
        await asyncio.to_thread(self.watchdog.close)
        self.lives.close()
        if self._reserved is not None:
            self._reserved.close()
        self.server = self._reserved = None
        self.paused = False

    # -- acting on the server, whichever life it is in ---------------------------------------------

    def running(self) -> VLLMProcess:
        """The server.

        Raises:
            EngineError: it was not started, or was closed.
        """
        if self.server is None:
            raise EngineError("vLLM is not running; call start() first")
        return self.server

    async def do(self, act: Act) -> int:
        """Do something with the server, again if it dies over it; the life that did it.

        Raises:
            EngineError: vLLM refused, does not come back, or died each time.
        """
        for tries in range(1, MAX_LIVES + 1):
            self.running()
            life = await self.lives.aup()
            try:
                await act(self.running())
            except ServerGoneError:
                if not await self.lives.alost(life) or tries == MAX_LIVES:
                    raise
            else:
                return life
        raise AssertionError("unreachable: the last try returns or raises")

    # -- looking at it -----------------------------------------------------------------------------

    def _look(self) -> None:
        """Look at the server; restart it if it is dead. Runs in the watchdog's thread."""
        if self.server is None or self.lives.error is not None or self.asleep():
            return
        look = self.lives.look()
        try:
            cause = asyncio.run(self._cause_of_death(self.server))
            if cause is None:
                asyncio.run(self._reconcile(self.server))
        except ServerGoneError:
            self.watchdog.wake()
            return
        except EngineError as refused:
            logger.warning("vLLM answers, and refuses to serve what it should: %s", refused)
            cause = None
        if cause is None:
            self.lives.found_well(look)
        elif not self._closing.is_set():
            try:
                asyncio.run(self._revive(self.server, cause))
            except Exception as wrong:
                # Whoever waits must not wait for ever for a watchdog that is at a loss.
                self.lives.end(EngineError(f"vLLM cannot be restarted: {wrong!r}\n{cause}"))
                raise

    async def _cause_of_death(self, server: VLLMProcess) -> str | None:
        """What is wrong with a server beyond repair; None when it answers."""
        silent_since = time.monotonic()
        while not self._closing.is_set():
            health = await server.health(self._config.hang_timeout)
            if health.ok:
                return await self._stall(server)
            if server.process.exit_status is not None:
                return (await server.health(self._config.hang_timeout)).detail  # how it ended
            if time.monotonic() - silent_since >= self._config.hang_timeout:
                return health.detail
            # It may be on its way down: an engine that died takes its HTTP server with it within seconds.
            await asyncio.sleep(PROBE_SECONDS)
        return None

    async def _stall(self, server: VLLMProcess) -> str | None:
        """That its engine is stuck, if it is."""
        now = time.monotonic()
        if now < self._next_reading or self.paused:
            return None
        self._next_reading = now + min(READING_SECONDS, self._stalls.limit / 4)
        if not self._stalls.stalled(read_progress(await server.metrics()), now):
            return None
        return f"vLLM ended no step for {self._stalls.limit:g} s while requests ran" + server.why()

    async def _revive(self, old: VLLMProcess, cause: str) -> None:
        self.lives.down()
        began, failures, why = time.monotonic(), 0, cause
        await asyncio.to_thread(old.process.kill)
        while self._budget.take():
            logger.warning("restarting vLLM: %s", why.partition("\n")[0])
            try:
                server = await self._restarted(int(old.root.rpartition(":")[2]))
            except EngineError as failed:
                why = str(failed)
                await asyncio.to_thread(self._closing.wait, min(LONGEST_BREAK, 2.0**failures))
                failures += 1
                if self._closing.is_set():
                    return
                continue
            self.server, self._stalls = server, StallWatch(self._stalls.limit)
            self._tell_of_restart(old, server, cause, time.monotonic() - began)
            self.lives.begin()
            self.watchdog.wake()  # what was retired while it was restored is found and unloaded
            return
        spent = f"restarted {self._budget.most} times within {self._budget.window:g} s already"
        reason = spent if self._budget.most else "EngineConfig.max_restarts=0"
        error = EngineError(f"{why}\nvLLM is not restarted: {reason}")
        # Told of first, as a restart is: who is woken by the end finds it in the record.
        self.tell(EngineEvent("engine_failed", str(error), {"log": str(old.process.log)}))
        self.lives.end(error)

    async def _restarted(self, port: int) -> VLLMProcess:
        server = await self._start(await self.installed(), port)
        try:
            for version, adapter_dir in self._versions.begin(self.lives.life + 1).items():
                await self._load_again(server, version, adapter_dir)
            if self.paused:
                await server.pause()
        except BaseException:
            await asyncio.shield(asyncio.to_thread(server.process.kill))
            raise
        return server

    async def _reconcile(self, server: VLLMProcess) -> None:
        """Have the server serve what it should, and nothing else."""
        if not self._versions.served():
            return
        moves = self._versions.moves
        names = await server.names()
        if moves % 2 or moves != self._versions.moves:  # what is missing may be about to be loaded again
            return
        lost = self._versions.lost(names)
        for version, adapter_dir in lost.items():
            if await self._load_again(server, version, adapter_dir):
                message = f"{version} was not loaded any more and was published again"
                self.tell(EngineEvent("version_republished", message, {"version": version.name}))
        for name in self._versions.strays(names):
            await server.unload(name)
        if lost:
            # A new life for whoever asked for what was missing.
            self._versions.begin(self.lives.life + 1)
            self.lives.begin()

    async def _load_again(
        self, server: VLLMProcess, version: PolicyVersion, adapter_dir: Path | None
    ) -> bool:
        try:
            await load(server, version, adapter_dir)
        except ServerGoneError:
            raise
        except EngineError as refused:
            # One version that is broken must not keep all others from being served.
            self._versions.drop(version)
            message = f"{version} could not be published again: {refused}"
            logger.error("%s", message)
            self.tell(EngineEvent("version_lost", message, {"version": version.name}))
            return False
        return True

    # -- telling of it -----------------------------------------------------------------------------

    def _tell_of_restart(self, old: VLLMProcess, new: VLLMProcess, cause: str, seconds: float) -> None:
        versions = [version.name for version in self.served()]
        first = cause.partition("\n")[0]
        logger.warning("vLLM answers again after %.0f s and serves %s", seconds, ", ".join(versions))
        data = {
            "cause": first,
            "detail": cause,
            "log": str(old.process.log),
            "new_log": str(new.process.log),
            "seconds": round(seconds, 3),
            "versions": versions,
        }
        self.tell(EngineEvent("engine_restarted", f"vLLM was restarted: {first}", data))

    def tell(self, event: EngineEvent) -> None:
        """Tell whoever listens; a listener that fails is logged."""
        if self.on_event is None:
            return
        try:
            self.on_event(event)
        except Exception:
            logger.exception("an event could not be kept: %s", event.message)


async def load(server: VLLMProcess, version: PolicyVersion, adapter_dir: Path | None) -> None:
    """Have a server load a version; the base model is there from the start."""
    if adapter_dir is not None:
        await server.load(version.name, adapter_dir)

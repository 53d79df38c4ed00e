"""vLLM as an engine: a managed server process and its run-time LoRA endpoints.

Invariant: a version's name answers with that version's weights from `publish` until `retire`, and is
never given to other weights while this engine lives; a server that died or hangs is started again at the same
address, and serves again every version that it served before requests reach it.

The server is a child process with a log file (`vllm_process`); which versions it is to serve is kept here,
not there (`vllm_versions`). Clients talk to it directly at ``base_url`` and ask `VLLMEngine.availability`
whether they can. A watchdog looks at it every few seconds, and at once when it ends or a client reports that
it was not answered.
"""

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import ConfigError, EngineError
from art_core.inference.availability import MAX_LIVES, Availability, ServerLives
from art_core.inference.engine import EngineEvent, EngineHealth, EventListener
from art_core.inference.model_families import Parsers
from art_core.inference.processes import ManagedProcess
from art_core.inference.restarts import RestartBudget
from art_core.inference.vllm_command import (
    InstalledVLLM,
    adapter_rank,
    adapters_kept,
    installed_vllm,
    is_loopback,
    lora_slot_rank,
    server_arguments,
    serving_parsers,
    sleeps,
)
from art_core.inference.vllm_merged import MergedModel
from art_core.inference.vllm_process import ServerGoneError, VLLMProcess, reserved_port
from art_core.inference.vllm_sharing import SharedGpu
from art_core.inference.vllm_sleep import SleepCycle
from art_core.inference.vllm_start import StartProgress
from art_core.inference.vllm_versions import VersionTable
from art_core.inference.watchdog import Watchdog
from art_core.types import PolicyVersion

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often a server is looked at that nobody complains about."""
PROBE_SECONDS = 0.25
"""How often a server is asked again that did not answer."""
LONGEST_BREAK = 30.0
"""Seconds between two restarts of which the first failed, at most."""


class VLLMEngine:
    """Serves one base model and the adapters that are trained on it.

    Args:
        base_model: a model hub name or a directory.
        config: how to serve; ``config.python`` may name another environment's interpreter.
        lora: the adapters' shape; room for them is made at the start.
        served_model: the policy's name; versions are ``<served_model>@<n>``.
        log_dir: where each start leaves its log file.
        on_progress: told again and again while the server starts; vLLM takes from half a minute to several.
        on_event: told of each restart and of versions that had to be published again, from another thread.

    Raises:
        ConfigError: a setting that vLLM cannot honour.
    """

    def __init__(
        self,
        base_model: str,
        config: EngineConfig,
        lora: LoRAConfig,
        served_model: str,
        log_dir: Path,
        *,
        on_progress: Callable[[StartProgress], None] | None = None,
        on_event: EventListener | None = None,
    ) -> None:
        if config.deterministic:
            raise ConfigError(
                "EngineConfig.deterministic: only the embedded engine decodes batch-invariantly; "
                "use kind='embedded', or leave it out"
            )
        self._versions = VersionTable(
            served_model, slot_rank=lora_slot_rank(adapter_rank(config, lora)), room=adapters_kept(config)
        )
        self._base_model = base_model
        self._config = config
        self._lora = lora
        self._served_model = served_model
        self._log_dir = log_dir
        self._on_progress = on_progress
        self.on_event = on_event
        # What outlives this object (threads, clients) holds the watchdog, which holds it weakly.
        self._watchdog = Watchdog(self._look, interval=LOOK_SECONDS, name=f"vllm-{served_model}")
        self._lives = ServerLives(self._watchdog.wake)
        self._budget = RestartBudget(config.max_restarts, config.restart_window)
        self._lock = threading.Lock()
        self._closing = False
        self._paused = False
        self._installed: InstalledVLLM | None = None
        self._reserved: socket.socket | None = None
        self._server: VLLMProcess | None = None
        self._process: ManagedProcess | None = None
        self._merged = (
            MergedModel(base_model, served_model, config, log_dir.parent / "merged")
            if config.publish == "merged"
            else None
        )
        self._shared = (
            SharedGpu(
                SleepCycle(config),
                base=self._merged.current if self._merged else partial(PolicyVersion, served_model, 0),
                lives=self._lives,
                versions=self._versions,
            )
            if config.colocate
            else None
        )

    @property
    def base_url(self) -> str:
        """Where clients connect, ending in ``/v1``; the same in every life of the server.

        Raises:
            EngineError: before `start`.
        """
        if self._server is None:
            raise EngineError("vLLM has not been started; call start() first")
        return f"{self._server.root}/v1"

    @property
    def log_path(self) -> Path | None:
        """The log of the server that runs now, or ran last; None before the first start."""
        return self._process.log if self._process else None

    @property
    def availability(self) -> Availability:
        """To be asked by whoever sends requests: it waits while the server is restarted."""
        return self._lives

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the server; returns once it answers.

        Raises:
            EngineError: vLLM is not installed, the port is taken, or the server did not come up within
                ``config.start_timeout``; the message holds the cause and the log's last lines.
        """
        if self._server is not None:
            raise EngineError(f"vLLM already runs at {self._server.root}; close() it before starting again")
        self._closing = False
        self._installed = await asyncio.to_thread(installed_vllm, self._config.python or Path(sys.executable))
        if self._shared is not None and not sleeps(self._installed, self._config):
            logger.warning("colocate: vLLM %s cannot sleep on a CPU; it only pauses", self._installed.version)
            self._shared = None
        reserved = reserved_port(self._config)
        try:
            server = await self._start_process(reserved.getsockname()[1])
        except BaseException:
            reserved.close()
            raise
        self._reserved, self._server = reserved, server
        self._versions.begin(self._lives.life + 1)
        self._lives.begin()
        self._watchdog.start()

    async def _start_process(self, port: int) -> VLLMProcess:
        """One start, to the point where it answers; what it started has ended if it fails."""
        server = await asyncio.to_thread(self._launch, port)
        try:
            await server.wait_until_it_answers(
                self._base_version().name, self._config.start_timeout, self._on_progress
            )
        except BaseException:
            await asyncio.shield(asyncio.to_thread(server.process.close))
            raise
        return server

    def _base_version(self) -> PolicyVersion:
        """What the weights that the server starts with answer as."""
        return self._merged.version if self._merged else PolicyVersion(self._served_model, 0)

    def _launch(self, port: int) -> VLLMProcess:
        assert self._installed is not None
        arguments = server_arguments(
            self._installed,
            base_model=self._merged.model if self._merged else self._base_model,
            served_model=self._served_model,
            version=self._base_version().number,
            config=self._config,
            lora=self._lora,
            port=port,
            parsers=self._parsers(self._installed),
        )
        with self._lock:
            if self._closing:
                raise EngineError("vLLM was closed while it was being started")
            server = VLLMProcess.launch(
                arguments,
                self._installed,
                self._config,
                port=port,
                log_dir=self._log_dir,
                on_exit=self._watchdog.wake,
            )
            self._process = server.process
        return server

    def _parsers(self, installed: InstalledVLLM) -> Parsers:
        parsers = serving_parsers(installed, self._base_model, self._config)
        logger.info("%s", parsers.why)
        return parsers

    async def health(self) -> EngineHealth:
        """Whether the server answers; if not, how it ended and the last lines of its log."""
        if self._server is None:
            return EngineHealth(ok=False, detail="vLLM is not running; call start() first")
        if self._lives.error is not None:
            return EngineHealth(ok=False, detail=str(self._lives.error))
        health = await self._server.health(10.0)
        if health.ok and not self._lives.up:
            return EngineHealth(ok=False, detail="vLLM is being restarted")
        return health

    async def close(self) -> None:
        """Stop the server and all its processes. Closing twice does nothing; it can be started again."""
        with self._lock:
            self._closing = True
            process = self._process
        if process is not None:
            await asyncio.to_thread(process.close)
        await asyncio.to_thread(self._watchdog.close)
        self._lives.close()
        if self._reserved is not None:
            self._reserved.close()
        self._server = self._reserved = None
        self._paused = False
        self._versions.clear()

    # -- versions ----------------------------------------------------------------------------------

    async def publish(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        """Serve a version from now on; requests in flight are not touched.

        While the server is being restarted this waits for it.

        Args:
            version: of this engine's model; each number for the same weights only.
            adapter_dir: a PEFT adapter directory that stays as it is until the version is retired; None:
                the base model, which vLLM serves as version 0.

        Raises:
            EngineError: the version belongs to another model or to other weights, is served already, there
                is no room for it, or loading failed.
        """
        (self._merged or self._versions).check(version, adapter_dir)
        self._running()
        if self._shared is not None:
            await self._shared.take_back(self._do, self._tell)
        if self._merged is not None:
            await self._merged.publish(version, adapter_dir, do=self._do, lives=self._lives)
            return
        self._versions.add(version, adapter_dir)
        try:
            for _ in range(MAX_LIVES):
                life = await self._do(lambda server: _load(server, version, adapter_dir))
                if self._versions.confirm(version, life):
                    return
            raise EngineError(f"{version}: vLLM died {MAX_LIVES} times while it loaded {adapter_dir}")
        except BaseException:
            self._versions.drop(version)
            raise

    async def retire(self, version: PolicyVersion) -> None:
        """Stop serving a version. Requests that vLLM has accepted end on it; the base model's name stays.

        Raises:
            EngineError: the version is not served, or vLLM refused.
        """
        if self._merged is not None:  # the next one takes its place
            return
        self._versions.remove(version)
        # A server that is down has nothing loaded, and is not told to load this one again.
        # One that sleeps cannot unload; it is told when it is next looked at.
        if version.number != 0 and self._lives.up and not self._asleep():
            await self._do(lambda server: server.unload(version.name))

    def versions(self) -> Sequence[PolicyVersion]:
        """What the server has loaded, as last seen, oldest first; nothing while it is down."""
        return (self._merged or self._versions).served() if self._lives.up else ()

    # -- pausing -----------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Let requests in flight end and hold new ones in vLLM's queue until `resume`.

        With ``EngineConfig.colocate`` vLLM then sleeps until `publish` or `resume`.

        On an address that other machines can reach this does nothing: vLLM offers it only together with
        endpoints that must stay private.
        """
        if not self._can_pause():
            return
        if self._shared is not None:
            await self._shared.lend(self._do, _pause, _resume)
        else:
            self._paused = True
            await self._do(_pause)

    async def resume(self) -> None:
        """Take requests again."""
        if not self._can_pause():
            return
        if self._shared is not None:
            await self._shared.take_back(self._do, self._tell)
        self._paused = False
        await self._do(_resume)
        if self._shared is not None:
            self._shared.release()

    def _asleep(self) -> bool:
        return self._shared is not None and self._shared.lent

    def _can_pause(self) -> bool:
        if is_loopback(self._config.host):
            return True
        logger.info("vLLM listens on %s: requests are not held", self._config.host)
        return False

    # -- asking the server, whichever life it is in ------------------------------------------------

    def _running(self) -> VLLMProcess:
        if self._server is None:
            raise EngineError("vLLM is not running; call start() first")
        return self._server

    async def _do(self, act: Callable[[VLLMProcess], Any]) -> int:
        """Do something with the server, again if it dies over it; the life that did it.

        Raises:
            EngineError: vLLM refused, does not come back, or died each time.
        """
        for tries in range(1, MAX_LIVES + 1):
            self._running()
            life = await self._lives.aup()
            try:
                await act(self._running())
            except ServerGoneError:
                if not await self._lives.alost(life) or tries == MAX_LIVES:
                    raise
            else:
                return life
        raise AssertionError("unreachable: the last try returns or raises")

    # -- the watchdog's part -----------------------------------------------------------------------

    def _look(self) -> None:
        """Look at the server; restart it if it is dead. Runs in the watchdog's thread."""
        if self._server is None or self._lives.error is not None or self._asleep():
            return
        look = self._lives.look()
        try:
            cause = asyncio.run(self._cause_of_death(self._server))
            if cause is None:
                asyncio.run(self._reconcile(self._server))
                self._lives.found_well(look)
            elif not self._closing:
                asyncio.run(self._revive(cause))
        except ServerGoneError:
            self._watchdog.wake()
        except EngineError as wrong:
            if not self._closing:
                self._lives.end(wrong)
                raise

    async def _cause_of_death(self, server: VLLMProcess) -> str | None:
        """What is wrong with a server beyond repair; None when it answers."""
        silent_since = time.monotonic()
        while not self._closing:
            health = await server.health(self._config.hang_timeout)
            if health.ok:
                return None
            if server.process.exit_status is not None:
                return (await server.health(self._config.hang_timeout)).detail  # how it ended
            if time.monotonic() - silent_since >= self._config.hang_timeout:
                return health.detail
            # It may be on its way down: an engine that died takes its HTTP server with it within seconds.
            await asyncio.sleep(PROBE_SECONDS)
        return None

    async def _revive(self, cause: str) -> None:
        self._lives.down()
        old, began, failures = self._running(), time.monotonic(), 0
        while self._budget.take():
            await asyncio.to_thread(old.process.kill)
            logger.warning("restarting vLLM: %s", cause)
            try:
                server = await self._start_process(int(old.root.rpartition(":")[2]))
                await self._restore(server)
            except EngineError as failed:
                if self._closing:
                    return
                cause = str(failed)
                failures += 1
                if isinstance(failed, ServerGoneError) or failures:
                    await asyncio.sleep(min(LONGEST_BREAK, 2.0 ** (failures - 1)))
                continue
            self._server = server
            self._tell_of_restart(old, server, cause, time.monotonic() - began)
            self._lives.begin()
            return
        await asyncio.to_thread(old.process.kill)
        again = f"restarted {self._budget.most} times within {self._budget.window:g} s already"
        error = EngineError(
            f"{cause}\nvLLM is not restarted: "
            + (again if self._budget.most else "EngineConfig.max_restarts=0")
        )
        self._lives.end(error)
        self._tell(EngineEvent("engine_failed", str(error), {"log": str(old.process.log)}))

    async def _restore(self, server: VLLMProcess) -> None:
        """Bring a new server to where the last one was."""
        for version, adapter_dir in self._versions.begin(self._lives.life + 1).items():
            await self._load_again(server, version, adapter_dir)
        if self._paused:
            await _pause(server)

    async def _reconcile(self, server: VLLMProcess) -> None:
        """Have the server serve what it should, and nothing else."""
        if not self._versions.served():
            return
        names = await server.names()
        lost = self._versions.lost(names)
        for version, adapter_dir in lost.items():
            if await self._load_again(server, version, adapter_dir):
                message = f"{version} was not loaded any more and was published again"
                self._tell(EngineEvent("version_republished", message, {"version": version.name}))
        for name in self._versions.strays(names):
            await server.unload(name)
        if lost:
            # A new life for whoever asked for what was missing.
            self._versions.begin(self._lives.life + 1)
            self._lives.begin()

    async def _load_again(
        self, server: VLLMProcess, version: PolicyVersion, adapter_dir: Path | None
    ) -> bool:
        try:
            await _load(server, version, adapter_dir)
        except ServerGoneError:
            raise
        except EngineError as refused:
            # One version that is broken must not keep all others from being served.
            self._versions.drop(version)
            message = f"{version} could not be published again: {refused}"
            logger.error("%s", message)
            self._tell(EngineEvent("version_lost", message, {"version": version.name}))
            return False
        return True

    def _tell_of_restart(self, old: VLLMProcess, new: VLLMProcess, cause: str, seconds: float) -> None:
        versions = [version.name for version in self._versions.served()]
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
        self._tell(EngineEvent("engine_restarted", f"vLLM was restarted: {first}", data))

    def _tell(self, event: EngineEvent) -> None:
        if self.on_event is None:
            return
        try:
            self.on_event(event)
        except Exception:
            logger.exception("an event could not be kept: %s", event.message)


async def _load(server: VLLMProcess, version: PolicyVersion, adapter_dir: Path | None) -> None:
    if adapter_dir is not None:  # the base model is there from the start
        await server.load(version.name, adapter_dir)


async def _resume(server: VLLMProcess) -> None:
    await server.steer("/resume", None, "resume")


async def _pause(server: VLLMProcess) -> None:
    await server.steer("/pause?mode=wait&clear_cache=false", None, "pause", timeout=None)

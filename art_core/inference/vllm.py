"""vLLM as an engine: a managed server process and its run-time LoRA endpoints.

Invariant: a version's name answers with that version's weights from `publish` until `retire`, and is
never given to other weights while this engine lives; a server that died or hangs is started again at the same
address, and serves again every version that it served before requests reach it.

The server is a child process that a keeper looks after (`vllm_keeper`); which versions it is to serve is
known here, not there (`vllm_versions`). Clients talk to it directly at ``base_url`` and ask
`VLLMEngine.availability` whether they can.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import ConfigError, EngineError
from art_core.inference.availability import MAX_LIVES, Availability
from art_core.inference.engine import EngineHealth, EventListener
from art_core.inference.vllm_command import (
    InstalledVLLM,
    adapter_rank,
    adapters_kept,
    is_loopback,
    lora_slot_rank,
    server_arguments,
    serving_parsers,
    sleeps,
)
from art_core.inference.vllm_keeper import Command, Keeper, load
from art_core.inference.vllm_merged import MergedModel
from art_core.inference.vllm_process import VLLMProcess
from art_core.inference.vllm_sharing import SharedGpu
from art_core.inference.vllm_sleep import SleepCycle
from art_core.inference.vllm_start import StartProgress
from art_core.inference.vllm_versions import VersionTable
from art_core.types import PolicyVersion

logger = logging.getLogger(__name__)


class VLLMEngine:
    """Serves one base model and the adapters that are trained on it.

    Args:
        base_model: a model hub name or a directory.
        config: how to serve; ``config.python`` may name another environment's interpreter.
        lora: the adapters' shape; room for them is made at the start. None: versions are whole models.
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
        lora: LoRAConfig | None,
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
        whole = lora is None
        if lora is None:
            if config.publish != "merged":
                raise ConfigError(
                    f"lora=None with publish={config.publish!r}: versions are then whole models, which vLLM "
                    "can only take in place of one another; give publish='merged', or train an adapter"
                )
            lora = LoRAConfig()  # whose shape a server of merged weights does not ask for
        self._versions = VersionTable(
            served_model, slot_rank=lora_slot_rank(adapter_rank(config, lora)), room=adapters_kept(config)
        )
        self._config = config
        self._merged = (
            MergedModel(base_model, served_model, config, log_dir.parent / "merged", whole=whole)
            if config.publish == "merged"
            else None
        )
        self._keeper = Keeper(
            served_model,
            config,
            self._versions,
            partial(_command, base_model, served_model, config, lora, self._merged),
            log_dir,
            on_progress=on_progress,
            on_event=on_event,
        )
        if self._merged is not None:
            self._keeper.served = self._merged.served
        self._shared = (
            SharedGpu(
                SleepCycle(config),
                base=self._merged.current if self._merged else partial(PolicyVersion, served_model, 0),
                lives=self._keeper.lives,
                versions=self._versions,
                patience=config.hold_timeout,
            )
            if config.colocate
            else None
        )

    @property
    def on_event(self) -> EventListener | None:
        """Told of each restart and of versions that had to be published again, from another thread."""
        return self._keeper.on_event

    @on_event.setter
    def on_event(self, listener: EventListener | None) -> None:
        self._keeper.on_event = listener

    @property
    def base_url(self) -> str:
        """Where clients connect, ending in ``/v1``; the same in every life of the server.

        Raises:
            EngineError: before `start`.
        """
        if self._keeper.server is None:
            raise EngineError("vLLM has not been started; call start() first")
        return f"{self._keeper.server.root}/v1"

    @property
    def log_path(self) -> Path | None:
        """The log of the server that runs now, or ran last; None before the first start."""
        return self._keeper.process.log if self._keeper.process else None

    @property
    def pid(self) -> int | None:
        """The server's process, which leads the group of all that it starts; None before the first start."""
        return self._keeper.process.pid if self._keeper.process else None

    @property
    def one_at_a_time(self) -> bool:
        """Whether a version takes the place of the one before (``publish="merged"``)."""
        return self._merged is not None

    @property
    def availability(self) -> Availability:
        """To be asked by whoever sends requests: it waits while the server is restarted."""
        return self._keeper.lives

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the server; returns once it answers.

        Raises:
            EngineError: vLLM is not installed, the port is taken, or the server did not come up within
                ``config.start_timeout``; the message holds the cause and the log's last lines.
        """
        if self._shared is not None:
            installed = await self._keeper.installed()
            if sleeps(installed, self._config):
                shared = self._shared
                self._keeper.asleep = lambda: shared.lent
            else:
                logger.warning("colocate: vLLM %s cannot sleep on a CPU; it only pauses", installed.version)
                self._shared = None
        await self._keeper.start()

    async def health(self) -> EngineHealth:
        """Whether the server answers; if not, how it ended and the last lines of its log."""
        return await self._keeper.health()

    async def close(self) -> None:
        """Stop the server and all its processes. Closing twice does nothing; it can be started again."""
        await self._keeper.close()
        self._versions.clear()
        if self._merged is not None:
            await asyncio.to_thread(self._merged.clear)

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
        self._keeper.running()
        if self._shared is not None:
            await self._shared.take_back(self._keeper.do, self._keeper.tell)
        if self._merged is not None:
            await self._merged.publish(version, adapter_dir, do=self._keeper.do, lives=self._keeper.lives)
            return
        self._versions.add(version, adapter_dir)
        try:
            for _ in range(MAX_LIVES):
                life = await self._keeper.do(lambda server: load(server, version, adapter_dir))
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
        if version.number != 0 and self._keeper.lives.up and not self._keeper.asleep():
            await self._keeper.do(lambda server: server.unload(version.name))

    def versions(self) -> Sequence[PolicyVersion]:
        """What the server has loaded, as last seen, oldest first; nothing while it is down."""
        return (self._merged or self._versions).served() if self._keeper.lives.up else ()

    # -- pausing -----------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Let requests in flight end and hold new ones in vLLM's queue until `resume`.

        With ``EngineConfig.colocate`` vLLM then sleeps until `publish` or `resume`, and new requests wait
        at its door until `resume`, each for ``EngineConfig.hold_timeout`` seconds at most.

        On an address that other machines can reach this does nothing: vLLM offers it only together with
        endpoints that must stay private.
        """
        if not self._can_pause():
            return
        if self._shared is not None:
            await self._shared.lend(self._keeper.do, VLLMProcess.pause, VLLMProcess.resume)
        else:
            self._keeper.paused = True
            await self._keeper.do(VLLMProcess.pause)

    async def resume(self) -> None:
        """Take requests again."""
        if not self._can_pause():
            return
        if self._shared is not None:
            await self._shared.take_back(self._keeper.do, self._keeper.tell)
        self._keeper.paused = False
        await self._keeper.do(VLLMProcess.resume)
        if self._shared is not None:
            await self._shared.release(self._keeper.do)

    def _can_pause(self) -> bool:
        if is_loopback(self._config.host):
            return True
        logger.info("vLLM listens on %s: requests are not held", self._config.host)
        return False


def _command(
    base_model: str,
    served_model: str,
    config: EngineConfig,
    lora: LoRAConfig,
    merged: MergedModel | None,
    installed: InstalledVLLM,
    port: int,
) -> Command:
    """What starts a server; with ``merged``, on the weights that were published last."""
    parsers = serving_parsers(installed, base_model, config)
    logger.info("%s", parsers.why)
    base = merged.version if merged else PolicyVersion(served_model, 0)
    arguments = server_arguments(
        installed,
        base_model=merged.model if merged else base_model,
        served_model=served_model,
        version=base.number,
        config=config,
        lora=lora,
        port=port,
        parsers=parsers,
    )
    return Command(arguments, answers_as=base.name, note=parsers.why)

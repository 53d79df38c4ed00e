"""Merged versions: one set of full weights at a time, each version's adapter folded into the base model.

Invariant: a name answers with its own weights or not at all. There is one version; its name changes in the
server together with the weights, while no request is inside, and never goes back.

An adapter that is served beside the base model costs time with every token; merged weights cost none, but
each version takes a copy of the model on disk and a reload. `MergedModel.publish` folds the adapter in while
the server goes on, then shuts its door (`art_versions`, a middleware inside it), has it read the new weights
in place, drops the cached prefixes, and opens the door under the new name. A server that cannot reload is
restarted on the new weights. LoRA is switched off in such a server: its layers do not take new base weights
in older versions (vLLM issue 39934).
"""

import asyncio
import itertools
import logging
import os
import shutil
from pathlib import Path

from art_core.config import EngineConfig
from art_core.durable import process_alive
from art_core.errors import ConfigError, EngineError
from art_core.inference.availability import ServerLives
from art_core.inference.merging import is_model, merge
from art_core.inference.vllm_command import is_loopback
from art_core.inference.vllm_compat import RESET_PREFIX_CACHE, RESUME, WORKERS
from art_core.inference.vllm_process import VLLMProcess
from art_core.inference.vllm_sharing import Acting
from art_core.types import PolicyVersion

logger = logging.getLogger(__name__)

RELOAD_TIMEOUT = 900.0
"""Seconds that requests in flight may take to end, and again the reading of the new weights."""


_ENGINES = itertools.count(1)


class MergedModel:
    """The version that a server has, and the weights to start it on.

    Args:
        base_model: a hub name or a directory.
        served_model: the versions' name before ``@``.
        config: how the server is run.
        directory: where merged models are written, in a folder of this engine's own; each is deleted when
            the next one is served, and the last one by `clear`.
        whole: versions are whole models, which are read where they lie.

    Raises:
        ConfigError: settings under which versions cannot be told apart.
    """

    def __init__(
        self,
        base_model: str,
        served_model: str,
        config: EngineConfig,
        directory: Path,
        *,
        whole: bool = False,
    ) -> None:
        if not is_loopback(config.host):
            raise ConfigError(
                f"publish='merged' with host={config.host!r}: reloading is one of vLLM's development "
                "endpoints, which no other machine may reach; listen on 127.0.0.1 behind a gateway"
            )
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"publish='merged' with data_parallel_size={config.data_parallel_size}: its API processes "
                "cannot be renamed as one; use replicas, or publish='adapter'"
            )
        self.version = PolicyVersion(served_model, 0)
        self.model = base_model
        self._base_model = base_model
        self._directory = directory / f"{os.getpid()}-{next(_ENGINES)}"
        self._published = False
        self._whole = whole
        self._patience = config.hold_timeout

    @property
    def names(self) -> tuple[str, str]:
        """What the server calls its weights."""
        return self.version.name, self.version.model

    def current(self) -> PolicyVersion:
        """What the server's weights are."""
        return self.version

    def served(self) -> tuple[PolicyVersion, ...]:
        """The one that is served; none before the first was published."""
        return (self.version,) if self._published else ()

    def check(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        """Whether a version can be the next one.

        Raises:
            EngineError: it cannot; nothing was changed.
        """
        if version.model != self.version.model:
            raise EngineError(f"{version}: this engine serves versions of {self.version.model!r}")
        if version.number < self.version.number or (self._published and version == self.version):
            raise EngineError(
                f"{version}: publish='merged' serves one version at a time, {self.version} now, and never "
                "goes back; publish='adapter' serves several side by side"
            )
        if (adapter_dir is None) != (version.number == 0):
            raise EngineError(f"{version}: version 0 is the base model, and all others have an adapter")

    async def publish(
        self, version: PolicyVersion, adapter_dir: Path | None, *, do: Acting, lives: ServerLives
    ) -> None:
        """Serve a version in place of the one before it. Requests in flight end first, new ones wait.

        Args:
            version: a later one than that which is served.
            adapter_dir: of PEFT, or of a whole model, which then must stay as long as it is served; None:
                the base model, which is there from the start.
            do: acts on the server.
            lives: of the server, whose clients are held meanwhile.

        Raises:
            EngineError: it cannot be the next version, or the server does not come back with it.
            ConfigError: the adapter cannot be merged.
        """
        self.check(version, adapter_dir)
        if adapter_dir is None:
            self._published = True
            return
        if self._whole and not is_model(adapter_dir):
            raise EngineError(f"{version}: {adapter_dir} holds no whole model, which this engine serves")
        target = adapter_dir
        if not self._whole:
            target = self._directory / version.name
            await asyncio.to_thread(self._merge, adapter_dir, target)
        before = self.model
        lives.hold(self._patience)
        try:
            # From here on a server that dies comes back with the new one.
            self.model, self.version, self._published = str(target), version, True
            life = lives.life
            try:
                await do(self._reload)
            except EngineError as refused:  # also one that is too slow: which weights it has is not known
                logger.warning("%s is served by a restart: %s", version, refused)
                await do(lambda server: asyncio.to_thread(server.process.kill))
                await lives.alost(life)
        finally:
            lives.release()
        if Path(before).is_relative_to(self._directory):  # neither the base model nor somebody's checkpoint
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    def clear(self) -> None:
        """The server is gone for good: what it was started on is, too."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self.model, self.version = self._base_model, PolicyVersion(self.version.model, 0)
        self._published = False

    def _merge(self, adapter_dir: Path, target: Path) -> None:
        _remove_orphans(self._directory.parent)
        shutil.rmtree(target, ignore_errors=True)  # of a publish that was broken off
        merge(base_directory(self._base_model), adapter_dir, target)

    async def _reload(self, server: VLLMProcess) -> None:
        # Requests that a pause holds are inside: they must go on, on the old weights, to come out.
        await server.steer(RESUME, None, "resume")
        await server.shut_door(self._patience, within=RELOAD_TIMEOUT)
        call = {"method": "reload_weights", "kwargs": {"weights_path": self.model}}
        await server.steer(WORKERS, call, f"read the weights of {self.version}", RELOAD_TIMEOUT)
        await server.steer(RESET_PREFIX_CACHE, None, "forget its prefix cache")
        await server.steer("/art/version", {"names": list(self.names)}, f"take the name {self.version}")
        names = await server.names()
        if set(names) != set(self.names):
            raise EngineError(f"vLLM calls itself {sorted(names)}, not {sorted(self.names)}")


def _remove_orphans(directory: Path) -> None:
    """Delete what processes left that were killed: each is as large as the model."""
    for left in directory.iterdir() if directory.is_dir() else ():
        pid = left.name.partition("-")[0]
        if pid.isdigit() and not process_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def base_directory(base_model: str) -> Path:
    """Where a base model's files are on this machine.

    Raises:
        ConfigError: it is not here.
    """
    if Path(base_model).is_dir():
        return Path(base_model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(base_model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as absent:
        raise ConfigError(
            f"{base_model!r} is not on this machine, and publish='merged' needs its files: {absent}"
        ) from absent

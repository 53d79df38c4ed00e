"""Serving: which versions of a model an engine serves, and until when.

Invariant: a version is current only once the engine serves it; a version that is held is neither retired nor
is its checkpoint pruned, and one that is retired is not leased again before it is served again.

`publish` makes the next version current, `tidy` lets go of what nobody needs; `hold` serves an older one
beside it for as long as somebody wants it.
"""

import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from art_core.config import RetentionConfig
from art_core.errors import CheckpointError, EngineError
from art_core.inference.endpoint import VersionLeases
from art_core.inference.engine import Engine, Replacing
from art_core.types import PolicyVersion

logger = logging.getLogger(__name__)

SERVED_VERSIONS = 2
"""The current version, and the one before it for rollouts that are still going."""


class Serving:
    """The versions of one model on one engine.

    Args:
        model: the policy's name.
        engine: who serves it.
        directory: of its checkpoints.
        keep: which checkpoints stay on disk.
        base_adapter: writes an adapter that changes nothing, for an engine to which the base model is an
            adapter like others; None where version 0 is the base model itself.
        scores: what the best checkpoints are kept by, by version; looked at when checkpoints are deleted.

    Attributes:
        current: the version that is served to whoever names none.
        recorded: the newest number on record, whose checkpoint may be gone.
    """

    def __init__(
        self,
        model: str,
        engine: Engine,
        directory: Path,
        keep: RetentionConfig,
        *,
        base_adapter: Callable[[], Path] | None = None,
        scores: Mapping[int, float] | None = None,
    ) -> None:
        self.current = PolicyVersion(model, 0)
        self.recorded = 0
        self._model = model
        self._engine = engine
        self._directory = directory
        self._keep = keep
        self._base_adapter = base_adapter
        self._scores = scores
        self._leases = VersionLeases()
        self._served: list[PolicyVersion] = []
        self._changing = asyncio.Lock()

    def lease(self, version: PolicyVersion | None = None) -> AbstractContextManager[PolicyVersion]:
        """Hold a version (None: the current one) for the length of a call or of a rollout."""
        return self._leases.lease(version or self.current)

    def next_version(self) -> PolicyVersion:
        """The number that no version has had: here, on record, or in a checkpoint that was never served."""
        newest = max((self.current.number, self.recorded, *self._checkpoints()))
        return PolicyVersion(self._model, newest + 1)

    async def publish(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        """Serve a version and make it current.

        Raises:
            EngineError: the engine refuses it; what was current still is.
        """
        async with self._changing:
            await self._serve(version, adapter_dir)
            self.current = version

    async def tidy(self) -> None:
        """Retire and prune what nobody needs; not while the engine is paused.

        An engine may wait for the last requests of what it retires, and a pause holds them.
        """
        async with self._changing:
            await self._let_go()

    async def hold(self, number: int) -> Callable[[], Awaitable[None]]:
        """Serve a version beside the current one; what is returned lets it go.

        Raises:
            CheckpointError: its adapter is not on disk any more.
            EngineError: the engine refuses it.
        """
        version = PolicyVersion(self._model, number)
        held = ExitStack()
        async with self._changing:
            if version not in self._served or self._replaced(version):
                await self._serve(version, await asyncio.to_thread(self._adapter_of, version))
            held.enter_context(self._leases.lease(version))

        async def release() -> None:
            held.close()
            await self.tidy()

        return release

    async def _serve(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        await self._engine.publish(version, adapter_dir)
        self._served.append(version)
        self._leases.open(version)

    async def _let_go(self) -> None:
        for old in tuple(self._served):
            far = self.current.number - old.number >= SERVED_VERSIONS or old.number > self.current.number
            if far or self._replaced(old):
                await self._retire(old)
        await asyncio.to_thread(self._prune)

    def _replaced(self, version: PolicyVersion) -> bool:
        """Whether an engine that has room for one version has given this one's place to the next."""
        single = isinstance(self._engine, Replacing) and self._engine.one_at_a_time
        return single and version.number < self.current.number

    async def _retire(self, version: PolicyVersion) -> None:
        if not self._leases.close(version):
            return
        self._served.remove(version)
        try:
            await self._engine.retire(version)
        except EngineError as refused:
            # It takes up room and answers nobody of ours; the next version must not fail over that.
            logger.warning("%s could not be retired: %s", version, refused)

    def _prune(self) -> None:
        from art_core.training import checkpoints

        served = {version.number for version in self._served}
        checkpoints.prune(self._directory, self._keep, served, self._scores)

    def _checkpoints(self) -> dict[int, Path]:
        from art_core.training import checkpoints

        found = checkpoints.list_checkpoints(self._directory)
        return {checkpoints.number_of(path): path for path in found}

    def _adapter_of(self, version: PolicyVersion) -> Path | None:
        from art_core.training import checkpoints

        if version.number == 0:
            return None if self._base_adapter is None else self._base_adapter()
        kept = self._checkpoints()
        if version.number not in kept:
            raise CheckpointError(
                f"{version} is not on disk; there are {', '.join(map(str, sorted(kept))) or 'none'} in "
                f"{self._directory} (LocalBackend(keep_checkpoints=...) says which are kept)"
            )
        return checkpoints.trained_dir(kept[version.number])


def write_base_adapter(save: Callable[[Path], None], directory: Path) -> Path:
    """An adapter that changes nothing, written once: the base model, to an engine that serves snapshots.

    Args:
        save: writes the training adapter as a PEFT directory; its "B" factors become zero.
        directory: where it goes, and stays.
    """
    from safetensors.torch import load_file, save_file

    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".writing-") as scratch:
            written = Path(scratch) / "adapter"
            save(written)
            weights = load_file(written / "adapter_model.safetensors")
            zeroed = {k: w.zero_() if "lora_B" in k else w for k, w in weights.items()}
            save_file(zeroed, written / "adapter_model.safetensors", metadata={"format": "pt"})
            written.rename(directory)
    return directory

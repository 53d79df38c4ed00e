"""The versions that a vLLM server is to serve, whichever life of it that is.

Invariant: a version's name is never given to other weights (vLLM's prefix cache may be keyed by that name),
and a version counts as served only in a life of the server that is known to have loaded it.

`add` reserves a name while its adapter is loaded, `confirm` makes it served; a new life starts with `begin`,
which says what it must load first. Thread-safe: the engine's watchdog restores what callers published.
"""

import contextlib
import json
import threading
from collections.abc import Collection, Generator
from dataclasses import dataclass
from pathlib import Path

from art_core.errors import EngineError
from art_core.types import PolicyVersion

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(slots=True)
class _Entry:
    """What a version is made of, and whether the server of this life has it."""

    adapter_dir: Path | None
    served: bool = False


class VersionTable:
    """Which versions of one model are to be served.

    Args:
        model: the versions' name before ``@``.
        slot_rank: the largest rank that the server has room for.
        room: the most adapters that it keeps loaded.
    """

    def __init__(self, model: str, *, slot_rank: int, room: int) -> None:
        self._model = model
        self._slot_rank = slot_rank
        self._room = room
        self._lock = threading.Lock()
        self._life = 0
        self._moves = 0
        self._entries: dict[PolicyVersion, _Entry] = {}
        self._used: dict[PolicyVersion, object] = {}

    def check(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        """Whether a version can be served at all.

        Raises:
            EngineError: it cannot; nothing was changed.
        """
        if version.model != self._model:
            raise EngineError(f"{version}: this engine serves versions of {self._model!r}")
        if adapter_dir is None:
            if version.number != 0:
                raise EngineError(
                    f"{version} without an adapter: vLLM serves the base model as version 0 only"
                )
        elif version.number == 0:
            raise EngineError(
                f"{version} is the base model's name on vLLM; publish {adapter_dir} as version 1 or later"
            )
        else:
            self._check_adapter(version, adapter_dir)

    def _check_adapter(self, version: PolicyVersion, adapter_dir: Path) -> None:
        try:
            settings = json.loads((adapter_dir / "adapter_config.json").read_text())
        except (OSError, ValueError) as unreadable:
            raise EngineError(
                f"{version}: {adapter_dir} is not a PEFT adapter directory: {unreadable}"
            ) from unreadable
        if (rank := settings.get("r", 0)) > self._slot_rank:
            raise EngineError(
                f"{version}: {adapter_dir} has rank {rank}, but vLLM was started with room for rank "
                f"{self._slot_rank}; start the engine with LoRAConfig(rank={rank}) or "
                f"EngineConfig(max_lora_rank={rank})"
            )

    def add(self, version: PolicyVersion, adapter_dir: Path | None) -> None:
        """Reserve a version's name; it is not served before `confirm`.

        Raises:
            EngineError: the name is in use, belongs to other weights, or there is no room.
        """
        weights = _identity(adapter_dir)
        with self._lock:
            if version in self._entries:
                raise EngineError(f"{version} was already published, and is still served; retire it first")
            if self._used.get(version, weights) != weights:
                raise EngineError(
                    f"{version} was already published from other weights; vLLM may keep cached prefixes "
                    "under a name, so new weights need a new version number"
                )
            others = [str(v) for v, entry in self._entries.items() if entry.adapter_dir is not None]
            if adapter_dir is not None and len(others) >= self._room:
                raise EngineError(
                    f"{version}: vLLM keeps {self._room} adapters loaded (EngineConfig.max_cpu_loras), and "
                    f"serves {', '.join(others)}; retire one of them, or start it with room for more"
                )
            self._entries[version] = _Entry(adapter_dir)
            self._used[version] = weights

    def confirm(self, version: PolicyVersion, life: int) -> bool:
        """The server of this life has loaded it; False when a later life has begun, which has not."""
        with self._lock:
            if life != self._life or version not in self._entries:
                return False
            self._entries[version].served = True
            return True

    def drop(self, version: PolicyVersion) -> None:
        """It could not be loaded: its name is free again."""
        with self._lock:
            self._entries.pop(version, None)
            self._used.pop(version, None)

    def remove(self, version: PolicyVersion) -> None:
        """It is not to be served any more.

        Raises:
            EngineError: it was not.
        """
        with self._lock:
            if version not in self._entries:
                served = ", ".join(map(str, self._entries)) or "none"
                raise EngineError(f"{version} is not served; served: {served}")
            del self._entries[version]

    def begin(self, life: int) -> dict[PolicyVersion, Path | None]:
        """A new life has loaded nothing yet; what it must load before requests may come.

        Versions that are being loaded now are left to whoever loads them, who will find out at `confirm`.
        """
        with self._lock:
            self._life = life
            wanted = {v: entry.adapter_dir for v, entry in self._entries.items() if entry.served}
        return wanted

    def adapter_dir(self, version: PolicyVersion) -> Path | None:
        """Where a version's adapter lies; None for the base model, or a version that is not to be served."""
        with self._lock:
            entry = self._entries.get(version)
            return entry.adapter_dir if entry else None

    @contextlib.contextmanager
    def reloading(self) -> Generator[None, None, None]:
        """While what is served is unloaded and loaded again, on purpose."""
        self._move()
        try:
            yield
        finally:
            self._move()

    @property
    def moves(self) -> int:
        """Reloads that began plus those that ended: odd while one is under way."""
        return self._moves

    def _move(self) -> None:
        with self._lock:
            self._moves += 1

    def lost(self, loaded: Collection[str]) -> dict[PolicyVersion, Path | None]:
        """Versions that should be loaded and are not, going by the names that the server has."""
        with self._lock:
            return {
                v: entry.adapter_dir
                for v, entry in self._entries.items()
                if entry.served and v.name not in loaded
            }

    def strays(self, loaded: Collection[str]) -> list[str]:
        """Names of this model's versions that the server has and should not have."""
        with self._lock:
            wanted = {version.name for version in self._entries}
        found = [PolicyVersion.parse(name) for name in loaded]
        return [v.name for v in found if v and v.model == self._model and v.number and v.name not in wanted]

    def served(self) -> tuple[PolicyVersion, ...]:
        """What is loaded, oldest first."""
        with self._lock:
            return tuple(v for v, entry in self._entries.items() if entry.served)

    def clear(self) -> None:
        """Nothing is served any more, and all names are free: the server is gone for good."""
        with self._lock:
            self._entries.clear()
            self._used.clear()


def _identity(adapter_dir: Path | None) -> object:
    """What tells an adapter from another one at the same path: a version's directory is written once."""
    if adapter_dir is None:
        return None
    path = adapter_dir.resolve()
    for weights in (path / name for name in WEIGHTS):
        if weights.exists():
            status = weights.stat()
            return (path, status.st_size, status.st_mtime_ns)
    return (path, 0, 0)

"""A directory that is written whole or not at all.

Invariant: under its own name it is complete and on the disk; what was begun and not finished lies under
another name, and is deleted: at once, or, where the process was killed, by the next one that writes there.
"""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from art_core.durable import process_alive, sync
from art_core.errors import ArtError, CheckpointError

WRITING = ".writing-"
"""How the names of unfinished directories begin; the writing process's id follows."""


@contextmanager
def taking_the_place_of(target: Path) -> Generator[Path]:
    """A directory to write into; at the end of the block it is ``target``, or gone."""
    root = target.parent
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    scratch = Path(tempfile.mkdtemp(prefix=f"{WRITING}{os.getpid()}-", dir=root))
    try:
        yield scratch
        for path in scratch.rglob("*"):
            sync(path)
        sync(scratch)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    sync(root)


@contextmanager
def refused_by_the_disk(path: Path) -> Generator[None]:
    """Writing that libraries do: each of them says in its own way that the disk refuses.

    Raises:
        CheckpointError: it does.
    """
    try:
        yield
    except (OSError, SafetensorError) as refused:
        raise CheckpointError(f"{path}: {refused}") from refused
    except RuntimeError as refused:
        if isinstance(refused, ArtError) or "inline_container" not in str(refused):  # torch's writer
            raise
        raise CheckpointError(f"{path}: torch could not write it whole: {refused}") from refused


def _remove_leftovers(root: Path) -> None:
    """Delete what a killed process had begun to write."""
    for path in root.glob(f"{WRITING}*"):
        owner = path.name.removeprefix(WRITING).partition("-")[0]
        if not owner.isdecimal() or not process_alive(int(owner)):
            shutil.rmtree(path, ignore_errors=True)

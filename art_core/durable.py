"""What is written survives a power cut, and what was left unwritten by a kill can be told.

Invariant: when `sync` returns, a file's bytes, or the names in a directory, are on the disk.
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file or a directory is on the disk.

    Raises:
        OSError: it is not there, or the disk failed.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def process_alive(pid: int) -> bool:
    """Whether a process of this machine is there, whoever runs it; on POSIX systems."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True

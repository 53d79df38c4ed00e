"""A benchmark's script in another process, which says where it serves and ends with its parent.

Invariant: the child is gone when the block is left: it reads its input until that is closed.
"""

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def child(script: Path, *arguments: str) -> Generator[str]:
    """A script in another process; yields the first line that it prints, its URL as a rule.

    Raises:
        RuntimeError: it ended without a word.
    """
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{' '.join(arguments)}: ended at once with status {process.wait()}")
        yield line
    finally:
        process.stdin.close()
        process.wait(30)

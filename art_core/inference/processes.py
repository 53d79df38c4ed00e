"""A child process that is ours: its log in a file, its end noticed, never left behind.

Invariant: it and everything it started end when it is closed, when it is dropped, and when this process
dies, SIGKILL included (`process_guard` sees to that from the outside).

Plain threads and pipes, no event loop: an engine may be started under one loop and closed under another.
"""

import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from art_core.errors import EngineError
from art_core.inference import process_guard

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def log_tail(path: Path, lines: int = 20, size: int = 32768) -> str:
    """The last lines of a log that may still be written to; empty when there is none.

    Args:
        path: the log.
        lines: how many.
        size: how far back to look, in bytes.
    """
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - size))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    kept = [line.rstrip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    return "\n".join(kept[-lines:])


class ManagedProcess:
    """Start a command in a process group of its own.

    Args:
        command: program and arguments.
        env: the whole environment.
        log: file that takes its output; its directory is made.
        grace: seconds between asking it to end and killing it.
        on_exit: called from a thread, with the exit status, when it ends without having been closed.

    Raises:
        EngineError: the program cannot be run.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        grace: float = 10.0,
        on_exit: Callable[[int], None] | None = None,
    ) -> None:
        self.log = log
        self._grace = grace
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", process_guard.__file__, str(grace), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(env),
                start_new_session=True,
            )
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        line = self._guard.stdout.readline()
        self._guard.stdout.close()
        if not line.strip():
            self._guard.stdin.close()
            self._guard.wait()
            raise EngineError(f"cannot run {command[0]}: {log_tail(log, 3)}")
        self.pid = int(line)
        # Closing the pipe is what ends the command, so losing the last reference ends it as well.
        self._release = weakref.finalize(self, self._guard.stdin.close)
        self._closed = threading.Event()
        threading.Thread(
            target=_watch, args=(self._guard, self._closed, on_exit), name=f"watch-{self.pid}", daemon=True
        ).start()

    @property
    def exit_status(self) -> int | None:
        """None while it runs; otherwise its status, or 128 plus the signal that ended it."""
        return self._guard.poll()

    def describe_exit(self) -> str:
        """How it ended, in words; empty while it runs."""
        status = self.exit_status
        if status is None:
            return ""
        if status > 128:
            try:
                return f"was ended by {signal.Signals(status - 128).name}"
            except ValueError:
                pass
        return f"ended with exit status {status}"

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        return log_tail(self.log, lines)

    def kill(self) -> None:
        """End it and all that it started at once, without asking; then as `close`."""
        self._closed.set()
        if self._guard.poll() is None:
            process_guard.signal_group(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End it and all that it started, and wait until they have. Closing twice does nothing."""
        self._closed.set()
        self._release()
        try:
            # The guard kills after the grace period by itself; what is added here is its own time to act.
            self._guard.wait(self._grace + 5)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if self._guard.returncode < 0:  # the guard itself was killed, and could end nothing
            process_guard.signal_group(self.pid, signal.SIGKILL)


def _watch(
    guard: "subprocess.Popen[bytes]", closed: threading.Event, on_exit: Callable[[int], None] | None
) -> None:
    status = guard.wait()
    if on_exit is not None and not closed.is_set():
        on_exit(status)

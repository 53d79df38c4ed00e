"""Run a command that cannot outlive whoever asked for it.

    python -I -S process_guard.py GRACE COMMAND...

Invariant: when this script ends, the command and everything it started have ended too.

`art_core.inference.processes` starts it with a pipe as standard input and holds the other end. The pipe
closes when that process lets go of it *or dies by any cause*, SIGKILL included. Its death also shows in
the parent's id, which is looked at as well, because a fork of the parent may hold a copy of the pipe. Then
the command's process group gets SIGTERM, and SIGKILL after ``GRACE`` seconds. The script's first and only
line of output is the command's process id; its exit status is the command's, or 128 plus the signal.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

LOOK_SECONDS = 0.2
GONE_SECONDS = 2.0


def wanted(parent: int) -> bool:
    """Wait a moment; False once nobody is left to want the command."""
    readable, _, _ = select.select([0], [], [], LOOK_SECONDS)
    return os.getppid() == parent and not (readable and not os.read(0, 4096))


def signal_group(group: int, number: int) -> None:
    """Signal the command and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def wait_until_gone(group: int) -> None:
    """Wait for what was killed to be gone; not for ever, since nobody may reap an orphan."""
    deadline = time.monotonic() + GONE_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.01)


def main(grace: float, command: list[str]) -> int:
    """Run the command to its end, or to ours."""
    parent = os.getppid()
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    # Standard output is for our parent; the command writes everything to standard error, the log.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, process_group=0)
    print(process.pid, flush=True)
    while process.poll() is None and not stopping and wanted(parent):
        pass
    if process.poll() is None:
        signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    # Whether it ended by itself or not: what it started must not stay.
    signal_group(process.pid, signal.SIGKILL)
    status = process.wait()
    wait_until_gone(process.pid)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    try:
        sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
    except OSError as unstartable:
        sys.exit(f"cannot run {sys.argv[2]}: {unstartable}")

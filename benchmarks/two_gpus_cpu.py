"""How busy the processes of a run were: where GPUs wait, one of these is what is waited for."""

import time
from collections import defaultdict
from collections.abc import Sequence

import psutil

KINDS = (
    ("engine core", "EngineCore"),
    ("API server", "APIServer"),  # as vLLM calls it where it can rename its processes
    ("API server", "--served-model-name"),
    ("trainer", "art_core.training.rank"),
    ("worker", "spawn_main"),
)
"""What a process is, by a part of its command line; the first that fits."""


class CpuWatch:
    """Cores that this process and each kind of its descendants used inside the block.

    Attributes:
        cores: by kind, of each process that was there all the time; the busiest first. One that stays near 1
            has one thread to do everything, and others wait for it.
    """

    def __init__(self) -> None:
        self.cores: dict[str, list[float]] = {}

    def __enter__(self) -> "CpuWatch":
        self._began, self._before = time.perf_counter(), used()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._began
        found: defaultdict[str, list[float]] = defaultdict(list)
        for process, (kind, spent) in used().items():
            if process in self._before:
                found[kind].append((spent - self._before[process][1]) / seconds)
        self.cores = {kind: sorted(shares, reverse=True) for kind, shares in sorted(found.items())}


def used() -> dict[psutil.Process, tuple[str, float]]:
    """Kind and CPU seconds so far of this process and all its descendants."""
    own = psutil.Process()
    found = {own: ("main", _seconds(own))}
    for process in own.children(recursive=True):
        try:
            found[process] = kind_of(process.cmdline()), _seconds(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended
            continue
    return found


def kind_of(command: Sequence[str]) -> str:
    """What a process is."""
    line = " ".join(command)
    return next((kind for kind, part in KINDS if part in line), "other")


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system

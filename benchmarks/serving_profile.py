"""Where vLLM's processes spend their time: a sampler inside each of them, put there as a plugin of vLLM.

`Profiling` writes a plugin into a folder, and an interpreter that has it on its path. Each process then
looks at its threads' stacks every few milliseconds while a label is set, and leaves, for each label, how
often it saw which stack: ``<label>-<process>.txt``, one stack a line, outermost first, to be read by any
flame graph tool or by `hottest`.
"""

import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PLUGIN = r"""
import os, sys, threading, time
from collections import Counter
from pathlib import Path

FOLDER = Path(os.environ["ART_PROFILE"])

def stack(frame):
    names = []
    while frame is not None:
        code = frame.f_code
        names.append(f"{Path(code.co_filename).stem}.{code.co_name}")
        frame = frame.f_back
    return ";".join(reversed(names))

def label():
    try:
        return (FOLDER / "label").read_text()
    except OSError:
        return ""

def watch():
    counts, now, looked = Counter(), "", 0.0
    own = threading.get_ident()
    while True:
        time.sleep(0.003)
        if time.monotonic() - looked > 0.2:
            looked = time.monotonic()
            if (new := label()) != now:
                if now and counts:
                    lines = (f"{stack} {count}" for stack, count in counts.most_common())
                    (FOLDER / f"{now}-{os.getpid()}.txt").write_text("\n".join(lines))
                counts, now = Counter(), new
        if now:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for thread, frame in sys._current_frames().items():
                if thread != own:
                    counts[f"{names.get(thread, '?')};{stack(frame)}"] += 1

def start():
    if not any(thread.name == "art-profile" for thread in threading.enumerate()):
        threading.Thread(target=watch, name="art-profile", daemon=True).start()
"""


class Profiling:
    """A folder for samples, and an interpreter whose vLLM is sampled.

    Args:
        folder: takes the samples.
        python: the interpreter that has vLLM.
    """

    def __init__(self, folder: Path, python: Path) -> None:
        self._folder = folder.resolve()
        site = self._folder / "plugin"
        info = site / "art_profile-1.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: art-profile\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nart_profile = art_profile:start\n")
        (site / "art_profile.py").write_text(PLUGIN)
        self.python = self._folder / "python"
        self.python.write_text(
            "#!/bin/sh\n"
            f"export ART_PROFILE='{self._folder}' PYTHONPATH=\"{site}:$PYTHONPATH\"\n"
            f"exec '{python.absolute()}' \"$@\"\n"
        )
        self.python.chmod(0o755)

    def samples(self) -> list[Path]:
        """What was left so far: a file for each label and process."""
        return sorted(self._folder.glob("*-*.txt"))

    @contextmanager
    def label(self, name: str) -> Generator[None]:
        """Sample, under this name."""
        label = self._folder / "label"
        label.write_text(name)
        time.sleep(0.3)  # until every process has looked
        try:
            yield
        finally:
            label.write_text("")
            time.sleep(1.0)  # until they have written


IDLE = frozenset(
    f"{module}.{function}"
    for module, function in (
        ("selectors", "select"), ("poll", "poll"), ("threading", "wait"), ("thread", "_worker"),
        ("connection", "wait"), ("queue", "get"), ("runners", "run"),
        ("utils", "sched_yield"), ("shm_broadcast", "acquire_read"),
    )
)  # fmt: skip
"""Where a thread that waits is seen; an event loop in C is there also while it works itself."""


def busy(samples: Path) -> dict[str, tuple[int, int]]:
    """For each thread that did anything: how often it was seen at work, and how often in all."""
    seen: dict[str, tuple[int, int]] = {}
    for frames, number in _stacks(samples):
        working, total = seen.get(frames[0], (0, 0))
        seen[frames[0]] = (working + (number if frames[-1] not in IDLE else 0), total + number)
    return {thread: counts for thread, counts in seen.items() if counts[0]}


def hottest(samples: Path, count: int = 45) -> list[tuple[str, int, int]]:
    """Functions in which a process was seen at work most: name, samples in it itself, in it or below."""
    itself: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for frames, number in _stacks(samples):
        if frames[-1] not in IDLE:
            itself[frames[-1]] += number
            below.update(dict.fromkeys(set(frames[1:]), number))
    return [(name, itself[name], seen) for name, seen in below.most_common(count)]


def _stacks(samples: Path) -> Generator[tuple[list[str], int]]:
    for line in samples.read_text().splitlines():
        stack, _, number = line.rpartition(" ")
        yield stack.split(";"), int(number)

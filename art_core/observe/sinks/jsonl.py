"""Metrics as lines of JSON: one file for each run, one line for each training step.

Invariant: every line in the file is whole; a line that a crash cut off is removed when the run goes on.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art_core.observe.sinks.base import SinkRun
from art_core.store import RunState


class JSONLSink:
    """Writes ``<directory>/<run>.jsonl``.

    A line is ``{"step": 3, "time": 1764457200.0, "metrics": {"reward_mean": 0.5, ...}}``; NaN and infinities
    are ``null``, since JSON has no such numbers.

    Args:
        directory: of the files; None: ``metrics`` beside the model's checkpoints.
    """

    name = "jsonl"

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = None if directory is None else Path(directory)

    def open(self, run: SinkRun) -> "_Lines":
        """Begin a file, or go on with it."""
        directory = self._directory or run.directory / "metrics"
        directory.mkdir(parents=True, exist_ok=True)
        return _Lines(directory / f"{run.id}.jsonl")


class _Lines:
    def __init__(self, path: Path) -> None:
        self.last_step = 0
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                self.last_step = max(self.last_step, json.loads(line)["step"])
        self._file = path.open("ab")
        self._file.truncate(whole)

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        row: dict[str, Any] = {
            "step": step,
            "time": at,
            "metrics": {name: value if math.isfinite(value) else None for name, value in values.items()},
        }
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self, state: RunState | None) -> None:
        self._file.close()

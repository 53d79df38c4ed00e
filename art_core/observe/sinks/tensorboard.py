"""Metrics for TensorBoard: scalars in event files.

Invariant: a run has one directory; a step that is in its files is not written again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art_core.observe.sinks.base import SinkRun, require
from art_core.store import RunState


class TensorBoardSink:
    """Writes scalars to ``<directory>/<model>-<run>``; look at them with ``tensorboard --logdir DIRECTORY``.

    Args:
        directory: of all runs; None: ``tensorboard`` beside the model's checkpoints.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    name = "tensorboard"

    def __init__(self, directory: str | Path | None = None) -> None:
        require("tensorboard", self.name, "tensorboard")
        self._directory = None if directory is None else Path(directory)

    def open(self, run: SinkRun) -> "_Scalars":
        """Begin a directory, or go on with it."""
        return _Scalars((self._directory or run.directory / "tensorboard") / run.title)


class _Scalars:
    def __init__(self, directory: Path) -> None:
        # TensorBoard's own reader and writer; importing them takes a second, and no TensorFlow is needed.
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events: Any = event_pb2
        self._proto: Any = summary_pb2
        directory.mkdir(parents=True, exist_ok=True)
        self.last_step = 0
        for path in sorted(directory.glob("events.out.tfevents.*")):
            for event in EventFileLoader(str(path)).Load():
                if event.HasField("summary"):
                    self.last_step = max(self.last_step, event.step)
        self._writer: Any = EventFileWriter(str(directory))

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        summary = self._proto.Summary(
            value=[self._proto.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._writer.add_event(self._events.Event(wall_time=at, step=step, summary=summary))
        self._writer.flush()

    def close(self, state: RunState | None) -> None:
        self._writer.close()

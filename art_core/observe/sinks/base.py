"""What a sink is, and what it is told of a run.

Invariant: a writer is used by one thread, gets steps in ascending order, and none that it said it has.
Numbers that were added to a step afterwards, as of an evaluation, come as that step once more, alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from art_core.errors import ConfigError
from art_core.store import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRun:
    """The run that a writer writes.

    Attributes:
        id: of the first of the runs that continue each other: the same after a restart.
        project: that it belongs to.
        model: that learns.
        config: the run's settings.
        started_at: Unix time, seconds.
        directory: for sinks that write files and were not told where.
    """

    id: str
    project: str
    model: str
    config: Mapping[str, Any]
    started_at: float
    directory: Path

    @property
    def title(self) -> str:
        """Names it where people see many runs."""
        return f"{self.model}-{self.id.removeprefix('r-')[:8]}"


class MetricWriter(Protocol):
    """A sink that was opened for one run."""

    @property
    def last_step(self) -> int:
        """The newest training step that it had already when it was opened; 0 for none."""
        ...

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Write a training step's numbers, so that they are there when this returns.

        Args:
            step: its number.
            values: by name; NaN and infinities included.
            at: when they were measured, Unix time in seconds.

        Raises:
            Exception: any; the step is then offered again.
        """
        ...

    def close(self, state: RunState | None) -> None:
        """Write no more.

        Args:
            state: how the run ended; None when it goes on elsewhere, or nobody knows.
        """
        ...


class MetricSink(Protocol):
    """A place where metrics go."""

    @property
    def name(self) -> str:
        """Which one it is, for people."""
        ...

    def open(self, run: SinkRun) -> MetricWriter:
        """Begin to write a run, or go on with it.

        Raises:
            Exception: any; it is tried again at the next step.
        """
        ...


def require(package: str, sink: str, extra: str) -> None:
    """Check that a sink's package is installed, before a run begins.

    Raises:
        ConfigError: it is not; says how to get it.
    """
    try:
        found = find_spec(package) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ConfigError(
            f"the {sink} sink needs the package {package}: pip install 'art-langgraph[{extra}]', or leave "
            "the sink out; metrics are in the store anyway and can be exported later"
        )

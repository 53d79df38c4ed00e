"""How far a batch of rollouts is, shown while it runs.

Invariant: nothing is written unless somebody looks: a terminal, a notebook, or a callable of the user's.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from art_core.types import Trajectory


@dataclass(frozen=True, slots=True)
class GatherProgress:
    """Where a batch of rollouts stands.

    Attributes:
        total: rollouts that were asked for.
        done: rollouts that have ended, failed ones included.
        failed: rollouts that ended without being scorable.
        mean_reward: over the scored ones; None while there is none.
    """

    total: int
    done: int = 0
    failed: int = 0
    mean_reward: float | None = None


ProgressReport: TypeAlias = Callable[[GatherProgress], None]


class Board:
    """Counts ended rollouts and tells whoever looks."""

    def __init__(self, total: int, tell: ProgressReport | None) -> None:
        self._total = total
        self._tell = tell
        self._done = self._failed = self._scored = 0
        self._sum = 0.0

    def expect(self, more: int) -> None:
        """Count more rollouts that are to come."""
        self._total += more

    def ended(self, trajectory: Trajectory) -> None:
        """Count one more."""
        self._done += 1
        self._failed += trajectory.failed
        if trajectory.reward is not None:
            self._scored += 1
            self._sum += trajectory.reward
        if self._tell is not None:
            self._tell(self.state)

    @property
    def state(self) -> GatherProgress:
        """The counts now."""
        mean = self._sum / self._scored if self._scored else None
        return GatherProgress(self._total, self._done, self._failed, mean)


@contextmanager
def report_progress(wanted: bool | ProgressReport, *, total: int) -> Generator[Board]:
    """A board for ``total`` rollouts; True shows a bar on standard error if that is a terminal."""
    console = Console(stderr=True)
    if callable(wanted):
        yield Board(total, wanted)
        return
    if not wanted or not total or not (console.is_terminal or console.is_jupyter):
        yield Board(total, None)
        return
    bar = Progress(
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
        TextColumn("{task.fields[reward]}"),
        TimeElapsedColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("rollouts", total=total, failed="", reward="")

        def tell(state: GatherProgress) -> None:
            bar.update(
                task,
                total=state.total,
                completed=state.done,
                failed=f"[red]{state.failed} failed[/red]" if state.failed else "",
                reward="" if state.mean_reward is None else f"reward {state.mean_reward:.3f}",
            )

        yield Board(total, tell)

"""What a command shows: tables for people, or one JSON document for programs.

Invariant: nothing that a model, a tool or a user's scenario wrote is read as markup or reaches the terminal
as a command, in either form: JSON is written in ASCII, with everything else as escapes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, cast

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from art_core.cli.exits import ExitCode, silence_stdout
from art_core.views.text import brief


class Terminal(Console):
    """Standard output without guesses: no markup, no emoji names, no colouring of numbers."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> NoReturn:
        """Whoever read it has gone: end without a word."""
        self.quiet = True
        silence_stdout()
        raise typer.Exit(ExitCode.PIPE_CLOSED)


def show(*views: RenderableType) -> None:
    """Print views one below the other."""
    terminal = Terminal()
    for view in views:
        terminal.print(view)


def show_json(data: Any) -> None:
    """Print one JSON document; numbers that are not finite are null."""
    try:
        print(as_json(data), flush=True)
    except BrokenPipeError:
        Terminal().on_broken_pipe()


def as_json(data: Any) -> str:
    """One line of ASCII."""
    return json.dumps(plain(data), ensure_ascii=True, allow_nan=False)


def plain(data: Any) -> Any:
    """What JSON can hold of records: dataclasses by their fields, paths and enums by their text."""
    if isinstance(data, Enum):
        return plain(data.value)
    if data is None or isinstance(data, str | bool | int):
        return data
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if is_dataclass(data) and not isinstance(data, type):
        return plain(asdict(data))
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in cast("Mapping[Any, Any]", data).items()}
    if isinstance(data, list | tuple | set | frozenset):
        return [plain(item) for item in cast("list[Any]", data)]
    return str(data) if isinstance(data, Path) else repr(data)


def table(*columns: str) -> Table:
    """An empty table.

    Args:
        columns: their names. ``>`` before one: it holds numbers. ``~`` before one: it gives way where the
            terminal is too narrow; the others stay whole.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        # Rich takes room from columns that may wrap; the cells of ours do not.
        made.add_column(
            name.lstrip(">~"),
            justify="right" if name.startswith(">") else "left",
            no_wrap=not name.startswith("~"),
            min_width=6 if name.startswith("~") else None,
        )
    return made


def cell(text: str | None, limit: int = 200, style: str = "") -> Text:
    """One line of somebody else's text."""
    return Text(brief(text or "", limit), style=style, no_wrap=True, overflow="ellipsis")


def number(value: float | None, digits: int = 3) -> Text:
    """A number, or nothing."""
    return Text("" if value is None else "nan" if math.isnan(value) else f"{value:.{digits}f}")

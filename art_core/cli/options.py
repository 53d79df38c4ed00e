"""Options that commands share: which record, and in which form.

Invariant: an option is called the same, and means the same, wherever it is.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from art_core.store import Store

PANEL = "Which record"
"""Where help shows the options that name a record."""

Project: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--project",
        "-p",
        envvar="ART_PROJECT",
        help="The project; not needed where there is only one.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
Root: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--root",
        envvar="ART_ROOT",
        help="Directory of the records, as given to LocalBackend(root=...).",
        rich_help_panel=PANEL,
    ),
]
Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="ART_STORE_URL",
        help="A database in place of a directory, as in postgresql://user@host/name.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Run: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        help="A run's id, or a part of it that no other has; the newest if left out (or 'last').",
        show_default=False,
    ),
]

ROOT = Path(".art")


@contextmanager
def opened(project: str | None, root: Path, url: str | None) -> "Generator[Store]":
    """The store that the options name; closed at the end.

    Raises:
        UnknownProjectError: there is none, or several to choose from.
        StoreError: it cannot be read.
    """
    from art_core.store.finding import open_existing

    with open_existing(project, root, url=url) as store:
        yield store

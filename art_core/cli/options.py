"""Options that commands share: which record, and in which form.

Invariant: an option is called the same, and means the same, wherever it is.
"""

import time
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
        help="A database in place of a directory, as given to LocalBackend(store_url=...).",
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


_LOOK_AGAIN = 0.5  # seconds


@contextmanager
def opened(project: str | None, root: Path, url: str | None, *, wait: bool = False) -> "Generator[Store]":
    """The store that the options name; closed at the end.

    Args:
        project: whose; None: the only one that there is.
        root: directory of the files.
        url: a database's URL in place of a file.
        wait: where nothing at all was recorded yet, wait until something is.

    Raises:
        UnknownProjectError: there is none, or several to choose from.
        StoreError: it cannot be read.
    """
    from art_core.store.finding import open_existing

    if wait and url is None:
        _wait_for_a_record(root)
    with open_existing(project, root, url=url) as store:
        yield store


def _wait_for_a_record(root: Path) -> None:
    from art_core.cli.exits import note
    from art_core.store.finding import projects

    told = False
    while not projects(root):
        if not told:
            note(f"nothing is recorded in {root} yet; waiting for a run to begin there (Ctrl-C ends this)")
            told = True
        time.sleep(_LOOK_AGAIN)

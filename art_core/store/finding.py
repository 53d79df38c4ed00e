"""Finding a store where its name was not given: the only one of a directory, or whose a database is.

Invariant: looking creates nothing and migrates nothing.
"""

from pathlib import Path

from art_core.errors import StoreError, UnknownProjectError
from art_core.store.database import project_at, sqlite_url
from art_core.store.store import Store


def projects(root: str | Path) -> list[str]:
    """Projects that have a store in a directory, by name; files that are no stores are passed over."""
    found: list[str] = []
    for path in sorted(Path(root).glob("*.db")):
        try:
            found.append(project_at(sqlite_url(path)))
        except StoreError:
            continue
    return found


def open_existing(project: str | None = None, root: str | Path = ".art", *, url: str | None = None) -> Store:
    """Open a store that is there already.

    Args:
        project: whose; None: the only one that there is.
        root: directory of the files.
        url: a database's URL in place of a file.

    Raises:
        UnknownProjectError: there is none, not this one, or several to choose from.
        StoreError: it cannot be read.
    """
    if url is not None:
        return Store.open(project or project_at(url), url=url)
    if project is not None and Path(root, f"{project}.db").exists():
        return Store.open(project, root)
    known = projects(root)
    if project is None and len(known) == 1:
        return Store.open(known[0], root)
    if not known:
        raise UnknownProjectError(
            f"no project has a record in {Path(root)}: name the directory that LocalBackend(root=...) was "
            "given (--root), or a database (--url)"
        )
    listed = ", ".join(known)
    if project is None:
        raise UnknownProjectError(
            f"{Path(root)} holds {len(known)} projects; choose one (--project): {listed}"
        )
    raise UnknownProjectError(f"{Path(root)} has no project {project!r}; it has: {listed}")

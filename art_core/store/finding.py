"""Finding by name: a store that is there already, and a run, trajectory or group of it by a part of its id.

Invariant: looking for a store makes none and migrates none; a name that fits two is refused, never guessed.
"""

from pathlib import Path

from sqlalchemy import ColumnElement, func, or_, select

from art_core.errors import StoreError, UnknownProjectError, UnknownRunError, UnknownTrajectoryError
from art_core.store.database import project_at, sqlite_url
from art_core.store.records import Run
from art_core.store.schema import groups, trajectories
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


def _unreadable(root: str | Path) -> StoreError | None:
    """What is wrong with the only file in a directory that could be a store and is none."""
    files = list(Path(root).glob("*.db"))
    if len(files) != 1:
        return None
    try:
        project_at(sqlite_url(files[0]))
    except StoreError as unreadable:
        return unreadable
    return None


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
    if not known and (damaged := _unreadable(root)) is not None:
        raise damaged
    if not known:
        if Path(root).is_file():
            raise UnknownProjectError(
                f"{Path(root)} is a file: name its directory (--root), or the file as a database "
                f"(--url sqlite:///{Path(root)})"
            )
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


def find_run(store: Store, name: str | None = None) -> Run:
    """A run by its id, or by a part of it that no other has.

    Where a name is the beginning or the end of one id, that one is meant, even if others have it inside.

    Args:
        store: where it is.
        name: its id, or a part; None or ``last``: the newest run.

    Raises:
        UnknownRunError: there is none, or there are several.
    """
    known = store.runs()
    if not known:
        raise UnknownRunError(f"{store.location} has no run yet; a run begins when a model is registered")
    if name in (None, "last"):
        return known[-1]
    fitting: list[Run] = []
    for fits in (str.__eq__, _at_an_end, str.__contains__):
        fitting = fitting or [run for run in known if fits(run.id, name)]
    if len(fitting) == 1:
        return fitting[0]
    newest = ", ".join(run.id for run in reversed(known[-3:]))
    found = "no run" if not fitting else f"{len(fitting)} runs"
    raise UnknownRunError(f"{store.location} has {found} called {name!r}; its newest: {newest}")


def find_trajectory_id(store: Store, name: str) -> str:
    """The id of a trajectory, of which a part was given that no other has; see `find_run`.

    Raises:
        UnknownTrajectoryError: there is none, or there are several.
    """
    return _only(store, trajectories.c.id, name, "trajectory", "trajectories")


def find_group_id(store: Store, name: str) -> str:
    """The id of a group, of which a part was given that no other has; see `find_run`.

    Raises:
        UnknownTrajectoryError: there is none, or there are several.
    """
    return _only(store, groups.c.id, name, "group", "groups")


def count_outcomes(store: Store, run_id: str) -> dict[str, int]:
    """How many trajectories of a run there are, by status."""
    counted = select(trajectories.c.status, func.count().label("members")).where(
        trajectories.c.run_id == run_id
    )
    with store.read() as connection:
        return {
            row.status: row.members for row in connection.execute(counted.group_by(trajectories.c.status))
        }


def _at_an_end(whole: str, part: str) -> bool:
    return whole.startswith(part) or whole.endswith(part)


def _only(store: Store, column: ColumnElement[str], name: str, one: str, several: str) -> str:
    at_an_end = or_(column.startswith(name, autoescape=True), column.endswith(name, autoescape=True))
    found: list[str] = []
    with store.read() as connection:
        for fits in (column == name, at_an_end, column.contains(name, autoescape=True)):
            found = found or list(connection.scalars(select(column).where(fits).limit(3)))
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnknownTrajectoryError(f"{store.location} has no {one} {name!r}")
    raise UnknownTrajectoryError(
        f"{store.location} has several {several} called {name!r}, such as {found[0]} and {found[1]}; "
        "give more of it"
    )

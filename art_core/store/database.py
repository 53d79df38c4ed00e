"""Opening a database: connection settings, whose it is, which revision it has.

Invariant: an engine that `open_database` returns leads to a database of the asked-for project at the
newest revision; whatever stands against that is a `StoreError` that says what to do, and a database
that is refused is left as it was.

All that is particular to a database is in this module. On each of them one transaction writes at a time, so
that rows become visible in the order of their ``seq``, and a reader sees one state.
"""

import time
from collections.abc import Generator, Hashable, Iterable
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event, insert, inspect, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from art_core.errors import StoreError
from art_core.store import schema

BUSY_TIMEOUT = 30.0
"""Seconds to wait for another process that is writing."""

_WRITING = "art_writing"

_WRITERS = (
    0x617274  # the advisory lock of whoever writes ("art"); one in each database of a PostgreSQL server
)

_MOST_KNOWN = 20_000  # keys that a connection remembers, about 3 MB


def open_database(url: str | URL, project: str) -> Engine:
    """An engine for a project's database, which is created, or migrated, where needed.

    Raises:
        StoreError: it cannot be reached or read, belongs to another project, or is newer than this code.
    """
    engine = _engine(url)
    try:
        with engine.connect() as connection:
            current = _revision(connection, project)
        _use_wal(engine)
        if current is None:
            with writing(engine) as connection:
                # Another process may have been quicker.
                if _revision(connection, project) is None:
                    _create(connection, project)
        elif current != schema.HEAD:
            with writing(engine) as connection:
                if _revision(connection, project) != schema.HEAD:
                    _migrate(connection, current)
    except SQLAlchemyError as failure:
        engine.dispose()
        raise explain(failure, engine, "opening the store") from failure
    except StoreError:
        engine.dispose()
        raise
    return engine


def project_at(url: str | URL) -> str:
    """Whose store a database is; nothing is created or migrated.

    Raises:
        StoreError: it cannot be read, or is not a store.
    """
    engine = _engine(url)
    try:
        if engine.dialect.name == "sqlite" and not Path(location(engine)).is_file():
            raise StoreError(f"{location(engine)}: there is no such file")  # SQLite would make it
        with reading(engine) as connection:
            if schema.store_info.name not in inspect(connection).get_table_names():
                raise StoreError(
                    f"{location(engine)} is not a store of art-langgraph; open another root or URL"
                )
            info = schema.store_info.c
            return str(connection.scalar(select(info.value).where(info.key == "project")))
    finally:
        engine.dispose()


@contextmanager
def writing(engine: Engine) -> Generator[Connection]:
    """A transaction that may write; committed at the end of the block, or as if it had never been."""
    with engine.connect() as connection:
        connection.execution_options(**{_WRITING: True})
        known = _known(connection)
        try:
            with connection.begin():
                yield connection
        except BaseException:
            known.clear()  # what was written just now is not there
            raise


@contextmanager
def reading(engine: Engine) -> Generator[Connection]:
    """A transaction that sees one state of the database, whatever others write meanwhile.

    Raises:
        StoreError: the database cannot be read.
    """
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as failure:
        raise explain(failure, engine, "reading the store") from failure


def unwritten(connection: Connection, table: Table, keys: Iterable[Hashable]) -> list[Any]:
    """Those keys of a table that nothing has written through this connection; now they count as written.

    For tables whose rows are never changed or deleted, inside `writing`.
    """
    known = _known(connection)
    new = [key for key in keys if (table.name, key) not in known]
    if len(known) > _MOST_KNOWN:
        known.clear()
    known.update((table.name, key) for key in new)
    return new


def _known(connection: Connection) -> set[tuple[str, Hashable]]:
    return connection.info.setdefault("art_known", set())


def insert_missing(dialect: str, table: Table) -> Any:
    """An insert that passes over rows which are there already."""
    kind = {"sqlite": sqlite, "postgresql": postgresql}[dialect]
    return kind.insert(table).on_conflict_do_nothing().inline()


def location(engine: Engine) -> str:
    """Where a database is, for people; without its password."""
    if engine.dialect.name == "sqlite":
        return str(engine.url.database)
    return engine.url.render_as_string(hide_password=True)


def explain(failure: SQLAlchemyError, engine: Engine, what: str) -> StoreError:
    """A database's error as one of ours: the file, what happened, the way out."""
    where = location(engine)
    cause = str(failure.orig) if isinstance(failure, DBAPIError) else str(failure)
    for symptom, meaning in _MEANINGS.items():
        if symptom in cause:
            return StoreError(f"{what}: {where}: {meaning} ({cause})")
    return StoreError(f"{what}: {where}: the database refused: {cause}")


def is_of_content(failure: DBAPIError) -> bool:
    """Whether a database refused what a record holds, and would take others."""
    state = getattr(failure.orig, "sqlstate", None) or getattr(failure.orig, "pgcode", None)
    # PostgreSQL's class 54, "program limit exceeded", comes as the kind of error that a broken connection is.
    return isinstance(state, str) and state.startswith("54")


_KEPT = "what was recorded before is safe, and recording goes on by itself once that is mended"
_MEANINGS = {
    "disk is full": f"the disk is full; free some space: {_KEPT}",
    "disk I/O error": f"the disk cannot be written or read; look at it: {_KEPT}",
    "database is locked": f"another process keeps writing and lets no one else in; end it: {_KEPT}",
    "lock timeout": f"another process keeps writing and lets no one else in; end it: {_KEPT}",
    "readonly database": f"the file may not be written; give this user the right to: {_KEPT}",
    "index row size": "an id is longer than this database can look up (about 2700 bytes); use shorter ids",
    "unable to open database file": "the file cannot be opened; check that its directory exists and may be "
    "written",
    "file is not a database": "this is not a SQLite database; move it away, or open another root",
    "malformed": "the file is damaged; move it away and restore a copy, or read what is left with "
    "`sqlite3 FILE .recover`",
    "connection": "the database server cannot be reached; check the URL, and that it runs",
}


def _engine(url: str | URL) -> Engine:
    try:
        url = make_url(url)
        if url.get_backend_name() not in ("sqlite", "postgresql"):
            raise StoreError(f"a store lives in SQLite or PostgreSQL, not in {url.get_backend_name()!r}")
        if url.get_backend_name() == "postgresql":
            engine = create_engine(url, pool_pre_ping=True)
            event.listen(engine, "begin", _begin_postgresql)
            return engine
        engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT, "isolation_level": None})
    except (NoSuchModuleError, ModuleNotFoundError) as missing:
        driver = getattr(missing, "name", None)
        way_out = f"; pip install '{driver}[binary]'" if driver == "psycopg" else ""
        raise StoreError(f"{url}: the database driver is not installed: {missing}{way_out}") from missing
    except ArgumentError as unreadable:
        raise StoreError(
            f"{url!r} is not a database URL, such as sqlite:///.art/project.db or "
            f"postgresql://user@host/name: {unreadable}"
        ) from unreadable
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    # In WAL mode a commit survives the death of the process without an fsync of its own. A power cut may
    # take the last commits, never the file's consistency.
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _use_wal(engine: Engine) -> None:
    """Let others read while one writes; the file remembers it. Other databases always do."""
    if engine.dialect.name == "sqlite":
        with closing(engine.raw_connection()) as connection:
            connection.cursor().execute("PRAGMA journal_mode = WAL")


def _begin_sqlite(connection: Connection) -> None:
    # A writer that began as a reader could not wait for another writer: it would fail at once.
    mode = "IMMEDIATE" if connection.get_execution_options().get(_WRITING) else "DEFERRED"
    connection.exec_driver_sql(f"BEGIN {mode}")


def _begin_postgresql(connection: Connection) -> None:
    if not connection.get_execution_options().get(_WRITING):
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        return
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {1000 * BUSY_TIMEOUT:.0f}")
    # It ends with the transaction, also of a process that was killed.
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITERS})")


def _revision(connection: Connection, project: str) -> str | None:
    """The database's revision; None when it is empty.

    Raises:
        StoreError: it is not a store, another project's, or newer than this code.
    """
    where = location(connection.engine)
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return None
    if not {schema.alembic_version.name, schema.store_info.name} <= tables:
        raise StoreError(
            f"{where} holds a database of something else (tables: {', '.join(sorted(tables)[:5])}); "
            "open another root or URL"
        )
    revision = connection.scalar(select(schema.alembic_version.c.version_num))
    if revision not in schema.REVISIONS:
        raise StoreError(
            f"{where} has schema version {revision}, and this version of art-langgraph knows up to "
            f"{schema.HEAD}: upgrade art-langgraph, or open another root"
        )
    info = schema.store_info.c
    owner = connection.scalar(select(info.value).where(info.key == "project"))
    if owner != project:
        raise StoreError(
            f"{where} is the store of project {owner!r}, not of {project!r}: open project {owner!r}, "
            "or another root or URL"
        )
    return revision


def _create(connection: Connection, project: str) -> None:
    schema.metadata.create_all(connection)
    schema.alembic_version.create(connection)
    connection.execute(insert(schema.alembic_version), {"version_num": schema.HEAD})
    connection.execute(
        insert(schema.store_info),
        [{"key": "project", "value": project}, {"key": "created_at", "value": str(time.time())}],
    )


def _migrate(connection: Connection, current: str) -> None:
    from art_core.store.migrations import upgrade  # alembic is slow to import, and seldom needed

    try:
        upgrade(connection)
    except SQLAlchemyError:
        raise
    except Exception as broken:
        raise StoreError(
            f"{location(connection.engine)} could not be migrated from schema version {current} to "
            f"{schema.HEAD} and is as it was: {type(broken).__name__}: {broken}; read it with the version of "
            "art-langgraph that wrote it, or open another root"
        ) from broken


def sqlite_url(path: Path) -> URL:
    """The URL of a database file, whose directory is made.

    Raises:
        StoreError: the directory cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as unmakeable:
        raise StoreError(f"the store's directory {path.parent} cannot be made: {unmakeable}") from unmakeable
    return URL.create("sqlite", database=str(path))

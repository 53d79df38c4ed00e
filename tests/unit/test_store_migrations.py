"""Schema versions: an older store is brought up to date, a newer one is refused, nothing is lost."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from helpers.trajectories import a_span
from sqlalchemy import create_engine

from art_core.errors import StoreError
from art_core.store import RunState, Store, schema
from art_core.store.migrations import upgrade
from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
    TrajectoryGroup,
)

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def recorded_group() -> TrajectoryGroup:
    """What the stores of older revisions in ``tests/data`` hold; never change it."""
    scenario = Scenario("paris", {"city": "Paris", "days": [1, 2]}, {"split": "train"})
    talk = [{"role": "system", "content": "You are brief. " * 40}]
    steps: list[Step] = []
    prompt = tuple(range(1000, 1600))
    for turn in range(3):
        talk.append({"role": "user", "content": f"Day {turn}, what is the weather? ☂"})
        answer = {"role": "assistant", "content": f"Rain {turn}"}
        completion = tuple(range(10 * turn, 10 * turn + 9))
        steps.append(
            Step(
                id=f"s-{turn}",
                rollout_id="t-1",
                call_id=f"c-{turn}",
                messages=tuple(dict(message) for message in talk),
                tools=(TOOL,) if turn else (),
                sampling={"temperature": 1.0, "stop": ["\n"]},
                response=answer,
                finish_reason="stop",
                tokens=StepTokens(prompt, completion, (-0.125, None, *[-0.5] * 7)),
                model="agent@3",
                policy=PolicyVersion("agent", 3),
                identity=StepIdentity(node="ask", namespace="ask:1", graph_step=turn, tags=("x",)),
                started_at=100.0 + turn,
                duration=0.5,
                usage={"prompt_tokens": len(prompt), "completion_tokens": 9},
            )
        )
        talk.append(answer)
        prompt += completion
    good = Trajectory(
        id="t-1",
        scenario=scenario,
        steps=tuple(steps),
        group_id="g-1",
        status=RolloutStatus.FINISHED,
        reward=0.75,
        components={"short": 0.25},
        started_at=99.0,
        duration=4.0,
    )
    bad = Trajectory(
        id="t-2",
        scenario=scenario,
        steps=(
            Step(
                id="s-9",
                rollout_id="t-2",
                messages=({"role": "user", "content": "?"},),
                model="other",
                started_at=100.5,
                duration=0.1,
                untrainable="not a policy of ours",
                error="HTTP 500",
            ),
        ),
        group_id="g-1",
        status=RolloutStatus.FAILED,
        failure=Failure("exception", "HTTP 500", "openai.InternalServerError"),
        faults={"unattributed_calls": 2},
        started_at=99.5,
        duration=1.0,
    )
    return TrajectoryGroup(scenario, (good, bad), "g-1")


DATA = Path(__file__).parent.parent / "data"


def store_of_revision(number: int, directory: Path) -> Path:
    """A store as that revision's code wrote it."""
    path = directory / "weather.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((DATA / f"store_revision_{number}.sql").read_text())
        found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        assert found == (f"{number:04}",)
    return path


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    """A store as revision 1 wrote it."""
    return store_of_revision(1, tmp_path)


def revision_of(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_store_of_an_older_revision_is_migrated_with_all_that_it_holds(number: int, tmp_path: Path) -> None:
    old = store_of_revision(number, tmp_path)
    with Store.open("weather", tmp_path) as store:
        assert store.group("g-1") == recorded_group()
        (run,) = store.runs()
        assert (run.model, run.state) == ("agent", RunState.FINISHED)
        assert [(s.author, s.reward) for s in store.scores("t-1")] == [("rollout", 0.75), ("judge", 0.75)]
        assert [m.value for m in store.metrics(run.id)] == [0.5]
        assert [v.policy.name for v in store.versions("agent")] == ["agent@3"]
        assert [e.kind for e in store.events(run.id)] == ["skipped_update"]
        (good, _) = recorded_group().trajectories
        traced = replace(good, spans=(a_span(),))
        store.save_trajectory(traced)
        assert store.trajectory("t-1") == traced
        store.add_feedback("t-1", kind="thumb", value=1, author="ann")
        assert [f.value for f in store.feedback(run_id=run.id)] == [1.0]
        assert store.trained("t-1") == []
    assert revision_of(old) == schema.HEAD
    with closing(sqlite3.connect(old)) as connection:
        found = connection.execute("SELECT id, policy_number FROM trajectories ORDER BY id").fetchall()
    assert found == [("t-1", 3), ("t-2", None)]  # only the first was answered by a policy


def test_a_migrated_store_keeps_a_repeated_message_once(old_store: Path) -> None:
    Store.open("weather", old_store.parent).close()
    with closing(sqlite3.connect(old_store)) as connection:
        (pieces,) = connection.execute("SELECT count(*) FROM contents").fetchone()
    # system, 3 questions, 2 answers, the other rollout's "?"; one tool list; two blocks of 256 prompt tokens
    assert pieces == 7 + 1 + 2


def test_a_migration_that_fails_leaves_the_store_as_it_was(old_store: Path) -> None:
    with closing(sqlite3.connect(old_store)) as connection, connection:
        connection.execute("UPDATE steps SET messages = x'00' || CAST('no json' AS BLOB) WHERE id = 's-9'")
    with pytest.raises(StoreError, match=r"from schema version 0001 .* is as it was: .*Expecting value"):
        Store.open("weather", old_store.parent)
    assert revision_of(old_store) == "0001"
    with closing(sqlite3.connect(old_store)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert "contents" not in tables


def test_a_newer_store_is_refused_and_left_alone(old_store: Path) -> None:
    with closing(sqlite3.connect(old_store)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '0099'")
    with pytest.raises(StoreError, match=rf"version 0099.*up to {schema.HEAD}.*upgrade art-langgraph"):
        Store.open("weather", old_store.parent)
    assert revision_of(old_store) == "0099"


def test_migrations_from_nothing_build_the_same_tables_as_a_new_store(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'built.db'}")
    with engine.begin() as connection:
        upgrade(connection)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() == schema.HEAD
    engine.dispose()


def test_opening_a_current_store_does_not_import_alembic(tmp_path: Path) -> None:
    script = (
        "import sys; from art_core.store import Store\n"
        f"for _ in range(2): Store.open('p', {str(tmp_path)!r}).close()\n"
        "print('alembic' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]

"""What the store does quickly is what it would do slowly: prepared statements, known keys, orjson."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.trajectories import a_step
from sqlalchemy import bindparam, create_engine, insert, select, update

from art_core.errors import StoreError
from art_core.recording import Rollout, new_id
from art_core.store import Store, database
from art_core.store.packing import pack, to_json_bytes, unpack
from art_core.store.prepared import Prepared
from art_core.store.schema import contents, metadata, runs


@pytest.fixture
def connection():
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        yield connection


def a_run(name: str) -> dict[str, Any]:
    return {"id": name, "model": "agent", "config": "{}", "started_at": 1.5, "state": "running"}


def test_a_prepared_statement_writes_what_the_statement_would(connection) -> None:
    prepared = Prepared(lambda _: insert(runs).inline())
    assert prepared.execute(connection, [a_run("a"), a_run("b")]) == 2
    assert prepared.execute(connection, [{**a_run("c"), "ended_at": None}]) == 1  # other names, another text
    connection.execute(insert(runs), a_run("d"))
    rows = [row._asdict() | {"seq": 0, "id": ""} for row in connection.execute(select(runs))]
    assert len(rows) == 4
    assert all(row == rows[-1] for row in rows)


def test_constants_of_a_prepared_statement_stay(connection) -> None:
    connection.execute(insert(runs), [a_run("a"), {**a_run("b"), "state": "finished"}])
    end = Prepared(lambda _: update(runs).where(runs.c.id == bindparam("one"), runs.c.state == "running"))
    assert [end.execute(connection, [{"state": "failed", "one": name}]) for name in ("a", "b", "c")] == [
        1,
        0,
        0,
    ]


def test_rows_that_are_there_are_passed_over_in_every_dialect(connection) -> None:
    rows = [{"digest": b"1", "body": b"x"}, {"digest": b"2", "body": b"y"}]
    prepared = Prepared(lambda dialect: database.insert_missing(dialect, contents))
    prepared.execute(connection, rows[:1])
    prepared.execute(connection, rows)
    assert connection.execute(select(contents.c.digest)).scalars().all() == [b"1", b"2"]
    assert str(database.insert_missing("postgresql", contents)).endswith("ON CONFLICT DO NOTHING")


def test_what_a_failed_transaction_wrote_does_not_count_as_written(tmp_path: Path) -> None:
    with Store.open("games", tmp_path) as store:
        rollout = Rollout(sink=store.sink())
        first = a_step(rollout.id, 0)
        rollout.record(first)
        fresh = replace(a_step(rollout.id, 1), messages=({"role": "user", "content": "never said before"},))
        good = rollout.submit(fresh)  # these two share a transaction, which is refused
        bad = rollout.submit(replace(fresh, id=first.id))
        rollout.finish()
        good.result()
        with pytest.raises(StoreError, match="a step with this id already"):
            bad.result()
        assert fresh in store.trajectory(rollout.id).steps  # reading it needs its message


def test_many_more_keys_than_are_remembered_are_written_once(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(database, "_MOST_KNOWN", 3)
    with Store.open("games", tmp_path) as store:
        rollout = Rollout(sink=store.sink())
        for turn in range(20):
            said = tuple({"role": "user", "content": f"turn {n}"} for n in range(turn + 1))
            rollout.record(replace(a_step(rollout.id, turn), messages=said))
        ended = rollout.finish()
        assert store.trajectory(rollout.id).steps == ended.steps


@dataclass
class Move:
    x: int


@pytest.mark.parametrize(
    "value",
    [
        {"text": "caf\u00e9 \u2028 \x7f\x00", "n": [1, -0.1, 1e16, 5e-324, 2**63 - 1, 2**80], "none": None},
        {"tuple": (1, (2,)), "true": True, 3: "a key that is no text"},
        [math.inf, -math.inf, 0.0],
        "half a pair: \ud83d",
    ],
)
def test_json_reads_back_as_the_standard_librarys_does(value: Any) -> None:
    assert json.loads(to_json_bytes(value)) == json.loads(json.dumps(value))


def test_nan_and_foreign_objects_are_written_as_they_always_were() -> None:
    assert to_json_bytes({"p": math.nan}) == b'{"p":NaN}'
    assert to_json_bytes({"move": Move(3)}) == b'{"move":{"x":3}}'


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 4095, 4096, 300_000])
def test_bytes_of_any_size_come_back(size: int) -> None:
    for data in (b"ab" * (size // 2), bytes(n * n % 251 for n in range(size))):
        assert unpack(pack(data)) == data


def test_ids_are_unique_and_in_the_order_of_their_time() -> None:
    ids = [new_id("t") for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert [i[:14] for i in ids] == sorted(i[:14] for i in ids)
    assert all(len(i) == 34 for i in ids)

"""The store under many threads and processes, and under ``kill -9``."""

import asyncio
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from helpers.trajectories import a_step

from art_core.recording import Rollout
from art_core.store import Store
from art_core.types import RolloutStatus, Scenario

PRELUDE = """
import os, sys, threading, time
from pathlib import Path
from art_core.recording import Rollout
from art_core.store import Store
from art_core.types import Scenario
from helpers.trajectories import a_step

root = Path(sys.argv[1])
"""


def python(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process that runs a script with this one's import path."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


WRITE_UNTIL_KILLED = """
store = Store.open("games", root)
printing = threading.Lock()

def play(player):
    rollout = Rollout(Scenario("s"), sink=store.sink(), rollout_id=f"t-{player}")
    number = 0
    while True:
        rollout.record(a_step(rollout.id, number, error="x" * (number % 5000)))
        with printing:
            print(player, number, flush=True)
        number += 1

for player in range(8):
    threading.Thread(target=play, args=(player,)).start()
"""


def test_every_acknowledged_step_survives_kill_9_and_the_rest_is_whole_or_absent(tmp_path: Path) -> None:
    for killed_after in (1, 200, 1000):
        root = tmp_path / str(killed_after)
        process = python(WRITE_UNTIL_KILLED, root)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(killed_after)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()

        acknowledged = {(int(p), int(n)) for p, n in (line.split() for line in lines if line.endswith("\n"))}
        assert len(acknowledged) >= killed_after
        with closing(sqlite3.connect(root / "games.db")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        with Store.open("games", root) as store:
            found: set[tuple[int, int]] = set()
            for trajectory in store.trajectories():
                assert trajectory.status is RolloutStatus.RUNNING
                for number, step in enumerate(trajectory.steps):
                    assert step == a_step(trajectory.id, number, error="x" * (number % 5000))
                    found.add((int(trajectory.id.removeprefix("t-")), number))
        assert acknowledged <= found


READ_UNTIL_ALL_IS_THERE = """
store = Store.open("games", root)
most = 0
print("reading", flush=True)
deadline = time.monotonic() + 60
while most < int(sys.argv[2]):
    seen = 0
    for trajectory in store.trajectories():
        assert trajectory.steps == tuple(a_step(trajectory.id, n) for n in range(len(trajectory.steps)))
        seen += len(trajectory.steps)
    assert seen >= most, "what was there is gone"
    assert time.monotonic() < deadline, seen
    most = seen
print(most)
"""


def test_two_processes_read_while_one_writes(tmp_path: Path) -> None:
    with Store.open("games", tmp_path) as store:
        readers = [python(READ_UNTIL_ALL_IS_THERE, tmp_path, 600) for _ in range(2)]
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
        for _ in range(6):
            rollout = Rollout(sink=store.sink())
            for number in range(100):
                rollout.record(a_step(rollout.id, number))
            rollout.finish(1.0)
        assert [reader.communicate(timeout=60)[0] for reader in readers] == ["600\n", "600\n"]
        assert [reader.returncode for reader in readers] == [0, 0]


WRITE_SOME = """
with Store.open("games", root) as store:
    for _ in range(5):
        rollout = Rollout(Scenario("s"), sink=store.sink())
        for number in range(20):
            rollout.record(a_step(rollout.id, number))
        rollout.finish(1.0)
"""


def test_processes_that_create_one_store_at_once_all_write_to_it(tmp_path: Path) -> None:
    writers = [python(WRITE_SOME, tmp_path) for _ in range(4)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    with Store.open("games", tmp_path) as store:
        assert [len(t.steps) for t in store.trajectories(status="finished")] == [20] * 20


def test_many_threads_record_at_once_and_nothing_mixes(tmp_path: Path) -> None:
    """C05."""
    with Store.open("games", tmp_path) as store:
        start = threading.Barrier(32)

        def play(player: int) -> Sequence[str]:
            rollout = Rollout(Scenario("s"), sink=store.sink(), rollout_id=f"t-{player}")
            start.wait()
            for number in range(25):
                rollout.record(a_step(rollout.id, number))
                assert len(store.trajectory(rollout.id).steps) == number + 1
            return [step.id for step in rollout.finish(float(player)).steps]

        with ThreadPoolExecutor(32) as pool:
            played = list(pool.map(play, range(32)))
        for player, ids in enumerate(played):
            kept = store.trajectory(f"t-{player}")
            assert [step.id for step in kept.steps] == ids
            assert kept.reward == float(player)


OPEN_AT_ONCE = """
import gc, pickle

start = threading.Barrier(8)
sinks = []

def receive():
    start.wait()
    sinks.append(pickle.loads(bytes.fromhex(sys.argv[2])))

threads = [threading.Thread(target=receive) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
gc.collect()
for sink in sinks:
    Rollout(Scenario("s"), sink=sink).finish(1.0)
"""


def test_a_process_that_is_sent_many_sinks_of_a_store_at_once_records_into_every_one(tmp_path: Path) -> None:
    with Store.open("games", tmp_path) as store:
        receiver = python(OPEN_AT_ONCE, tmp_path, pickle.dumps(store.sink()).hex())
        assert receiver.wait(60) == 0
        assert receiver.stdout is not None
        receiver.stdout.close()
        assert [t.reward for t in store.trajectories()] == [1.0] * 8


async def test_hundreds_of_tasks_record_without_blocking_the_loop(tmp_path: Path) -> None:
    """C05."""
    with Store.open("games", tmp_path) as store:

        async def play() -> Rollout:
            rollout = Rollout(Scenario("s"), sink=store.sink())
            for number in range(5):
                await rollout.arecord(a_step(rollout.id, number))
            rollout.finish(1.0)
            return rollout

        rollouts = await asyncio.gather(*(play() for _ in range(300)))
        assert sum(len(t.steps) for t in store.trajectories()) == 1500
        for rollout in rollouts[::50]:
            assert store.trajectory(rollout.id) == rollout.snapshot()

"""Worker processes: spread, killed, cancelled, broken; whatever happens, every rollout ends."""

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import worker_agents as agents

from art_core.errors import ConfigError, RolloutFailedError
from art_core.gather import Gathered, agather_on
from art_core.recording import NullSink
from art_core.rollouts import Plan, Runner, Terms
from art_core.store import Store
from art_core.types import RolloutStatus, Scenario
from art_core.worker_handle import WorkerHandle
from art_core.worker_process import Forget
from art_core.workers import Job, Workers, runner_of


@pytest.fixture
def store(tmp_path: Path):
    with Store.open("workers", tmp_path) as opened:
        yield opened


async def run(store: Store, names: list[str], **options) -> Gathered:
    terms = Terms(agents.half, timeout=options.pop("timeout", None), sink=store.sink())
    async with asyncio.timeout(240), runner_of(2, Job(agents.make, (), terms)) as runner:
        return await agather_on(
            runner, [Scenario(name) for name in names], group_size=1, min_group_size=0, **options
        )


async def test_rollouts_are_spread_come_back_in_order_and_lie_in_the_same_store(tmp_path: Path) -> None:
    names = [f"s{i}" for i in range(20)] + ["wait", "raise"]
    for timeout in (1.0, 30.0):  # the longer one where the machine is too busy for the others
        with Store.open(f"workers-{timeout:.0f}", tmp_path) as store:
            groups = await run(store, names, concurrency=6, timeout=timeout)
            kept = {t.id: t for t in store.trajectories()}
        if len(groups.failed) == 2:
            break
    assert [g.scenario.id for g in groups] == names
    rollouts = [t for g in groups for t in g]
    assert [t.reward for t in rollouts[:20]] == [0.5] * 20
    assert [t.failure.cause for t in rollouts[20:]] == ["timeout", "exception"]
    pids = {t.metadata["output"] for t in rollouts[:20]}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert kept == {t.id: t for t in rollouts}
    assert not multiprocessing.active_children()


async def test_a_killed_process_fails_its_own_rollouts_alone_and_what_they_recorded_stays(store) -> None:
    """C10, C32: ``kill -9`` of a worker."""
    groups = await run(store, ["a", "die", "b", "c", "d", "e"], concurrency=1)
    (dead,) = groups.failed
    assert dead.scenario.id == "die"
    assert dead.reward is None
    assert dead.failure.cause == "worker"
    assert "SIGKILL" in dead.failure.message
    assert dead.status is RolloutStatus.FAILED
    assert [s.message() for s in dead.steps] == ["die"]
    assert store.trajectory(dead.id) == dead
    assert Counter(t.status for t in store.trajectories()) == {"finished": 5, "failed": 1}


async def test_a_rollout_that_ended_before_its_process_died_is_taken_as_it_ended(store) -> None:
    groups = await run(store, ["end and die"])
    (trajectory,) = groups[0]
    assert (trajectory.status, trajectory.reward) == (RolloutStatus.FINISHED, 0.25)
    assert store.trajectory(trajectory.id) == trajectory


async def test_when_every_process_has_died_the_rest_fails_and_says_so(store) -> None:
    groups = await run(store, ["die", "die", "a", "b"], concurrency=1)
    assert [t.failure.cause for t in groups.failed] == ["worker"] * 4
    assert "all worker processes have died" in groups.failed[-1].failure.message
    assert Counter(t.status for t in store.trajectories()) == {"failed": 4}


async def test_cancelling_ends_the_rollouts_of_other_processes_and_the_processes(store) -> None:
    gathering = asyncio.create_task(run(store, ["wait"] * 6, concurrency=6))
    async with asyncio.timeout(240):
        while sum(len(t.steps) for t in store.trajectories()) < 6:
            await asyncio.sleep(0.05)
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert not multiprocessing.active_children()
    ended = Counter((t.status, t.failure and t.failure.cause, len(t.steps)) for t in store.trajectories())
    assert ended == {("failed", "cancelled", 1): 6}


async def test_a_rollout_that_cannot_be_sent_back_is_an_error_that_says_so() -> None:
    with pytest.raises(RolloutFailedError, match="cannot be sent back"):
        async with runner_of(1, Job(agents.make, (), Terms())) as runner:
            await agather_on(runner, [Scenario("object")], group_size=1)
    assert not multiprocessing.active_children()


async def test_an_agent_that_cannot_be_built_is_an_error_with_its_cause() -> None:
    with pytest.raises(ConfigError, match="cannot begin: ValueError: the prompt file is missing"):
        async with runner_of(1, Job(agents.make, ("the prompt file is missing",), Terms())):
            pass
    assert not multiprocessing.active_children()


class Unpicklable(NullSink):
    def __reduce__(self):
        raise TypeError("it holds a socket")


@pytest.mark.parametrize(
    ("count", "terms", "message"),
    [
        (0, Terms(), "workers=0"),
        (2, Terms(reward=lambda t: 1.0), "the reward function is sent"),
        (2, Terms(sink=Unpicklable()), "the sink is sent.*holds a socket"),
        (2, Terms(timeout=-1), "timeout=-1"),
    ],
)
async def test_what_cannot_work_is_refused_before_a_process_is_started(count, terms, message) -> None:
    with pytest.raises(ConfigError, match=message):
        async with runner_of(count, Job(agents.make, (), terms)):
            assert not multiprocessing.active_children()


def pids(groups: Gathered) -> set[int]:
    return {t.metadata["output"] for g in groups for t in g if not t.failed}


async def test_processes_that_are_kept_do_one_job_after_the_other_and_the_dead_are_replaced(store) -> None:
    names = [Scenario(f"s{i}") for i in range(8)]
    recorded = Job(agents.make, (), Terms(agents.half, sink=store.sink()))
    async with asyncio.timeout(240), Workers(2) as workers:
        async with workers.doing(recorded) as runner:
            first = pids(await agather_on(runner, names, group_size=1, concurrency=4))
        async with workers.doing(Job(agents.make, (), Terms())) as runner:
            unscored = await agather_on(runner, names, group_size=1, concurrency=4)
        assert len(first) == 2
        assert pids(unscored) <= first  # rollouts this quick may all be done by one
        assert [t.reward for g in unscored for t in g] == [None] * 8
        with pytest.raises(ConfigError, match="the prompt file is missing"):
            async with workers.doing(Job(agents.make, ("the prompt file is missing",), Terms())):
                pass
        async with workers.doing(recorded) as runner:
            (dead,) = (await agather_on(runner, [Scenario("die")], group_size=1, min_group_size=0)).failed
        assert [s.message() for s in dead.steps] == ["die"]
        async with workers.doing(recorded) as runner:
            later = pids(await agather_on(runner, names, group_size=1, concurrency=4))
        assert len(later) == 2
        assert len(later & first) == 1
    assert not multiprocessing.active_children()
    with pytest.raises(ConfigError, match="not running: use them inside"):
        async with workers.doing(recorded):
            pass


async def test_the_same_job_at_the_same_time_builds_its_agent_once_in_each_process() -> None:
    def job() -> Job:
        return Job(agents.make_counted, (), Terms())

    async def outputs(runner: Runner, *names: str) -> set[tuple[int, int]]:
        scenarios = [Scenario(name) for name in names]
        groups = await agather_on(runner, scenarios, group_size=1, min_group_size=0, concurrency=4)
        return {t.metadata["output"] for g in groups for t in g if not t.failed}

    names = [f"s{i}" for i in range(8)]
    async with asyncio.timeout(240), Workers(2) as workers:
        async with workers.doing(job()) as one, workers.doing(job()) as other:
            first, second = await asyncio.gather(outputs(one, *names), outputs(other, *names))
            assert first == second
            assert [number for _, number in first] == [1, 1]
        async with workers.doing(job()) as later:
            assert {number for _, number in await outputs(later, *names)} == {2}
            assert await outputs(later, "die") == set()
            async with workers.doing(job()) as joined:  # in the process that took the dead one's place, too
                assert sorted(number for _, number in await outputs(joined, *names)) == [1, 2]
            assert {number for _, number in await outputs(later, *names)} == {2}


async def test_a_process_that_died_is_noticed_though_a_child_of_its_lives_on(store, tmp_path: Path) -> None:
    scenario = Scenario("leave a child and die", {"pid": str(tmp_path / "pid")})
    job = Job(agents.make, (), Terms(sink=store.sink()))
    try:
        async with asyncio.timeout(40), runner_of(1, job) as runner:
            (dead,) = (await agather_on(runner, [scenario], group_size=1, min_group_size=0)).failed
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert "SIGKILL" in dead.failure.message


async def test_a_rollout_that_is_cancelled_before_its_process_has_begun_it_ends_at_once(
    tmp_path: Path,
) -> None:
    blocks, until = tmp_path / "blocks", tmp_path / "until"
    async with asyncio.timeout(240), runner_of(1, Job(agents.make, (), Terms())) as runner:
        inputs = {"blocks": str(blocks), "until": str(until)}
        blocking = asyncio.create_task(runner.run(Plan(scenario=Scenario("block", inputs))))
        while not blocks.exists():
            await asyncio.sleep(0.01)
        behind = asyncio.create_task(runner.run(Plan(scenario=Scenario("a"))))
        await asyncio.sleep(0)  # it has been sent
        behind.cancel()
        await asyncio.sleep(0)  # so has that
        until.touch()
        await blocking
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await behind
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (Scenario("a", {"tool": lambda: None}), "'a' cannot be sent to a worker process"),
        (Scenario("a", {"error": agents.OddError("no", status=418)}), "OddError.*status"),
        (Scenario("odd error"), "cannot be read here: .*OddError.*status"),
    ],
)
async def test_what_does_not_survive_the_way_to_a_process_or_back_is_an_error(scenario, message) -> None:
    async with asyncio.timeout(60), runner_of(1, Job(agents.make, (), Terms())) as runner:
        with pytest.raises(RolloutFailedError, match=message):
            await agather_on(runner, [scenario], group_size=1)
        assert len(await agather_on(runner, [Scenario("b")], group_size=1)) == 1
    assert not multiprocessing.active_children()


async def test_an_agent_that_is_built_when_its_job_is_over_is_not_kept(tmp_path: Path) -> None:
    worker = WorkerHandle.start(0)
    try:
        slow = worker.begin(1, pickle.dumps(Job(agents.make_once_there, (tmp_path / "go",), Terms())))
        worker.send(Forget(1))
        async with asyncio.timeout(60):
            await asyncio.wrap_future(worker.begin(2, pickle.dumps(Job(agents.make, (), Terms()))))
            (tmp_path / "go").touch()
            await asyncio.wrap_future(slow)
            with pytest.raises(RolloutFailedError, match="KeyError: 1"):
                await worker.run(1, Plan(scenario=Scenario("a")))
    finally:
        worker.ask_to_stop()
        await asyncio.to_thread(worker.stop)


async def test_processes_that_are_started_for_somebody_who_is_cancelled_end(monkeypatch) -> None:
    starting, go_on = threading.Event(), threading.Event()
    start = WorkerHandle.start

    def slowly(number: int) -> WorkerHandle:
        starting.set()
        go_on.wait(60)
        return start(number)

    monkeypatch.setattr(WorkerHandle, "start", slowly)
    entering = asyncio.create_task(Workers(2).__aenter__())
    await asyncio.to_thread(starting.wait, 60)
    entering.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await entering
    async with asyncio.timeout(60):
        while multiprocessing.active_children():
            await asyncio.sleep(0.05)


HANGING = """
import asyncio, sys
from helpers import worker_agents as agents
from art_core.gather import agather_on
from art_core.rollouts import Terms
from art_core.types import Scenario
from art_core.workers import Job, runner_of

async def main():
    async with runner_of(1, Job(agents.make, (), Terms())) as runner:
        await agather_on(runner, [Scenario("hang in a thread", {"pid": sys.argv[1]})], group_size=1)

if __name__ == "__main__":
    asyncio.run(main())
"""


def runs(pid: int) -> bool:
    """Whether it does, and is not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_process_whose_parent_was_killed_ends_though_a_thread_of_its_hangs(tmp_path: Path) -> None:
    script, written = tmp_path / "hanging.py", tmp_path / "pid"
    script.write_text(HANGING)
    paths = os.pathsep.join(sys.path)
    parent = subprocess.Popen([sys.executable, script, written], env=os.environ | {"PYTHONPATH": paths})
    deadline = time.monotonic() + 60
    while not (written.exists() and written.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker = int(written.read_text())
    parent.kill()
    parent.wait()
    try:
        deadline = time.monotonic() + 40
        while runs(worker):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

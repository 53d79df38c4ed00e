import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from art_core.errors import EngineError
from art_core.inference.availability import ALWAYS, HeldTooLongError, ServerLives, availability_of
from art_core.inference.restarts import RestartBudget


class Checks:
    """Counts how often a look was asked for."""

    def __init__(self) -> None:
        self.asked = 0
        self.lives = ServerLives(self.ask)

    def ask(self) -> None:
        self.asked += 1


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_requests_wait_while_a_server_is_down_and_go_to_its_next_life():
    lives = Checks().lives
    lives.begin()
    assert await lives.aready() == 1
    lives.down()
    waiting = [asyncio.create_task(lives.aready()) for _ in range(3)]
    with ThreadPoolExecutor() as threads:
        thread = threads.submit(lives.ready)
        await settled()
        assert not any(task.done() for task in waiting)
        assert not thread.done()
        lives.begin()
        assert await asyncio.gather(*waiting) == [2, 2, 2]
        assert thread.result(5) == 2


async def test_requests_wait_at_a_held_server_for_as_long_as_its_owner_said_and_no_longer():
    lives = Checks().lives
    lives.begin()
    lives.hold(0.02)
    with pytest.raises(HeldTooLongError, match=r"held for 0\.02 s: .*EngineConfig\.hold_timeout"):
        await lives.aready()
    with pytest.raises(HeldTooLongError):
        await asyncio.to_thread(lives.ready)
    assert await lives.aup() == 1, "its owner does not wait"
    lives.hold(60)
    waiting = [asyncio.create_task(lives.aready()), asyncio.create_task(asyncio.to_thread(lives.ready))]
    await settled()
    lives.down()  # now it is waited for as for any server that died
    lives.begin()
    await settled()
    assert not any(task.done() for task in waiting)
    lives.release()
    assert await asyncio.gather(*waiting) == [2, 2]


async def test_a_failed_request_is_sent_again_when_there_is_a_new_life():
    checks = Checks()
    checks.lives.begin()
    lost = asyncio.create_task(checks.lives.alost(1))
    await settled()
    assert checks.asked == 1
    checks.lives.down()
    await settled()
    assert not lost.done()
    checks.lives.begin()
    assert await lost
    assert await checks.lives.alost(1), "whoever comes late need not ask"
    assert checks.asked == 1


async def test_a_look_that_began_before_the_failure_proves_nothing():
    checks = Checks()
    checks.lives.begin()
    early = checks.lives.look()
    lost = asyncio.create_task(checks.lives.alost(1))
    await settled()
    checks.lives.found_well(early)
    await settled()
    assert not lost.done()
    checks.lives.found_well(checks.lives.look())
    assert await lost is False


async def test_whoever_waits_for_a_server_that_does_not_come_back_is_told_why():
    lives = Checks().lives
    lives.begin()
    tasks = [asyncio.create_task(lives.alost(1)), asyncio.create_task(lives.alost(1))]
    lives.down()
    tasks.append(asyncio.create_task(lives.aready()))
    await settled()
    lives.end(EngineError("the GPU is on fire"))
    for task in tasks:
        with pytest.raises(EngineError, match="on fire"):
            await task
    with pytest.raises(EngineError, match="on fire"):
        lives.ready()


async def test_a_server_that_is_closed_keeps_nobody_waiting():
    lives = Checks().lives
    lives.begin()
    lives.down()
    ready, lost = asyncio.create_task(lives.aready()), asyncio.create_task(lives.alost(1))
    await settled()
    lives.close()
    assert await ready == 1
    assert await lost is False


async def test_a_waiter_that_is_cancelled_disturbs_no_other():
    lives = Checks().lives
    lives.begin()
    lives.down()
    impatient, patient = asyncio.create_task(lives.aready()), asyncio.create_task(lives.aready())
    await settled()
    impatient.cancel()
    await settled()
    lives.begin()
    assert await patient == 2
    assert impatient.cancelled()


def test_threads_and_loops_of_all_kinds_wait_on_one_server():
    lives = Checks().lives
    lives.begin()
    lives.down()
    arrived = threading.Semaphore(0)

    def in_a_loop_of_its_own() -> int:
        arrived.release()
        return asyncio.run(lives.aready())

    def in_a_thread() -> int:
        arrived.release()
        return lives.ready()

    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(wait) for wait in [in_a_loop_of_its_own, in_a_thread] * 4]
        for _ in waiting:
            arrived.acquire()
        lives.begin()
        assert [w.result(10) for w in waiting] == [2] * 8


def test_what_nobody_restarts_is_always_available():
    assert availability_of(object()) is ALWAYS
    assert ALWAYS.ready() == 0
    assert ALWAYS.lost(0) is False


def test_restarts_are_bounded_within_a_window_and_forgotten_after_it():
    now = 0.0
    budget = RestartBudget(2, 60.0, clock=lambda: now)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    now = 59.9
    assert not budget.take()
    now = 60.0
    assert [budget.take() for _ in range(3)] == [True, True, False]
    assert not RestartBudget(0, 60.0).take()

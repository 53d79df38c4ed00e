"""When the mailbox example ends: its time, the first signal and the second one."""

import asyncio
import signal

import pytest

from examples.email_research import stopping as module
from examples.email_research.stopping import Stopping


def test_work_begins_only_if_there_is_time_for_it_and_for_what_follows() -> None:
    assert Stopping(60.0).reason(needed=60.0) is None
    assert Stopping(60.0).reason(needed=3601.0) == "time"
    assert Stopping(0.0).reason() == "time"
    assert Stopping(None).reason(needed=1e9) is None


async def run_until_told(stopping: Stopping, given_up: asyncio.Event) -> None:
    assert await stopping.unless_told(asyncio.sleep(3600, "done")) is None
    given_up.set()
    await asyncio.sleep(3600)


async def test_the_first_signal_gives_up_what_runs_and_a_later_one_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopping, given_up, told = Stopping(60.0), asyncio.Event(), list[str]()
    task = asyncio.create_task(run_until_told(stopping, given_up))
    await asyncio.sleep(0)
    stopping.heard(signal.SIGTERM, task, told.append)
    await asyncio.wait_for(given_up.wait(), 30)
    assert stopping.reason() == "SIGTERM"
    assert len(told) == 1
    monkeypatch.setattr(module, "SAME_SIGNAL", 3600.0)
    stopping.heard(signal.SIGTERM, task, told.append)  # the same one, as `timeout` sends it
    assert task.cancelling() == 0
    monkeypatch.setattr(module, "SAME_SIGNAL", -1.0)
    stopping.heard(signal.SIGINT, task, told.append)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopping.reason() == "SIGTERM", "it keeps its reason"
    assert len(told) == 1


async def test_work_that_nobody_gives_up_comes_to_its_end_or_fails_as_it_is() -> None:
    stopping = Stopping()

    async def failing() -> None:
        raise ValueError("no mail")

    assert await stopping.unless_told(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="no mail"):
        await stopping.unless_told(failing())

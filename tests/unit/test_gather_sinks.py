"""What a sink is told while rollouts are gathered, what progress shows, and which arguments are refused."""

import asyncio
from collections import Counter
from concurrent.futures import Future

import pytest
from helpers.gathering import THREE, Log, say, talk

from art_core.errors import ConfigError, RolloutFailedError, StoreError
from art_core.gather import LEAST_ENDS, agather, gather
from art_core.progress import GatherProgress, report_progress
from art_core.recording import Acknowledgement, NullSink, current_rollout
from art_core.types import Scenario


async def test_a_sink_that_cannot_keep_a_rollout_stops_everything_loudly() -> None:
    class Full(NullSink):
        def end(self, trajectory):
            failed: Future[None] = Future()
            failed.set_exception(StoreError("the disk is full"))
            return failed

    with pytest.raises(StoreError, match="disk is full"):
        await agather(talk, THREE, group_size=2, sink=Full())


class Slow(Log):
    """Acknowledges ends when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[Future[None]] = []

    def end(self, trajectory):
        super().end(trajectory)
        self.ends.append(Future())
        return self.ends[-1]


async def until(true) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)


async def test_the_next_rollout_starts_while_the_sink_keeps_the_end_of_the_last_one() -> None:
    sink = Slow()
    gathering = asyncio.create_task(agather(talk, THREE, group_size=4, concurrency=1, sink=sink))
    most = 1 + LEAST_ENDS
    await until(lambda: len(sink.ends) == most)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(sink.begun) == most  # the next one waits for an acknowledgement: they never pile up
    sink.ends[0].set_result(None)
    await until(lambda: len(sink.ends) == most + 1)
    for end in sink.ends[2:]:
        end.set_result(None)
    await until(lambda: len(sink.ends) == 12)
    for end in sink.ends[most + 1 :]:
        end.set_result(None)
    await asyncio.sleep(0.01)
    assert not gathering.done()
    sink.ends[1].set_result(None)
    assert [t.status for group in await gathering for t in group] == ["finished"] * 12


class Lingering(Acknowledgement):
    """Knows whether it was told to hurry."""

    hurried = False

    def hurry(self) -> None:
        self.hurried = True


async def test_only_the_ends_that_nobody_starts_after_hurry_the_sink() -> None:
    class Patient(Slow):
        def end(self, trajectory):
            super().end(trajectory)
            self.ends[-1] = Lingering()
            return self.ends[-1]

    sink = Patient()
    gathering = asyncio.create_task(agather(talk, THREE, group_size=1, concurrency=1, sink=sink))
    await until(lambda: len(sink.ends) == 3 and sink.ends[-1].hurried)
    assert [end.hurried for end in sink.ends] == [False, False, True]
    for end in sink.ends:
        end.set_result(None)
    await gathering


async def test_an_end_that_the_sink_refuses_late_stops_what_runs_by_then() -> None:
    sink, second = Slow(), asyncio.Event()

    async def agent(scenario: Scenario) -> None:
        say()
        if scenario.id == "b":
            second.set()
            await asyncio.Event().wait()

    gathering = asyncio.create_task(agather(agent, THREE, group_size=1, concurrency=1, sink=sink))
    await second.wait()
    sink.ends[0].set_exception(StoreError("the disk is full"))
    await until(lambda: len(sink.ends) == 2)
    sink.ends[1].set_result(None)
    with pytest.raises(StoreError, match="the disk is full"):
        await gathering
    assert list(sink.ended.values()) == [("finished", None), ("failed", "cancelled")]
    assert len(sink.begun) == 2


async def test_a_rollout_that_is_cancelled_while_its_end_is_kept_ends_as_it_was_ending() -> None:
    sink, ended = Slow(), []

    async def agent(scenario: Scenario) -> None:
        ended.append(current_rollout())
        say()

    gathering = asyncio.create_task(agather(agent, THREE, group_size=1, concurrency=1, sink=sink))
    await until(lambda: len(sink.ends) == 3)
    gathering.cancel()
    await asyncio.sleep(0.01)
    assert not gathering.done()
    for end in sink.ends:
        end.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert list(sink.ended.values()) == [("finished", None)] * 3
    assert all(rollout.ended for rollout in ended)
    assert len(sink.ends) == 3  # each was ended once


async def test_with_fail_fast_nothing_starts_after_the_failure() -> None:
    def broken(scenario: Scenario) -> None:
        raise ValueError("boom")

    sink = Log()
    with pytest.raises(RolloutFailedError, match="boom"):
        await agather(broken, THREE, group_size=2, concurrency=1, on_failure="fail_fast", sink=sink)
    assert len(sink.begun) == 1


async def test_a_callable_sees_every_change_of_progress() -> None:
    async def agent(scenario: Scenario) -> None:
        say()
        if scenario.id == "b":
            raise RuntimeError

    seen: list[GatherProgress] = []
    await agather(
        agent,
        THREE,
        group_size=1,
        reward=lambda t: 0.5,
        progress=seen.append,
        min_group_size=0,
        concurrency=1,
    )
    assert seen == [
        GatherProgress(3, 1, 0, 0.5),
        GatherProgress(3, 2, 1, 0.5),
        GatherProgress(3, 3, 1, 0.5),
    ]


async def test_progress_is_quiet_where_there_is_no_terminal(capfd) -> None:
    await agather(talk, THREE, group_size=1)
    out, err = capfd.readouterr()
    assert out == err == ""


def test_progress_on_a_terminal_shows_counts_failures_and_the_live_reward(monkeypatch, capfd) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")

    async def agent(scenario: Scenario) -> None:
        say()
        if scenario.id == "b":
            raise RuntimeError

    gather(agent, THREE, group_size=1, reward=lambda t: 0.5, min_group_size=0)
    shown = capfd.readouterr().err
    assert "3/3" in shown
    assert "1 failed" in shown
    assert "0.500" in shown


def test_a_board_without_rollouts_shows_nothing(capfd) -> None:
    with report_progress(True, total=0):
        pass
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_size": 0},
        {"group_size": 2, "min_group_size": 3},
        {"group_size": 2, "concurrency": 0},
        {"group_size": 2, "retries": -1},
        {"group_size": 2, "timeout": 0},
        {"group_size": 2, "on_failure": "ignore"},
    ],
)
async def test_an_argument_out_of_range_is_named(wrong) -> None:
    with pytest.raises(ConfigError, match=list(wrong)[-1]):
        await agather(talk, THREE, **wrong)


async def test_groups_without_spread_are_replaced_by_those_of_spares_in_their_place():
    tried: list[str] = []

    async def play(scenario: Scenario) -> str:
        tried.append(scenario.id)
        return await talk(scenario)

    def reward(trajectory):
        solved = trajectory.scenario.id.startswith("solved")
        return 1.0 if solved else float(trajectory.metadata["member"])

    seen: list[GatherProgress] = []
    spares = iter([Scenario("solved too"), Scenario("new"), Scenario("never")])
    groups = await agather(
        play,
        [Scenario("solved"), Scenario("open")],
        group_size=2,
        reward=reward,
        seed=0,
        spares=spares,
        progress=seen.append,
    )
    assert [g.scenario.id for g in groups] == ["new", "open"]
    assert [g.scenario.id for g in groups.flat] == ["solved", "solved too"]
    assert Counter(tried) == {"solved": 2, "open": 2, "solved too": 2, "new": 2}
    assert next(spares).id == "never"
    assert (seen[-1].done, seen[-1].total) == (8, 8)


async def test_when_spares_run_out_groups_without_spread_stay():
    groups = await agather(
        talk, THREE, group_size=2, reward=lambda t: 1.0, spares=[Scenario("d")], progress=False
    )
    assert [g.scenario.id for g in groups] == ["d", "b", "c"]
    assert [g.scenario.id for g in groups.flat] == ["a"]


async def test_a_spare_that_was_tried_before_is_sampled_with_other_seeds():
    groups = await agather(
        talk,
        [Scenario("a")],
        group_size=2,
        reward=lambda t: 1.0,
        seed=3,
        spares=[Scenario("a")],
        progress=False,
    )
    seeds = [t.metadata["seed"] for group in (*groups, *groups.flat) for t in group]
    assert len(set(seeds)) == 4

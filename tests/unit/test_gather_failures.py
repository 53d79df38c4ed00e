"""Rollouts that fail, end by their deadline or are interrupted, and those without a policy call."""

import asyncio
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from helpers.gathering import THREE, Log, say

from art_core import TrainableModel
from art_core.errors import NothingToTrainError, RolloutFailedError
from art_core.gather import OnFailure, agather, gather
from art_core.recording import current_rollout
from art_core.types import Scenario

DEADLINES = (0.3, 30.0)
"""Of rollouts that end by their deadline beside others that do not: the second where a machine is busy."""


async def test_an_agent_that_raises_keeps_its_steps_and_has_no_reward() -> None:
    """C10, C33."""

    async def agent(scenario: Scenario) -> None:
        say("before")
        if current_rollout().metadata["member"] == 1:
            raise RuntimeError("the tool broke")

    sink = Log()
    (group,) = await agather(agent, [Scenario("s")], group_size=3, reward=lambda t: 1.0, sink=sink)
    broken = group.trajectories[1]
    assert broken.failed
    assert broken.reward is None
    assert broken.failure.cause == "exception"
    assert broken.failure.message == "the tool broke"
    assert broken.failure.error_type == "builtins.RuntimeError"
    assert [s.message() for s in broken.steps] == ["before"]
    assert group.rewards == (1.0, 1.0)
    assert Counter(sink.ended.values()) == {("finished", None): 2, ("failed", "exception"): 1}


async def test_the_failure_of_a_task_group_says_what_each_task_raised() -> None:
    async def task(error: Exception) -> None:
        raise error

    async def agent(scenario: Scenario) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(task(RuntimeError("the tool broke")))
            tasks.create_task(task(KeyError()))

    groups = await agather(agent, [Scenario("s")], group_size=1, min_group_size=0, progress=False)
    failure = groups.failed[0].failure
    assert failure.message.endswith(": RuntimeError: the tool broke; KeyError: KeyError()")
    assert failure.error_type == "builtins.ExceptionGroup"


async def test_an_agent_that_never_returns_is_timed_out_and_holds_nobody_up() -> None:
    """C32, C10."""

    async def agent(scenario: Scenario) -> None:
        say()
        if scenario.id == "b":
            await asyncio.Event().wait()

    for timeout in DEADLINES:
        groups = await agather(agent, THREE, group_size=1, timeout=timeout, concurrency=1, min_group_size=0)
        if len(groups.failed) == 1:
            break
    assert [t.failure and t.failure.cause for g in groups for t in g] == [None, "timeout", None]
    assert f"{timeout:g} s" in groups[1].trajectories[0].failure.message
    assert len(groups[1].trajectories[0].steps) == 1


async def test_a_sync_agent_that_never_returns_holds_nobody_up_not_even_its_siblings_threads() -> None:
    """C32."""
    released = threading.Event()

    def agent(scenario: Scenario) -> None:
        say()
        if scenario.id != "s9":
            released.wait(280)

    scenarios = [Scenario(f"s{i}") for i in range(10)]
    for timeout in DEADLINES:
        started = time.perf_counter()
        groups = await agather(agent, scenarios, group_size=1, timeout=timeout, min_group_size=0)
        assert time.perf_counter() - started < 60 + timeout
        if len(groups.failed) == 9:
            break
    assert [t.failed for g in groups for t in g] == [True] * 9 + [False]
    released.set()


async def test_an_agents_own_timeout_error_is_an_exception_not_our_deadline() -> None:
    async def agent(scenario: Scenario) -> None:
        say()
        raise TimeoutError("the tool's deadline")

    (group,) = await agather(agent, [Scenario("s")], group_size=1, timeout=60, min_group_size=0)
    assert group.trajectories[0].failure.cause == "exception"


async def test_an_agent_that_cancels_itself_fails_alone() -> None:
    async def agent(scenario: Scenario) -> None:
        say()
        if scenario.id == "b":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

    groups = await agather(agent, THREE, group_size=1, min_group_size=0)
    assert [t.failure and t.failure.cause for g in groups for t in g] == [None, "cancelled", None]


async def test_an_agent_that_swallows_its_cancellation_is_left_behind(monkeypatch, caplog) -> None:
    """C32."""
    monkeypatch.setattr("art_core.rollouts.CANCEL_GRACE", 0.1)
    release = asyncio.Event()

    async def agent(scenario: Scenario) -> None:
        say()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    (group,) = await agather(agent, [Scenario("s")], group_size=1, timeout=0.1, min_group_size=0)
    assert group.trajectories[0].failure.cause == "timeout"
    assert "left behind" in caplog.text
    release.set()


async def test_a_failed_rollout_is_tried_again_as_a_new_rollout_with_another_seed() -> None:
    seeds: list[int] = []

    async def agent(scenario: Scenario) -> None:
        rollout = current_rollout()
        seeds.append(rollout.metadata["seed"])
        say()
        if rollout.metadata["attempt"] < 3:
            raise RuntimeError("flaky")

    sink = Log()
    (group,) = await agather(agent, [Scenario("s")], group_size=1, retries=2, sink=sink, seed=0)
    assert not group.trajectories[0].failed
    assert group.trajectories[0].metadata["attempt"] == 3
    assert len(set(seeds)) == 3
    assert Counter(status for status, _ in sink.ended.values()) == {"failed": 2, "finished": 1}


async def test_the_retry_policy_alone_tries_once_more() -> None:
    tries: list[int] = []

    async def agent(scenario: Scenario) -> None:
        tries.append(1)
        raise RuntimeError("always")

    (group,) = await agather(agent, [Scenario("s")], group_size=1, on_failure="retry", min_group_size=0)
    assert group.trajectories[0].failed
    assert len(tries) == 2


async def test_fail_fast_cancels_the_rest_and_raises() -> None:
    sink = Log()
    cleaned_up: list[str] = []

    async def agent(scenario: Scenario) -> None:
        say()
        if scenario.id == "b":
            raise RuntimeError("boom")
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.append(scenario.id)

    with pytest.raises(RolloutFailedError, match=r"scenario 'b' failed.*boom") as raised:
        await agather(agent, THREE, group_size=1, on_failure=OnFailure.FAIL_FAST, sink=sink)
    assert "fail_fast" in str(raised.value)
    assert sorted(cleaned_up) == ["a", "c"]
    assert Counter(sink.ended.values()) == {("failed", "exception"): 1, ("failed", "cancelled"): 2}


async def test_cancelling_leaves_nothing_running_and_no_rollout_open() -> None:
    sink = Log()
    running: set[int] = set()
    all_started = asyncio.Event()

    async def agent(scenario: Scenario) -> None:
        me = id(asyncio.current_task())
        running.add(me)
        if len(running) == 30:
            all_started.set()
        try:
            await asyncio.Event().wait()
        finally:
            running.discard(me)

    before = asyncio.all_tasks()
    gathering = asyncio.create_task(agather(agent, THREE, group_size=20, concurrency=30, sink=sink))
    await all_started.wait()
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert not running
    assert asyncio.all_tasks() == before
    assert len(sink.begun) == 30  # the other 30 were never started
    assert set(sink.ended.values()) == {("failed", "cancelled")}
    assert set(sink.ended) == set(sink.begun)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts are noticed, also where tests run in the background of a shell, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_from_the_terminal_ends_every_rollout() -> None:
    sink = Log()
    running: list[str] = []

    async def agent(scenario: Scenario) -> None:
        running.append(scenario.id)
        if len(running) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        gather(agent, THREE, group_size=2, sink=sink)
    assert list(sink.ended.values()) == [("failed", "cancelled")] * 6


async def test_groups_with_too_few_finished_members_are_set_aside_and_reported(caplog) -> None:
    async def agent(scenario: Scenario) -> None:
        say()
        if scenario.id == "b" and current_rollout().metadata["member"] > 0:
            raise RuntimeError("the disk of tool X is full")

    with caplog.at_level(logging.WARNING):
        groups = await agather(agent, THREE, group_size=3, reward=lambda t: 1.0)
    assert [g.scenario.id for g in groups] == ["a", "c"]
    assert [g.scenario.id for g in groups.dropped] == ["b"]
    assert len(groups.failed) == 2
    assert "'b' dropped: 1 of 3 rollouts finished, 2 needed (2 exception)" in caplog.text
    assert "the disk of tool X is full" in caplog.text


async def test_training_on_groups_that_were_all_dropped_says_why_they_were() -> None:
    def agent(scenario: Scenario) -> None:
        say("hello")
        raise RuntimeError("the tool is down")

    groups = await agather(agent, THREE, group_size=2, progress=False)
    assert list(groups) == []
    model = TrainableModel(base_model="none", project="p", name="m")
    with pytest.raises(NothingToTrainError, match=r"all 3 groups .* \(6 exception\); .*: the tool is down"):
        await model.atrain(groups)


async def test_a_rollout_without_a_captured_policy_call_fails_and_says_where_the_calls_went() -> None:
    """C02."""

    async def agent(scenario: Scenario) -> None:
        rollout = current_rollout()
        match scenario.id:
            case "thread":
                rollout.count_fault("unattributed_calls")
                rollout.count_fault("unattributed_calls")
            case "cache":
                say(tokens=None, policy=None, untrainable="answered by an LLM cache")
            case "other":
                say(model="gpt-closed", policy=None)
            case "down":
                say(response=None, error="connection refused")
            case "none":
                pass

    scenarios = [Scenario(name) for name in ("thread", "cache", "other", "down", "none")]
    groups = await agather(agent, scenarios, group_size=1, reward=lambda t: 0.0, min_group_size=0)
    failures = {g.scenario.id: g.trajectories[0].failure for g in groups}
    assert {f.cause for f in failures.values()} == {"no_policy_calls"}
    assert all(g.trajectories[0].reward is None for g in groups)
    assert "2 unattributed calls" in failures["thread"].message
    assert "copy_context" in failures["thread"].message
    assert "cache hits" in failures["cache"].message
    assert "1 calls of 'gpt-closed'" in failures["other"].message
    assert "agent@0 got no answer: connection refused" in failures["down"].message
    assert "no LLM call at all" in failures["none"].message


async def test_agents_whose_models_are_not_trained_can_be_rolled_out_too() -> None:
    async def agent(scenario: Scenario) -> None:
        say(model="gpt-closed", policy=None)

    (group,) = await agather(
        agent, [Scenario("s")], group_size=2, reward=lambda t: 1.0, require_policy_calls=False
    )
    assert group.rewards == (1.0, 1.0)

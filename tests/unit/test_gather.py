"""Scenarios x group size: order, seeds, limits, failures, cancellation."""

import asyncio
import contextvars
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.errors import ConfigError, RewardError, RolloutFailedError, StoreError
from art_core.gather import LEAST_ENDS, OnFailure, agather, gather, member_seed
from art_core.progress import GatherProgress, report_progress
from art_core.recording import Acknowledgement, NullSink, current_rollout, new_id
from art_core.types import PolicyVersion, RolloutStatus, Scenario, Step

POLICY = PolicyVersion("agent", 0)
THREE = [Scenario("a"), Scenario("b"), Scenario("c")]
DEADLINES = (0.3, 30.0)
"""Of rollouts that end by their deadline beside others that do not: the second where a machine is busy."""


def say(text: str = "hi", **changes) -> None:
    """Record a call of the policy into the current rollout."""
    rollout = current_rollout()
    assert rollout is not None
    default = {
        "messages": ({"role": "user", "content": text},),
        "response": {"role": "assistant", "content": text},
        "model": "agent@0",
        "policy": POLICY,
        "started_at": time.time(),
        "duration": 0.0,
    }
    rollout.record(Step(id=new_id("s"), rollout_id=rollout.id, **{**default, **changes}))


async def talk(scenario: Scenario) -> str:
    await asyncio.sleep(0)
    say(scenario.id)
    return f"done {scenario.id}"


class Log(NullSink):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: dict[str, tuple[str, str | None]] = {}

    def begin(self, trajectory):
        self.begun.append(trajectory.id)
        return super().begin(trajectory)

    def end(self, trajectory):
        self.ended[trajectory.id] = (trajectory.status, trajectory.failure and trajectory.failure.cause)
        return super().end(trajectory)


# -- what comes back ---------------------------------------------------------------------------------


async def test_every_scenario_is_run_group_size_times_in_order_however_long_each_takes() -> None:
    async def agent(scenario: Scenario) -> str:
        rollout = current_rollout()
        assert rollout is not None
        await asyncio.sleep(0.02 if scenario.id == "a" else 0)
        say(f"{scenario.id}{rollout.metadata['member']}")
        return scenario.id

    groups = await agather(agent, THREE, group_size=4, reward=lambda t: float(t.metadata["member"]))
    assert [g.scenario.id for g in groups] == ["a", "b", "c"]
    for group in groups:
        assert group.rewards == (0.0, 1.0, 2.0, 3.0)
        assert [t.steps[0].message() for t in group] == [f"{group.scenario.id}{i}" for i in range(4)]
        assert {t.group_id for t in group} == {group.id}
        assert all(t.status is RolloutStatus.FINISHED and t.duration is not None for t in group)
    assert len({g.id for g in groups}) == 3
    assert groups.mean_reward == 1.5
    assert not groups.dropped
    assert not groups.failed


async def test_two_hundred_rollouts_at_once_each_hold_exactly_their_own_steps() -> None:
    """C05."""
    running = most = 0

    async def agent(scenario: Scenario) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for turn in range(3):
            await asyncio.sleep(0.001)
            rollout = current_rollout()
            assert rollout is not None
            say(f"{scenario.id}/{rollout.metadata['member']}/{turn}")
        running -= 1

    scenarios = [Scenario(f"s{i}") for i in range(50)]
    groups = await agather(agent, scenarios, group_size=4, concurrency=200)
    assert most == 200
    for group in groups:
        for member, trajectory in enumerate(group):
            expected = [f"{group.scenario.id}/{member}/{turn}" for turn in range(3)]
            assert [s.message() for s in trajectory.steps] == expected
            assert {s.rollout_id for s in trajectory.steps} == {trajectory.id}


async def test_no_more_rollouts_run_at_once_than_asked_for() -> None:
    running = most = 0

    async def agent(scenario: Scenario) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        say()
        running -= 1

    await agather(agent, THREE, group_size=5, concurrency=3)
    assert most == 3


async def test_sync_agents_run_side_by_side_in_threads_with_their_own_rollout() -> None:
    together = threading.Barrier(20, timeout=60)

    def agent(scenario: Scenario) -> int:
        together.wait()
        say(str(threading.get_ident()))
        return 7

    (group,) = await agather(agent, [Scenario("s")], group_size=20, reward=lambda t, output: output)
    assert group.rewards == (7.0,) * 20
    assert all(len(t.steps) == 1 for t in group)


async def test_the_callers_context_reaches_every_agent_and_nothing_leaks_back() -> None:
    mine = contextvars.ContextVar("mine", default="unset")
    mine.set("set")
    seen: list[str] = []

    def sync_agent(scenario: Scenario) -> None:
        seen.append(mine.get())
        mine.set("changed")
        say()

    async def async_agent(scenario: Scenario) -> None:
        sync_agent(scenario)

    await agather(sync_agent, THREE, group_size=1)
    await agather(async_agent, THREE, group_size=1)
    assert seen == ["set"] * 6
    assert mine.get() == "set"
    assert current_rollout() is None


def test_gather_is_agather_for_sync_code_also_when_a_loop_is_running() -> None:
    assert len(gather(talk, THREE, group_size=2)) == 3

    async def notebook() -> int:
        return len(gather(talk, THREE, group_size=2))

    assert asyncio.run(notebook()) == 3


async def test_no_scenarios_give_no_groups() -> None:
    assert await agather(talk, [], group_size=4) == []


# -- seeds -------------------------------------------------------------------------------------------


async def test_seeds_depend_on_scenario_member_and_base_alone() -> None:
    async def seeds(**options) -> list[int]:
        groups = await agather(talk, THREE, group_size=3, **options)
        return [t.metadata["seed"] for g in groups for t in g]

    first = await seeds(seed=0)
    assert first == await seeds(seed=0, concurrency=1)
    assert len(set(first)) == 9
    assert not set(first) & set(await seeds(seed=1))


async def test_a_scenario_that_is_given_twice_is_sampled_with_other_seeds() -> None:
    groups = await agather(talk, [Scenario("a"), Scenario("a")], group_size=2, seed=0)
    assert len({t.metadata["seed"] for g in groups for t in g}) == 4


async def test_without_a_seed_rollouts_have_none() -> None:
    def agent(scenario: Scenario) -> None:
        say()
        assert current_rollout().next_seed() is None

    (group,) = await agather(agent, [Scenario("a")], group_size=2)
    assert not any("seed" in t.metadata for t in group)


async def test_the_calls_of_a_seeded_rollout_have_seeds_of_their_own_and_the_same_ones_again() -> None:
    async def seeds() -> list[int]:
        seen: list[int] = []

        def agent(scenario: Scenario) -> None:
            say()
            seen.extend(current_rollout().next_seed() for _ in range(3))

        await agather(agent, [Scenario("a")], group_size=2, seed=0, concurrency=1)
        return seen

    first = await seeds()
    assert len(set(first)) == 6
    assert first == await seeds()


@given(st.text(), st.integers(0, 10**6), st.integers(-(10**9), 10**9))
def test_a_seed_is_a_small_natural_number_and_always_the_same(scenario: str, member: int, base: int) -> None:
    seed = member_seed(scenario.encode("utf-8", "replace").decode(), member, base)
    assert 0 <= seed < 2**31
    assert seed == member_seed(scenario.encode("utf-8", "replace").decode(), member, base)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert member_seed("tic-tac-toe/0", 3, 7) == member_seed("tic-tac-toe/0", 3, 7, 1, 0)
    assert [member_seed("s", member) for member in range(2)] == [540614060, 801625296]


# -- failures ----------------------------------------------------------------------------------------


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


# -- no policy calls ---------------------------------------------------------------------------------


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


# -- rewards -----------------------------------------------------------------------------------------


def raising(trajectory):
    raise KeyError("no such key")


async def hanging(trajectory):
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raising, "no such key"),
        (lambda t: float("nan"), "the reward is nan"),
        (lambda t: float("inf"), "the reward is inf"),
        (lambda t: None, "got NoneType"),
        (lambda t: True, "got bool"),
        (lambda t: "0.5", "got str"),
        (lambda t: {"won": float("nan")}, "component 'won'"),
        (lambda t: {}, "no components"),
        (hanging, "no result within"),
    ],
)
async def test_a_reward_function_that_fails_fails_the_rollout_and_is_never_a_zero(reward, message) -> None:
    """C33, C32."""
    (group,) = await agather(
        talk, [Scenario("s")], group_size=2, reward=reward, min_group_size=0,
        timeout=0.3 if reward is hanging else 60,
    )  # fmt: skip
    for trajectory in group:
        assert trajectory.failed
        assert trajectory.reward is None
        assert trajectory.failure.cause == "reward"
        assert message in trajectory.failure.message
        assert len(trajectory.steps) == 1


class Judge:
    async def __call__(self, trajectory, output):
        return 0.25 if output == "done s" else 0.0


async def slow(trajectory):
    await asyncio.sleep(0)
    return 0.25


@pytest.mark.parametrize(
    "reward",
    [
        lambda t: 0.25,
        lambda t, output: 0.25 * (output == "done s"),
        lambda t: {"won": 1.0, "length": -0.75},
        lambda t, verbose=True: 0.25 if verbose else 0.0,
        lambda t, output=None: 0.25 * (output == "done s"),
        lambda t: slow(t),
        lambda *everything: 0.25 * len(everything),
        slow,
        Judge(),
    ],
)
async def test_a_reward_may_be_sync_or_async_and_see_the_output_or_not(reward) -> None:
    (group,) = await agather(talk, [Scenario("s")], group_size=1, reward=reward)
    assert group.rewards == (0.25,)


async def test_named_parts_are_kept_and_their_sum_is_the_reward() -> None:
    (group,) = await agather(
        talk, [Scenario("s")], group_size=1, reward=lambda t: {"won": 1.0, "length": -0.25}
    )
    assert group.trajectories[0].components == {"won": 1.0, "length": -0.25}
    assert group.rewards == (0.75,)


async def test_a_full_reward_scores_nodes_steps_and_metrics_too() -> None:
    from art_core.scoring import Reward

    def reward(t) -> Reward:
        return Reward(1.0, {"won": 1.0}, {"planner": 0.5}, {t.steps[0].id: 0.25}, {"moves": 3.0})

    (group,) = await agather(talk, [Scenario("s")], group_size=1, reward=reward)
    (t,) = group
    assert (t.reward, t.node_rewards, t.metrics) == (1.0, {"planner": 0.5}, {"moves": 3.0})
    assert t.step_rewards == {t.steps[0].id: 0.25}


async def test_a_reward_function_with_the_wrong_arguments_is_refused_before_anything_runs() -> None:
    sink = Log()
    with pytest.raises(RewardError, match=r"must take \(trajectory\) or \(trajectory, output\)"):
        await agather(talk, THREE, group_size=2, reward=lambda a, b, c: 1.0, sink=sink)
    assert not sink.begun


async def test_what_the_judge_says_is_no_step_of_the_rollout() -> None:
    async def reward(trajectory) -> float:
        assert current_rollout() is None
        assert trajectory.status is RolloutStatus.FINISHED
        return 1.0

    (group,) = await agather(talk, [Scenario("s")], group_size=1, reward=reward)
    assert group.rewards == (1.0,)


async def test_the_output_is_kept_if_json_can_hold_it() -> None:
    async def agent(scenario: Scenario):
        say()
        return {"answer": 42} if scenario.id == "a" else object()

    groups = await agather(agent, THREE[:2], group_size=1)
    assert groups[0].trajectories[0].metadata["output"] == {"answer": 42}
    assert "output" not in groups[1].trajectories[0].metadata


async def test_an_agent_may_end_its_own_rollout() -> None:
    async def agent(scenario: Scenario) -> None:
        say()
        current_rollout().finish(0.5)

    (group,) = await agather(agent, [Scenario("s")], group_size=1, reward=lambda t: 1.0)
    assert group.rewards == (0.5,)


# -- the sink, progress, arguments -------------------------------------------------------------------


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

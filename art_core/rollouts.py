"""One rollout, from its start to its end.

Invariant: whatever the agent does (return, raise, hang, cancel itself, call no policy), the rollout ends
with a status, keeps the steps that were captured, and has a reward only if the agent returned and the
reward function gave a finite number.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from art_core.errors import ConfigError, words_of
from art_core.judgings import JUDGINGS, keeping
from art_core.missing_calls import where_calls_went
from art_core.recording import Rollout, Sink, new_id, set_current_rollout
from art_core.scoring import Reward, RewardFunction, score, wants_output
from art_core.threads import ElasticThreads, call
from art_core.types import Failure, RolloutStatus, Scenario, Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

Agent: TypeAlias = Callable[[Scenario], Any] | Callable[[Scenario], Awaitable[Any]]
"""``scenario -> output``, sync or async. `art_core.recording.current_rollout` is the rollout."""

CANCEL_GRACE = 5.0
"""Seconds that cancelled work gets to clean up before it is left behind."""


def _unnoticed() -> bool:
    return False


class _TimedOutError(Exception):
    """Our own deadline passed; a `TimeoutError` of the agent's is an ordinary exception."""


class _CancelledItselfError(Exception):
    """The agent was cancelled, and not by us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A rollout that is to be run, in this process or in another.

    Attributes:
        rollout_id: what it will be called.
        metadata: kept with the trajectory; ``seed``, ``member`` and ``attempt`` among it.
        max_calls: most policy calls.
    """

    scenario: Scenario
    group_id: str | None = None
    rollout_id: str = field(default_factory=partial(new_id, "t"))
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_calls: int | None = None

    def begin(self, sink: Sink | None) -> Rollout:
        """The rollout, begun."""
        return Rollout(
            self.scenario,
            sink=sink,
            group_id=self.group_id,
            rollout_id=self.rollout_id,
            metadata=self.metadata,
            max_calls=self.max_calls,
        )


class Runner(Protocol):
    """Runs planned rollouts; may be asked for many at the same time."""

    async def run(self, plan: Plan, finishing: Callable[[], bool] = _unnoticed) -> Trajectory:
        """Run one to its end; cancelling this ends it as cancelled.

        Args:
            plan: what to run.
            finishing: may be called once nothing of the rollout runs any more, it has not failed, and only
                the sink has still to acknowledge its end; says whether that end may wait for others to be
                kept together with it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for every rollout of a batch; the options are those of `arun`."""

    reward: RewardFunction | None = None
    timeout: float | None = None
    require_policy_calls: bool = True
    sink: Sink | None = None

    def check(self) -> None:
        """Look at the terms before anything runs.

        Raises:
            ConfigError: the timeout is out of range.
            RewardError: the reward function takes the wrong arguments.
        """
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout={self.timeout}: expected seconds above 0, or None for no limit")
        if self.reward is not None:
            wants_output(self.reward)


class InProcess:
    """Runs rollouts here, on the running event loop.

    Args:
        agent: what to run.
        terms: what holds for all rollouts.
    """

    def __init__(self, agent: Agent, terms: Terms) -> None:
        terms.check()
        self._agent = agent
        self._terms = terms
        self._executor = ElasticThreads("art-rollout")

    async def run(self, plan: Plan, finishing: Callable[[], bool] = _unnoticed) -> Trajectory:
        """Run one to its end."""
        terms = self._terms
        return await arun(
            self._agent,
            plan.begin(terms.sink),
            reward=terms.reward,
            timeout=terms.timeout,
            require_policy_calls=terms.require_policy_calls,
            executor=self._executor,
            finishing=finishing,
        )


async def arun(
    agent: Agent,
    rollout: Rollout,
    *,
    reward: RewardFunction | None = None,
    timeout: float | None = None,
    require_policy_calls: bool = True,
    executor: ElasticThreads | None = None,
    finishing: Callable[[], bool] = _unnoticed,
) -> Trajectory:
    """Run an agent once as ``rollout`` and end it.

    The agent's output is kept as ``metadata["output"]`` when JSON can hold it.

    Args:
        agent: called with the rollout's scenario; a sync one runs in a thread.
        rollout: fresh; it is the current rollout of everything that the agent does.
        reward: scores the trajectory once the agent has returned. LLM calls made by it belong to no rollout.
        timeout: seconds for the agent, and as many again for the reward function.
        require_policy_calls: a rollout without one answered policy call fails. Turn off to trace agents
            whose models are not trained.
        executor: where sync functions run.
        finishing: called when it has not failed and only the sink has still to acknowledge its end; says
            whether that may take a moment (see `Runner.run`).

    Returns:
        The ended trajectory; failed ones say why in ``failure``. An agent that ended its own rollout is
        taken at its word.

    Raises:
        asyncio.CancelledError: the caller was cancelled; the rollout has ended as ``cancelled``.
        StoreError: the sink cannot keep the rollout.
    """
    executor = executor or ElasticThreads()
    try:
        try:
            output = await _bounded(_call(agent, rollout, executor), timeout)
        except _TimedOutError:
            return await _fail(rollout, "timeout", f"the agent gave no result within {timeout:g} s")
        except _CancelledItselfError:
            return await _fail(rollout, "cancelled", "something inside the agent cancelled it")
        except Exception as error:
            return await _fail(rollout, "exception", words_of(error), error)
        if rollout.ended:
            return rollout.snapshot()
        if require_policy_calls and not any(step.policy and step.response for step in rollout.steps):
            return await _fail(rollout, "no_policy_calls", where_calls_went(rollout))
        keep_output(rollout, output)
        if reward is None:
            return await rollout.afinish(hurry=not finishing())
        try:
            value = await _bounded(_score(reward, rollout, output, executor), timeout)
        except _TimedOutError:
            return await _fail(rollout, "reward", f"the reward function gave no result within {timeout:g} s")
        except _CancelledItselfError:
            return await _fail(rollout, "reward", "something inside the reward function cancelled it")
        except Exception as error:
            return await _fail(rollout, "reward", words_of(error), error)
        rollout.components.update(value.components)
        rollout.node_rewards.update(value.by_node)
        rollout.step_rewards.update(value.by_step)
        rollout.metrics.update(value.metrics)
        rollout.metadata.update(value.metadata)
        return await rollout.afinish(value.total, hurry=not finishing())
    except asyncio.CancelledError:
        if not rollout.ended:
            await _fail(rollout, "cancelled", "the rollout was cancelled from outside")
        raise


async def _call(agent: Agent, rollout: Rollout, executor: ElasticThreads) -> Any:
    set_current_rollout(rollout)  # in the context of this task, which ends with it
    return await call(executor, agent, rollout.scenario)


async def _score(
    reward: RewardFunction, rollout: Rollout, output: object, executor: ElasticThreads
) -> Reward:
    set_current_rollout(None)  # a judge's calls are not the agent's
    seen = replace(rollout.snapshot(), status=RolloutStatus.FINISHED)
    kept = keeping()
    try:
        return await score(reward, seen, output, executor)
    finally:
        if kept and not rollout.ended:
            rollout.metadata[JUDGINGS] = list(kept)


async def _bounded(work: Coroutine[Any, Any, T], timeout: float | None) -> T:
    # Not asyncio.timeout: work that swallows its cancellation would then be waited for without end.
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        await _stop(task)
        raise
    if not task.done():
        await _stop(task)
        raise _TimedOutError
    if task.cancelled():
        raise _CancelledItselfError
    return task.result()


async def _stop(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE)
    if not task.done():
        logger.warning(
            "%r ignores its cancellation and was left behind after %g s", task.get_coro(), CANCEL_GRACE
        )
    elif not task.cancelled() and task.exception() is not None:
        logger.info("cancelled work ended with %r", task.exception())


async def _fail(rollout: Rollout, cause: str, message: str, error: BaseException | None = None) -> Trajectory:
    if rollout.ended:
        return rollout.snapshot()
    error_type = None if error is None else f"{type(error).__module__}.{type(error).__qualname__}"
    return await rollout.afail(Failure(cause, message, error_type))


def keep_output(rollout: Rollout, output: object) -> None:
    """Put the agent's output into the rollout's metadata, if JSON can hold it."""
    if output is None or "output" in rollout.metadata:
        return
    try:
        json.dumps(output, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return
    rollout.metadata["output"] = output

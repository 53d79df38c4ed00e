"""One rollout, from its start to its end.

Invariant: whatever the agent does (return, raise, hang, cancel itself, call no policy), the rollout ends
with a status, keeps the steps that were captured, and has a reward only if the agent returned and the
reward function gave a finite number.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from art_core.recording import Rollout, recording, set_current_rollout
from art_core.scoring import Reward, RewardFunction, score
from art_core.threads import ElasticThreads, call
from art_core.types import Failure, RolloutStatus, Scenario, Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

Agent: TypeAlias = Callable[[Scenario], Any] | Callable[[Scenario], Awaitable[Any]]
"""``scenario -> output``, sync or async. `art_core.recording.current_rollout` is the rollout."""

CANCEL_GRACE = 5.0
"""Seconds that cancelled work gets to clean up before it is left behind."""


class _TimedOutError(Exception):
    """Our own deadline passed; a `TimeoutError` of the agent's is an ordinary exception."""


class _CancelledItselfError(Exception):
    """The agent was cancelled, and not by us."""


async def arun(
    agent: Agent,
    rollout: Rollout,
    *,
    reward: RewardFunction | None = None,
    timeout: float | None = None,
    require_policy_calls: bool = True,
    executor: ElasticThreads | None = None,
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
            return await _fail(rollout, "exception", str(error) or repr(error), error)
        if rollout.ended:
            return rollout.snapshot()
        if require_policy_calls and not any(step.policy and step.response for step in rollout.steps):
            return await _fail(rollout, "no_policy_calls", where_calls_went(rollout))
        keep_output(rollout, output)
        if reward is None:
            return await rollout.afinish()
        try:
            value = await _bounded(_score(reward, rollout, output, executor), timeout)
        except _TimedOutError:
            return await _fail(rollout, "reward", f"the reward function gave no result within {timeout:g} s")
        except _CancelledItselfError:
            return await _fail(rollout, "reward", "something inside the reward function cancelled it")
        except Exception as error:
            return await _fail(rollout, "reward", str(error) or repr(error), error)
        rollout.components.update(value.components)
        rollout.node_rewards.update(value.by_node)
        rollout.step_rewards.update(value.by_step)
        rollout.metrics.update(value.metrics)
        return await rollout.afinish(value.total)
    except asyncio.CancelledError:
        if not rollout.ended:
            await _fail(rollout, "cancelled", "the rollout was cancelled from outside")
        raise


async def _call(agent: Agent, rollout: Rollout, executor: ElasticThreads) -> Any:
    with recording(rollout):
        return await call(executor, agent, rollout.scenario)


async def _score(
    reward: RewardFunction, rollout: Rollout, output: object, executor: ElasticThreads
) -> Reward:
    set_current_rollout(None)  # a judge's calls are not the agent's
    seen = replace(rollout.snapshot(), status=RolloutStatus.FINISHED)
    return await score(reward, seen, output, executor)


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


FAULTS: Mapping[str, str] = {
    "unattributed_calls": "made where the rollout is not known, such as a thread that the agent started by "
    "itself (start it in a copy of the context: contextvars.copy_context().run)",
    "cache_hits": "answered by an LLM cache without asking the policy (turn the cache off for rollouts)",
    "late_steps": "ended after the agent had returned (await background work before returning)",
}
"""What each kind of fault means for who looks for their calls."""


def where_calls_went(rollout: Rollout) -> str:
    """Say why a rollout holds no call of a policy, as far as capture can tell."""
    steps = rollout.steps
    found: list[str] = []
    faults = rollout.snapshot().faults
    for kind, count in sorted(faults.items()):
        found.append(f"{count} {kind.replace('_', ' ')}: {FAULTS.get(kind, 'counted by capture')}")
    cached = sum("cache" in (step.untrainable or "") for step in steps)
    if cached and "cache_hits" not in faults:
        found.append(f"{cached} cache hits: {FAULTS['cache_hits']}")
    for step in steps:
        if step.policy and step.error:
            found.append(f"a call of {step.policy} got no answer: {step.error}")
    others = Counter(
        step.model for step in steps if not step.policy and "cache" not in (step.untrainable or "")
    )
    for model, count in sorted(others.items()):
        found.append(f"{count} calls of {model!r}, which is no policy of ours")
    where = "; ".join(found) or (
        "capture saw no LLM call at all: does the agent call a model that is recorded, and does it pass on "
        "its config (callbacks=[] silences handlers)?"
    )
    return (
        f"no call of the policy was captured ({where}). To trace agents whose models are not trained, "
        "give require_policy_calls=False"
    )

"""Rollouts of LangGraph agents: graphs, entrypoints, any Runnable, any function.

Invariant: a graph is run as its user would run it. The config that the user gives is never changed, every
rollout has its own thread of a checkpointer, and its own copy of the scenario's inputs.
"""

import asyncio
import copy
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol, TypeAlias, cast

from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import merge_configs
from pydantic import BaseModel

from art_core import gather as core
from art_core.errors import ConfigError
from art_core.gather import Gathered
from art_core.recording import Rollout, Sink, current_rollout
from art_core.rollouts import Agent, arun, keep_output
from art_core.scoring import RewardFunction
from art_core.sync import run_sync
from art_core.threads import ElasticThreads
from art_core.types import Scenario, Trajectory

Graph: TypeAlias = Runnable[Any, Any] | Agent
"""What can be rolled out: a compiled graph, an ``@entrypoint``, any other Runnable, or a function
``scenario -> output``."""


class KeepsRollouts(Protocol):
    """What has a place for rollouts: a `TrainableModel`, a `PolicyEndpoint`."""

    @property
    def sink(self) -> Sink:
        """Where rollouts are kept."""
        ...


async def agather(
    graph: Graph,
    scenarios: Iterable[Scenario],
    *,
    group_size: int,
    reward: RewardFunction | None = None,
    model: KeepsRollouts | None = None,
    config: RunnableConfig | None = None,
    **options: Any,
) -> Gathered:
    """Run a graph ``group_size`` times on every scenario.

    A graph gets a copy of ``scenario.inputs`` as its input, a function gets the scenario. Sync nodes run
    in threads, as many as are needed; for that, the event loop's default executor is replaced.

    Args:
        graph: a compiled graph, an ``@entrypoint``, any Runnable, or ``scenario -> output``.
        scenarios: what to try.
        group_size: rollouts of each scenario.
        reward: ``(trajectory)`` or ``(trajectory, output)``; see `art_core.gather.agather`.
        model: the policy; its store keeps the rollouts. None: they stay in memory.
        config: for every run of the graph (``recursion_limit``, ``configurable``, ``tags``, ...). It must
            not name a ``thread_id``: rollouts would continue each other's conversation.
        **options: of `art_core.gather.agather`: ``concurrency``, ``timeout``, ``retries``, ``on_failure``,
            ``min_group_size``, ``max_calls``, ``require_policy_calls``, ``seed``, ``metadata``, ``sink``,
            ``progress``.

    Returns:
        The groups in the scenarios' order.

    Raises:
        ConfigError: an argument is out of range, or ``config`` names a thread.
        RolloutFailedError: a rollout failed and ``on_failure`` is ``fail_fast``.
    """
    configurable = (config or {}).get("configurable", {})
    if "thread_id" in configurable and "checkpoint_id" not in configurable:
        raise ConfigError(
            f"config names thread_id={configurable['thread_id']!r}, which all rollouts would share; leave it "
            "out (each rollout gets its own), or add the checkpoint_id from which every rollout starts"
        )
    if model is not None:
        options.setdefault("sink", model.sink)
    return await core.agather(
        as_agent(graph, config), scenarios, group_size=group_size, reward=reward, **options
    )


def gather(graph: Graph, scenarios: Iterable[Scenario], *, group_size: int, **options: Any) -> Gathered:
    """`agather` from sync code; takes the same options.

    It blocks until all is done. In async code and notebooks, ``await agather(...)`` is the better one.
    """
    return run_sync(lambda: agather(graph, scenarios, group_size=group_size, **options))


async def arollout(
    graph: Graph,
    scenario: Scenario | Mapping[str, Any],
    *,
    reward: RewardFunction | None = None,
    model: KeepsRollouts | None = None,
    config: RunnableConfig | None = None,
    timeout: float | None = None,
    max_calls: int | None = None,
    require_policy_calls: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> Trajectory:
    """Run a graph once; options as for `agather`, except that ``config`` may name a ``thread_id``.

    Args:
        graph: what to run.
        scenario: a scenario, or the inputs of an unnamed one.
        reward: scores it.
        model: the policy; its store keeps the rollout.
        config: for the graph's run.
        timeout: seconds.
        max_calls: most policy calls.
        require_policy_calls: whether a rollout without one is a failure.
        metadata: kept with the trajectory.

    Returns:
        The ended trajectory; ``failure`` says why if it failed.
    """
    rollout = Rollout(
        scenario if isinstance(scenario, Scenario) else Scenario("default", scenario),
        sink=None if model is None else model.sink,
        max_calls=max_calls,
        metadata=metadata,
    )
    return await arun(
        as_agent(graph, config),
        rollout,
        reward=reward,
        timeout=timeout,
        require_policy_calls=require_policy_calls,
    )


def rollout(graph: Graph, scenario: Scenario | Mapping[str, Any], **options: Any) -> Trajectory:
    """`arollout` from sync code; takes the same options."""
    return run_sync(lambda: arollout(graph, scenario, **options))


def as_agent(graph: Graph, config: RunnableConfig | None = None) -> Agent:
    """A graph as a function ``scenario -> output``.

    Raises:
        ConfigError: it can be neither invoked nor called.
    """
    if not isinstance(graph, Runnable):
        if hasattr(graph, "compile"):
            raise ConfigError(f"{type(graph).__name__} is a graph's builder; pass graph.compile()")
        if not callable(graph):
            raise ConfigError(
                f"{graph!r} can't be rolled out: expected a compiled graph, a Runnable, or a function of the "
                "scenario"
            )
        return graph

    async def agent(scenario: Scenario) -> Any:
        use_elastic_threads()
        output = await graph.ainvoke(copy.deepcopy(dict(scenario.inputs)), own_config(config))
        if (running := current_rollout()) is not None:
            keep_output(running, plain(output))
        return output

    return agent


def own_config(config: RunnableConfig | None) -> RunnableConfig:
    """The user's config with a thread of the current rollout's own; the given one is not changed."""
    running = current_rollout()
    if running is None:
        return merge_configs(config)
    configurable = {"thread_id": running.id, **(config or {}).get("configurable", {})}
    names = {"rollout_id": running.id, "scenario_id": running.scenario.id}
    return merge_configs(config, {"configurable": configurable, "metadata": names})


_elastic: "weakref.WeakSet[asyncio.AbstractEventLoop]" = weakref.WeakSet()


def use_elastic_threads() -> None:
    """Let the running loop start as many threads as its sync nodes need.

    LangGraph runs sync nodes in the loop's default executor, which has ``cpus + 4`` threads: the limit of
    concurrent LLM calls of all rollouts together, and one that hangs never gives its thread back.
    """
    loop = asyncio.get_running_loop()
    if loop not in _elastic:
        loop.set_default_executor(ElasticThreads("art-node"))
        _elastic.add(loop)


def plain(value: Any) -> Any:
    """A graph's output as JSON could hold it: messages in OpenAI's format, objects as dicts."""
    if isinstance(value, BaseMessage):
        return convert_to_openai_messages(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in cast("Iterable[Any]", value)]
    return value

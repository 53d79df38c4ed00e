"""Agents: what rollouts run, as a function of the scenario.

Invariant: whatever is run, each rollout has its own thread of a checkpointer and its own copy of the
scenario's inputs; and a graph that waits for a person has not ended, so it is never scored.
"""

import asyncio
import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar, cast

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import merge_configs
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.pregel import Pregel
from langgraph.pregel.protocol import PregelProtocol
from langgraph.types import GraphOutput, Interrupt

from art_core.errors import AgentInterruptedError, ConfigError
from art_core.recording import Rollout, current_rollout
from art_core.rollouts import Agent, keep_output
from art_core.threads import ElasticThreads, call
from art_core.types import Scenario
from art_langgraph.capturing import capture
from art_langgraph.plain import plain
from art_langgraph.shapes import graph_shape

T = TypeVar("T")


def check_thread(config: RunnableConfig | None) -> None:
    """Refuse a config by which rollouts would share a thread.

    Raises:
        ConfigError: it names one.
    """
    configurable = (config or {}).get("configurable", {})
    if "thread_id" in configurable and "checkpoint_id" not in configurable:
        raise ConfigError(
            f"config names thread_id={configurable['thread_id']!r}, which all rollouts would share; leave it "
            "out (each rollout gets its own), or add the checkpoint_id from which every rollout starts"
        )


def as_agent(
    graph: Runnable[Any, Any] | Agent,
    config: RunnableConfig | None = None,
    *,
    context: Any = None,
    spans: bool = False,
) -> Agent:
    """A graph as a function ``scenario -> output``, captured when a rollout is current.

    The function raises `AgentInterruptedError` where the graph stops at an ``interrupt``: it has not ended,
    so there is nothing to score.

    Args:
        graph: a Runnable, or a function of the scenario.
        config: for every run of a Runnable.
        context: for every run of a graph, or a function ``scenario -> context``.
        spans: whether to record nodes, tools and retrievers, too.

    Raises:
        ConfigError: it can be neither invoked nor called, or takes no ``context``.
    """
    if not isinstance(graph, Runnable) and hasattr(graph, "compile"):
        raise ConfigError(f"{type(graph).__name__} is a graph's builder; pass graph.compile()")
    if not isinstance(graph, Runnable) and not callable(graph):
        raise ConfigError(
            f"{graph!r} can't be rolled out: expected a compiled graph, a Runnable, or a function of the "
            "scenario"
        )
    if context is not None and not isinstance(graph, PregelProtocol):
        raise ConfigError(
            f"context is for graphs of LangGraph, and this is {type(graph).__name__}; a function passes it "
            "on itself: graph.ainvoke(scenario.inputs, context=...)"
        )
    stops = _breakpoints(graph)
    executor = ElasticThreads("art-agent")
    shape = graph_shape(graph)

    async def act(scenario: Scenario, running: Rollout | None) -> Any:
        if not isinstance(graph, Runnable):
            return await call(executor, graph, scenario)
        use_elastic_threads()
        inputs = _own_inputs(scenario)
        own = config if running is None else own_config(running, config)
        if context is None:
            output = await graph.ainvoke(inputs, own)
        else:
            given = context(scenario) if callable(context) else context
            output = await graph.ainvoke(inputs, own, context=given)
        if stops and (ahead := (await cast("Pregel[Any, Any, Any, Any]", graph).aget_state(own or {})).next):
            raise _waits(f"at a breakpoint before {', '.join(map(repr, ahead))}")
        return output

    async def agent(scenario: Scenario) -> Any:
        running = current_rollout()
        if running is None:
            return ended(await act(scenario, None))
        nonlocal shape
        if shape is not None:
            running.note_graph(shape)
            shape = None  # once is enough
        async with capture(rollout=running, spans=spans):
            output = await act(scenario, running)
        keep_output(running, plain(output))
        return ended(output)

    return agent


def ended(output: Any) -> Any:
    """What an agent returned, if it has ended.

    Raises:
        AgentInterruptedError: it waits for a person.
    """
    waiting: Iterable[Interrupt] = ()
    if isinstance(output, GraphOutput):
        waiting = output.interrupts
    elif isinstance(output, Mapping):
        waiting = cast("Mapping[str, Any]", output).get("__interrupt__") or ()
    if asked := ", ".join(repr(interrupt.value) for interrupt in waiting):
        raise _waits(asked)
    return output


def _waits(why: str) -> AgentInterruptedError:
    return AgentInterruptedError(
        f"the agent waits for a person ({why}), and in a rollout there is none: give a function "
        "that answers, as in: out = await graph.ainvoke(scenario.inputs, config), and while it has "
        "'__interrupt__': out = await graph.ainvoke(Command(resume=...), config)"
    )


def _breakpoints(graph: object) -> bool:
    """Whether a graph was compiled with breakpoints, of which its output does not tell.

    Raises:
        ConfigError: and without a checkpointer, so that nobody could go on from them.
    """
    if not isinstance(graph, Pregel) or not (graph.interrupt_before_nodes or graph.interrupt_after_nodes):
        return False
    if not isinstance(graph.checkpointer, BaseCheckpointSaver):
        raise ConfigError(
            f"the graph stops at breakpoints (before {graph.interrupt_before_nodes}, after "
            f"{graph.interrupt_after_nodes}) and has no checkpointer to go on from; compile it without them"
        )
    return True


def _own_inputs(scenario: Scenario) -> dict[str, Any]:
    try:
        return copy.deepcopy(dict(scenario.inputs))
    except Exception as uncopied:  # whatever the inputs' own code raises
        raise ConfigError(
            f"scenario {scenario.id!r}: each rollout gets a copy of the inputs, and these can't be copied: "
            f"{uncopied}. Give plain data; clients and the like go into context= or config="
        ) from uncopied


def own_config(running: Rollout, config: RunnableConfig | None) -> RunnableConfig:
    """The user's config with a thread of the rollout's own; the given one is not changed."""
    configurable = {"thread_id": running.id, **(config or {}).get("configurable", {})}
    names = {"rollout_id": running.id, "scenario_id": running.scenario.id}
    return merge_configs(config, {"configurable": configurable, "metadata": names})


class _NodeThreads(ElasticThreads):
    """Threads in which work sees the context variables of who handed it in."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run ``fn`` in a copy of this context.

        ``loop.run_in_executor`` makes none, and LLM calls in there would belong to no rollout.
        """
        return super().submit(copy_context().run, partial(fn, *args, **kwargs))


_elastic: "weakref.WeakSet[asyncio.AbstractEventLoop]" = weakref.WeakSet()


def use_elastic_threads() -> None:
    """Let the running loop start as many threads as its sync nodes need.

    LangGraph runs sync nodes in the loop's default executor, which has ``cpus + 4`` threads: the limit of
    concurrent LLM calls of all rollouts together, and one that hangs never gives its thread back.
    """
    loop = asyncio.get_running_loop()
    if loop not in _elastic:
        loop.set_default_executor(_NodeThreads("art-node"))
        _elastic.add(loop)

"""learning_graph: the whole learning run as one LangGraph.

Invariant: the graph adds nothing to its nodes but their order; whoever wants another order connects the
nodes of a `LearningLoop` by hand.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from art_core.rollouts import Agent
from art_core.types import Scenario
from art_langgraph.judging import MAX_CONCURRENCY
from art_langgraph.learning_loop import LearningLoop, LearningState

if TYPE_CHECKING:
    from art_core.model import TrainableModel

_NODES_PER_STEP = 8


def learning_graph(
    agent: Runnable[Any, Any] | Agent,
    model: "TrainableModel",
    scenarios: Sequence[Scenario],
    *,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
    interrupt_before: Sequence[str] = (),
    interrupt_after: Sequence[str] = (),
    **options: Any,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Sample, judge, train, publish, evaluate, as a graph.

    So it is used::

        graph = learning_graph(agent, model, scenarios, reward=reward, steps=20, checkpointer=saver)
        thread = {"configurable": {"thread_id": "run-1"}}
        state = graph.invoke({}, thread)      # or graph.stream({}, thread, stream_mode="custom")
        state = graph.invoke(None, thread)    # goes on, after a kill or an interrupt

    Args:
        agent: what is rolled out; it calls ``model``.
        model: the policy, registered when the graph runs.
        scenarios: what to learn from.
        checkpointer: makes the run resumable; give ``durability="sync"`` to ``invoke`` to lose nothing that a
            node has done.
        interrupt_before: nodes to stop before, as in ``["train"]``, for a person to look.
        interrupt_after: nodes to stop after.
        **options: of `LearningLoop`: ``steps``, ``reward``, ``ruler``, ``group_size``, ``evaluate_every``
            and others.

    Returns:
        The compiled graph, with nodes ``plan``, ``rollout``, ``collect``, ``judge`` (with a ruler),
        ``train``, and ``trial`` and ``evaluate`` (with ``evaluate_every``). ``stream_mode="custom"`` streams
        ``rollout``, ``collected``, ``judged``, ``trained``, ``trial`` and ``evaluated``.

    Raises:
        ConfigError: see `LearningLoop`.
    """
    loop = LearningLoop(agent, model, scenarios, **options)
    graph = learning_builder(loop).compile(
        checkpointer=checkpointer,
        interrupt_before=list(interrupt_before),
        interrupt_after=list(interrupt_after),
        name="learning_graph",
    )
    limit = _NODES_PER_STEP * loop.steps + 100
    return graph.with_config({"max_concurrency": MAX_CONCURRENCY, "recursion_limit": limit})


def learning_builder(
    loop: LearningLoop, state_schema: type[Any] = LearningState
) -> StateGraph[Any, Any, Any, Any]:
    """The loop's nodes in their usual order, to be added to before it is compiled.

    Args:
        loop: whose nodes.
        state_schema: `LearningState`, or a class of yours that has more.
    """
    builder = StateGraph[Any, Any, Any, Any](state_schema)
    builder.add_node("plan", loop.plan)
    builder.add_node("rollout", loop.rollout)
    builder.add_node("collect", loop.collect)
    builder.add_node("train", loop.train)
    builder.add_edge(START, "plan")
    builder.add_edge("rollout", "collect")
    builder.add_edge("train", "plan")
    after_plan: dict[Hashable, str] = {"rollout": "rollout", "end": END}
    if loop.judge is None:
        builder.add_edge("collect", "train")
    else:
        builder.add_node("judge", loop.judge)
        builder.add_conditional_edges("collect", loop.after_collect, ["judge", "train"])
        builder.add_edge("judge", "train")
    if loop.evaluates:
        builder.add_node("trial", loop.trial)
        builder.add_node("evaluate", loop.evaluate)
        builder.add_edge("trial", "evaluate")
        builder.add_edge("evaluate", "plan")
        after_plan["trial"] = "trial"
    builder.add_conditional_edges("plan", loop.after_plan, after_plan)
    return builder

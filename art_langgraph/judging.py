"""ruler_graph: run an agent several times and have the runs judged, as one LangGraph.

Invariant: every rollout that was asked for is in the result once, with a reward or with the reason why it has
none; with a checkpointer, nothing that has ended is run or judged again after a kill.

``plan`` sends ``n`` rollouts of each scenario, ``collect`` waits for all and sends each group to ``judge``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Overwrite, Send

from art_core.errors import ConfigError
from art_core.ids import new_id
from art_core.rewards.judgement import Combine
from art_core.rewards.ruler import Ruler
from art_core.rollouts import Agent
from art_core.scoring import RewardFunction
from art_langgraph.graph_node import FunctionNode, Record, check_record, tell
from art_langgraph.graph_records import (
    PlainScenario,
    RolloutRecord,
    ScoreRecord,
    as_plain,
    as_scenario,
    by_trajectory,
    finished,
    newest_batch,
)
from art_langgraph.rollout_node import RolloutNode, RolloutTask
from art_langgraph.ruler_node import RulerNode

if TYPE_CHECKING:
    from art_core.model import TrainableModel

MAX_CONCURRENCY = 64
"""Most nodes at the same time, unless the run's config says otherwise (``max_concurrency``)."""


class RulerInput(TypedDict):
    """What `ruler_graph` takes: scenarios, as `Scenario` or as plain data."""

    scenarios: list[PlainScenario]


class RulerState(TypedDict):
    """The state of `ruler_graph`.

    Attributes:
        scenarios: what to try.
        run: names this thread's runs.
        batch: counts them.
        rollouts: those of the newest run, in order.
        scores: one for each rollout; failed ones have a reason in place of a reward.
    """

    scenarios: list[PlainScenario]
    run: str
    batch: int
    rollouts: Annotated[list[RolloutRecord], newest_batch]
    scores: Annotated[list[ScoreRecord], by_trajectory]


class RulerOutput(TypedDict):
    """What `ruler_graph` gives."""

    rollouts: list[RolloutRecord]
    scores: list[ScoreRecord]


def ruler_graph(
    agent: Runnable[Any, Any] | Agent,
    ruler: Ruler,
    store: "Record | TrainableModel",
    *,
    n: int = 8,
    combine: Combine | None = None,
    reward: RewardFunction | None = None,
    config: RunnableConfig | None = None,
    context: Any = None,
    seed: int = 0,
    timeout: float | None = None,
    retries: int = 0,
    max_calls: int | None = None,
    require_policy_calls: bool = False,
    spans: bool = True,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """A graph that runs an agent ``n`` times on each scenario and has each group judged.

    So it is used, without any training and with any chat model in the agent::

        graph = ruler_graph(agent, Ruler(LangChainJudge("openai:gpt-5-mini")), Store.open("mail"), n=4)
        found = graph.invoke({"scenarios": [{"id": "hello", "inputs": {"messages": [("user", "hi")]}}]})
        found["scores"][0]["reward"], found["scores"][0]["explanation"]

    Args:
        agent: a compiled graph, any Runnable, or a function of the scenario.
        ruler: the judge and its rubric.
        store: keeps the rollouts and their rewards; a model, to use its own.
        n: rollouts of each scenario.
        combine: makes the reward of what a rollout ended with and its score; None: the score.
        reward: scores each rollout before the judge does.
        config: for every run of the agent.
        context: for every run of the agent, or a function ``scenario -> context``.
        seed: base of the rollouts' seeds.
        timeout: seconds for one rollout; None for no limit.
        retries: how often a failed rollout is tried again.
        max_calls: most policy calls of one rollout.
        require_policy_calls: whether a rollout without a call of a policy of ours is a failure.
        spans: whether to record nodes, tools and retrievers, which the judge then sees.
        checkpointer: makes it resumable: ``graph.invoke(None, {"configurable": {"thread_id": ...}})``.

    Returns:
        The compiled graph. ``stream_mode="custom"`` streams an event when a rollout has ended
        (``rollout``), when all have (``collected``), and when a group has been judged (``judged``).

    Raises:
        ConfigError: a number is out of range, or ``config`` names a thread.
    """
    if not isinstance(cast(object, n), int) or n < 1:
        raise ConfigError(f"n={n!r}: expected a whole number of at least 1")
    check_record(store)

    async def plan(state: Mapping[str, Any]) -> dict[str, Any]:
        scenarios = [as_scenario(given) for given in state.get("scenarios") or ()]
        if not scenarios:
            raise ConfigError('nothing to run: give {"scenarios": [{"id": ..., "inputs": ...}, ...]}')
        return {
            "scenarios": [as_plain(scenario) for scenario in scenarios],
            "run": state.get("run") or new_id("l"),
            "batch": state.get("batch", 0) + 1,
            "scores": Overwrite(list[ScoreRecord]()),
        }

    def send_rollouts(state: RulerState) -> list[Send]:
        scenarios = state["scenarios"]
        return [
            Send("rollout", _task(state, place, member, len(scenarios) * n))
            for place in range(len(scenarios))
            for member in range(n)
        ]

    async def collect(state: Mapping[str, Any]) -> dict[str, Any]:
        rollouts = cast("list[RolloutRecord]", state["rollouts"])
        tell("collected", rollouts=len(rollouts), failed=len(rollouts) - len(finished(rollouts)))
        return {}

    def send_groups(state: RulerState) -> list[Send]:
        groups: dict[str, list[str]] = {}
        for rollout in state["rollouts"]:
            groups.setdefault(rollout["group"], []).append(rollout["trajectory"])
        return [Send("judge", {"trajectories": members}) for members in groups.values()]

    run = RolloutNode(
        agent,
        store,
        scenario_of=as_scenario,
        reward=reward,
        config=config,
        context=context,
        seed=seed,
        timeout=timeout,
        retries=retries,
        max_calls=max_calls,
        require_policy_calls=require_policy_calls,
        spans=spans,
    )
    builder = StateGraph(RulerState, input_schema=RulerInput, output_schema=RulerOutput)
    builder.add_node("plan", FunctionNode(plan, "plan"))
    builder.add_node("rollout", run)
    builder.add_node("collect", FunctionNode(collect, "collect"))
    builder.add_node("judge", RulerNode(ruler, store, combine=combine))
    builder.add_edge(START, "plan")
    builder.add_conditional_edges("plan", send_rollouts, ["rollout"])
    builder.add_edge("rollout", "collect")
    builder.add_conditional_edges("collect", send_groups, ["judge"])
    builder.add_edge("judge", END)
    graph = builder.compile(checkpointer=checkpointer, name="ruler_graph")
    return graph.with_config({"max_concurrency": MAX_CONCURRENCY})


def _task(state: RulerState, place: int, member: int, of: int) -> RolloutTask:
    return {
        "run": state["run"],
        "batch": state["batch"],
        "place": place,
        "member": member,
        "places": len(state["scenarios"]),
        "of": of,
        "scenario": state["scenarios"][place],
        # Another run of one thread is another sample.
        "occurrence": state["batch"] * len(state["scenarios"]) + place,
    }

"""Rollouts of LangGraph agents: graphs, entrypoints, any Runnable, any function.

Invariant: a graph is run as its user would run it, and every rollout ends, scored or with its failure. What
is run is made an agent first (`art_langgraph.agents`), here or in worker processes.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias, cast

from langchain_core.runnables import Runnable, RunnableConfig

from art_core import gather as core
from art_core.errors import ConfigError
from art_core.gather import Gathered
from art_core.import_paths import load_object
from art_core.inference.endpoint import PolicyEndpoint
from art_core.recording import Rollout, Sink
from art_core.rollouts import Agent, InProcess, Terms, arun
from art_core.scoring import RewardFunction
from art_core.sync import run_sync
from art_core.types import Scenario, Trajectory
from art_core.workers import Job, Workers, check_sendable, runner_of
from art_langgraph.agents import as_agent, check_thread
from art_langgraph.loading import Address, load_graph

Graph: TypeAlias = Runnable[Any, Any] | Agent | str
"""What can be rolled out: a compiled graph, an ``@entrypoint``, any other Runnable, a function
``scenario -> output``, or the import path of one (see `art_langgraph.loading.load_graph`)."""


async def agather(
    graph: Graph,
    scenarios: Iterable[Scenario],
    *,
    group_size: int,
    reward: RewardFunction | str | None = None,
    model: PolicyEndpoint | None = None,
    config: RunnableConfig | None = None,
    context: Any = None,
    workers: int | Workers = 1,
    timeout: float | None = None,
    require_policy_calls: bool = True,
    spans: bool = False,
    sink: Sink | None = None,
    **options: Any,
) -> Gathered:
    """Run a graph ``group_size`` times on every scenario.

    A graph gets a copy of ``scenario.inputs`` as its input, a function gets the scenario. Sync nodes run
    in threads, as many as are needed; for that, the event loop's default executor is replaced.

    With ``workers``, rollouts run in that many processes: one Python process runs 150 to 250 LangGraph
    calls a second, whatever the server could do. The graph is then given as an import path, the reward
    function is one of a module's top level (or an import path, too), and every process calls the
    policy by its URL and writes to the same store.

    Args:
        graph: a compiled graph, an ``@entrypoint``, any Runnable, ``scenario -> output``, or the import path
            ``"package.module:name"`` of one or of a function that makes one.
        scenarios: what to try.
        group_size: rollouts of each scenario.
        reward: ``(trajectory)`` or ``(trajectory, output)``; see `art_core.gather.agather`.
        model: the policy; its store keeps the rollouts, and a function that makes the graph gets it.
        config: for every run of the graph (``recursion_limit``, ``configurable``, ``tags``, ...). It must
            not name a ``thread_id``: rollouts would continue each other's conversation.
        context: what the graph's ``context_schema`` asks for (``Runtime.context`` in its nodes), or a
            function ``scenario -> context``.
        workers: how many processes; 1 is this one. Or the `Workers` that you keep between calls, as in
            ``with Workers(8) as workers:``, which saves starting them each time.
        timeout: seconds for one rollout, and as many again for its reward; None for no limit.
        require_policy_calls: a rollout without one captured policy call is a failure.
        spans: also record nodes, tools and retrievers with what went in and out: for looking at, not for
            training.
        sink: where rollouts are kept; None: in the model's store, or in memory without a model.
        **options: of `art_core.gather.agather_on`: ``concurrency``, ``retries``, ``on_failure``,
            ``min_group_size``, ``max_calls``, ``seed``, ``metadata``, ``spares``, ``progress``.

    Returns:
        The groups in the scenarios' order.

    Raises:
        ConfigError: an argument is out of range, ``config`` names a thread, ``context`` is given to what is
            no graph, or something can't be sent to worker processes.
        RolloutFailedError: a rollout failed and ``on_failure`` is ``fail_fast``.
    """
    check_thread(config)
    if sink is None and model is not None:
        sink = model.sink
    if isinstance(reward, str):
        reward = cast("RewardFunction", load_object(reward))
    terms = Terms(reward, timeout, require_policy_calls, sink)
    if isinstance(workers, int) and workers == 1:
        found = load_graph(graph, model) if isinstance(graph, str) else graph
        agent = as_agent(found, config, context=context, spans=spans)
        return await core.agather_on(InProcess(agent, terms), scenarios, group_size=group_size, **options)
    if not isinstance(graph, str):
        raise ConfigError(
            f"with workers, other processes can't be given {type(graph).__name__} as it is; give its "
            "import path, as in graph='package.module:graph'"
        )
    for name, part in (("config", config), ("context", context)):
        check_sendable(
            name,
            part,
            "Make in the graph's factory what can't be sent; a function must be of a module's top level",
        )
    # A version that is leased here stays served while other processes call it.
    with nullcontext() if model is None else model.lease() as version:
        address = None if model is None else Address.of(model, version)
        job = Job(build_agent, (graph, address, config, context, spans), terms)
        async with runner_of(workers, job) as runner:
            return await core.agather_on(runner, scenarios, group_size=group_size, **options)


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
    model: PolicyEndpoint | None = None,
    config: RunnableConfig | None = None,
    context: Any = None,
    timeout: float | None = None,
    max_calls: int | None = None,
    require_policy_calls: bool = True,
    spans: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> Trajectory:
    """Run a graph once; options as for `agather`, except that ``config`` may name a ``thread_id``.

    Args:
        graph: what to run.
        scenario: a scenario, or the inputs of an unnamed one.
        reward: scores it.
        model: the policy; its store keeps the rollout.
        config: for the graph's run.
        context: what the graph's ``context_schema`` asks for, or a function ``scenario -> context``.
        timeout: seconds.
        max_calls: most policy calls.
        require_policy_calls: whether a rollout without one is a failure.
        spans: whether to record nodes, tools and retrievers, too.
        metadata: kept with the trajectory.

    Returns:
        The ended trajectory; ``failure`` says why if it failed.

    Raises:
        ConfigError: ``scenario`` is neither a scenario nor a mapping, or ``context`` is given to what is no
            graph.
    """
    if not isinstance(cast("object", scenario), Scenario | Mapping):
        raise ConfigError(
            f"scenario={scenario!r} is neither a Scenario nor a mapping of inputs; for a graph that takes "
            "something else, give a function: lambda scenario: graph.invoke(scenario.inputs['...'])"
        )
    found = load_graph(graph, model) if isinstance(graph, str) else graph
    agent = as_agent(found, config, context=context, spans=spans)
    rollout = Rollout(
        scenario if isinstance(scenario, Scenario) else Scenario("default", scenario),
        sink=None if model is None else model.sink,
        max_calls=max_calls,
        metadata=metadata,
    )
    return await arun(
        agent, rollout, reward=reward, timeout=timeout, require_policy_calls=require_policy_calls
    )


def rollout(graph: Graph, scenario: Scenario | Mapping[str, Any], **options: Any) -> Trajectory:
    """`arollout` from sync code; takes the same options."""
    return run_sync(lambda: arollout(graph, scenario, **options))


def build_agent(
    path: str, address: Address | None, config: RunnableConfig | None, context: Any, spans: bool
) -> Agent:
    """What a worker process runs."""
    graph = load_graph(path, None if address is None else address.endpoint())
    return as_agent(graph, config, context=context, spans=spans)

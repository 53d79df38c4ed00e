"""RolloutNode: one rollout of an agent as a LangGraph node, made once however often the graph is killed.

Invariant: a rollout's id and seed follow from its place alone (run, batch, group, member, attempt), so a node
that runs again finds what has ended and does not repeat it; one that was cut off is sampled again from the
same seed, under the next id.

Data flow: a planner makes `RolloutTask`s and sends each to this node (``Send``); the node answers with one
`RolloutRecord`, and the trajectory is in the store.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, cast

from langchain_core.runnables import Runnable, RunnableConfig

from art_core.errors import ConfigError, UnknownTrajectoryError
from art_core.gather import member_seed
from art_core.rollouts import Agent, InProcess, Plan, Terms
from art_core.scoring import RewardFunction
from art_core.store import Store
from art_core.types import RolloutStatus, Scenario, Trajectory
from art_langgraph.agents import as_agent, check_thread
from art_langgraph.graph_node import GraphNode, Record, outside_the_graph, sink_of, store_of, tell
from art_langgraph.graph_records import rollout_record

if TYPE_CHECKING:
    from art_core.model import TrainableModel


class RolloutTask(TypedDict):
    """What is sent to a `RolloutNode`.

    Attributes:
        run: names the whole run of the graph.
        batch: number of the batch; in a learning loop, of the step.
        place: of the group in the batch.
        member: place in the group.
        places: groups in the batch.
        of: rollouts in the batch.
        scenario: a scenario's number among the loop's, or the scenario as plain data.
        occurrence: tells rollouts of one scenario and member apart; see `member_seed`.
    """

    run: str
    batch: int
    place: int
    member: int
    places: int
    of: int
    scenario: Any
    occurrence: int


class RolloutNode(GraphNode):
    """Runs an agent on the scenario that a task names.

    The agent runs by itself, not as a subgraph: with its own checkpointer and thread, its own callbacks and
    namespaces. One that stops at an ``interrupt`` has failed: nobody is there to answer. Streams
    ``{"event": "rollout", "done": 3, "of": 8, ...}`` when a rollout has ended.

    Args:
        agent: a compiled graph, any Runnable, or a function of the scenario.
        record: the store, or the model, that keeps the rollouts.
        scenario_of: the scenario that a task's ``scenario`` stands for.
        reward: scores each rollout; None: they end unscored.
        kind: what these rollouts are for (``rollout``, ``trial``); part of their ids, and in their metadata.
        writes: the state's key for the records.
        config: for every run of the agent.
        context: for every run of the agent, or a function ``scenario -> context``; see `agather`.
        seed: base of the rollouts' seeds.
        timeout: seconds for the agent, and as many for the reward.
        retries: how often a failed rollout is tried again.
        max_calls: most policy calls of one rollout.
        require_policy_calls: whether a rollout without a policy call is a failure.
        spans: whether to record nodes, tools and retrievers, too.
    """

    def __init__(
        self,
        agent: Runnable[Any, Any] | Agent,
        record: "Record | TrainableModel",
        *,
        scenario_of: Callable[[Any], Scenario],
        reward: RewardFunction | None = None,
        kind: str = "rollout",
        writes: str = "rollouts",
        config: RunnableConfig | None = None,
        context: Any = None,
        seed: int = 0,
        timeout: float | None = None,
        retries: int = 0,
        max_calls: int | None = None,
        require_policy_calls: bool = True,
        spans: bool = False,
    ) -> None:
        if retries < 0:
            raise ConfigError(f"retries={retries}: expected at least 0")
        check_thread(config)
        self._agent = as_agent(agent, config, context=context, spans=spans)
        self._record = record
        self._scenario_of = scenario_of
        self._terms = partial(Terms, reward, timeout, require_policy_calls)
        self._terms(None).check()
        self._kind = kind
        self._writes = writes
        self._seed = seed
        self._retries = retries
        self._max_calls = max_calls
        self._progress: tuple[tuple[str, int], set[tuple[int, int]]] = (("", 0), set())
        self._counting = threading.Lock()
        self.name = kind

    async def act(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Run the rollout, or find it.

        Raises:
            StoreError: it cannot be kept.
        """
        task = cast("RolloutTask", state)
        await asyncio.to_thread(self._count_earlier, task)
        ended = await self._once(task)
        record = rollout_record(ended, batch=task["batch"], place=task["place"], member=task["member"])
        tell(self._kind, **record, done=self._count(task), of=task["of"])
        return {self._writes: [record]}

    async def _once(self, task: RolloutTask) -> Trajectory:
        """The task's rollout: the one that has ended, or a new one."""
        store = store_of(self._record)
        runner = InProcess(self._agent, self._terms(sink_of(self._record)))
        number = failures = 0
        while True:
            number += 1
            plan = self._plan(task, number, failures + 1)
            ended = await asyncio.to_thread(_kept, store, plan.rollout_id)
            if ended is None:
                ended = await outside_the_graph(lambda plan=plan: runner.run(plan))
            elif _cut_off(ended):
                continue
            if not ended.failed or failures == self._retries:
                return ended
            failures += 1

    def _count_earlier(self, task: RolloutTask) -> None:
        """Before the first rollout of a batch: count those that an earlier process has made."""
        with self._counting:
            if self._progress[0] != (task["run"], task["batch"]):
                self._progress = ((task["run"], task["batch"]), self._ended(task))

    def _count(self, task: RolloutTask) -> int:
        """How many rollouts of the batch have ended, now that this one has."""
        with self._counting:
            self._progress[1].add((task["place"], task["member"]))
            return len(self._progress[1])

    def _ended(self, task: RolloutTask) -> set[tuple[int, int]]:
        """Places and members of the batch that the store has to the end."""
        found: set[tuple[int, int]] = set()
        for place in range(task["places"]):
            group = group_id(task["run"], self._kind, task["batch"], place)
            for kept in store_of(self._record).trajectories(group_id=group, with_steps=False):
                tried_enough = not kept.failed or kept.metadata["attempt"] > self._retries
                if tried_enough and not _cut_off(kept):
                    found.add((place, kept.metadata["member"]))
        return found

    def _plan(self, task: RolloutTask, number: int, attempt: int) -> Plan:
        scenario = self._scenario_of(task["scenario"])
        member = task["member"]
        return Plan(
            scenario=scenario,
            group_id=group_id(task["run"], self._kind, task["batch"], task["place"]),
            rollout_id=_id("t", task["run"], self._kind, task["batch"], task["place"], member) + f"-{number}",
            max_calls=self._max_calls,
            metadata={
                "seed": member_seed(scenario.id, member, self._seed, attempt, task["occurrence"]),
                "member": member,
                "attempt": attempt,
                "kind": self._kind,
                "batch": task["batch"],
            },
        )


def group_id(run: str, kind: str, batch: int, place: int) -> str:
    """The id of a group, by its place."""
    return _id("g", run, kind, batch, place)


def _id(prefix: str, run: str, *place: object) -> str:
    """An id like those of `new_id`: the run's time in front, so that indices grow at their end."""
    digest = hashlib.sha256("/".join(map(str, (run, *place))).encode()).hexdigest()
    return f"{prefix}-{run.partition('-')[2][:12]}{digest[:20]}"


def _kept(store: Store, trajectory_id: str) -> Trajectory | None:
    with suppress(UnknownTrajectoryError):
        return store.trajectory(trajectory_id)
    return None


def _cut_off(found: Trajectory) -> bool:
    """Whether a rollout in the store is one whose process died, or was told to stop."""
    cancelled = found.failure is not None and found.failure.cause == "cancelled"
    return found.status is RolloutStatus.RUNNING or cancelled

"""LearningLoop: the nodes of a learning run, for a LangGraph to connect.

Invariant: no rollout is sampled, judged or trained twice, whenever the process is killed. What has happened
is in the store and in the model's checkpoints; the graph's state holds numbers and ids, and every node first
looks whether it was done. So a run that was resumed from its checkpointer ends with the same weights as one
that was never interrupted (bit for bit with a deterministic engine on a CPU).

``plan`` decides what comes next -> ``rollout`` (one for each member of each group) -> ``collect`` ->
``judge`` (one for each group, with a `Ruler`) -> ``train`` -> ``plan``; and ``trial`` -> ``evaluate`` ->
``plan`` where an evaluation is due. ``train`` also publishes: weights become durable as a version's
checkpoint, and a version that is on disk is served when the model is registered again, so between the two
there is nothing to stop at.
"""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from langchain_core.runnables import Runnable
from langgraph.types import Overwrite, Send

from art_core.errors import CheckpointError, ConfigError, NothingToTrainError, RolloutFailedError
from art_core.ids import new_id
from art_core.model import TrainableModel
from art_core.rewards.judgement import Combine
from art_core.rewards.ruler import Ruler
from art_core.rollouts import Agent
from art_core.scoring import RewardFunction
from art_core.selection import Train
from art_core.types import Scenario, Trajectory, TrajectoryGroup
from art_langgraph.graph_node import FunctionNode, tell
from art_langgraph.graph_records import RolloutRecord, ScoreRecord, finished
from art_langgraph.learning_state import EvaluationRecord, LearningState, StepRecord
from art_langgraph.rollout_node import RolloutNode, RolloutTask
from art_langgraph.ruler_node import RulerNode

if TYPE_CHECKING:
    from art_core.training.report import TrainReport

IN_VAIN = 8
"""Steps in a row with nothing to train, after which something is wrong with all of them."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one step can be trained on."""

    groups: tuple[TrajectoryGroup, ...]
    unscored: int

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(group.id for group in self.groups)

    @property
    def members(self) -> Iterable[Trajectory]:
        return (member for group in self.groups for member in group)

    @property
    def reward_mean(self) -> float | None:
        rewards = [reward for group in self.groups for reward in group.rewards]
        return fmean(rewards) if rewards else None


class LearningLoop:
    """The nodes and routes of a learning run. `art_langgraph.learning` connects them.

    Args:
        agent: a compiled graph, any Runnable, or a function of the scenario; it calls ``model``.
        model: the policy; it has to be registered when the graph runs, at the same root as before when it
            is resumed.
        scenarios: what to learn from; shuffled anew in each pass.
        steps: training steps to make; a finished run goes on when the graph is made with more.
        reward: scores each rollout, or is part of what ``combine`` makes.
        ruler: judges each group; without one, ``reward`` is all there is. Give it a `VerdictCache` with a
            file, and no answer is paid for twice, whenever the process is killed.
        combine: makes the reward of what a rollout ended with and the judge's score; None: the score.
        group_size: rollouts of each scenario.
        scenarios_per_step: groups of one step; None: all scenarios.
        min_group_size: groups with fewer scored members are not trained; None: 2.
        train: which steps of the rollouts are trained; see `TrainableModel.atrain`.
        evaluate_every: evaluate before the first step, then after every so many, and after the last; None:
            never.
        evaluation_scenarios: what to evaluate on; None: ``scenarios``.
        evaluation_reward: scores each trial; None: ``reward``. A judge that compares has no scale that holds
            from one evaluation to the next: with a ruler alone, give ``ruler.ascore_one`` or a rule.
        evaluation_size: trials of each scenario; they have the same seeds in every evaluation.
        seed: base of all seeds.
        **options: of every rollout and trial: ``config``, ``context``, ``timeout``, ``retries``,
            ``max_calls``, ``require_policy_calls``, ``spans``; see `RolloutNode`.

    Raises:
        ConfigError: a number is out of range, nothing scores the rollouts, or there are no scenarios.
    """

    def __init__(
        self,
        agent: Runnable[Any, Any] | Agent,
        model: TrainableModel,
        scenarios: Sequence[Scenario],
        *,
        steps: int,
        reward: RewardFunction | None = None,
        ruler: Ruler | None = None,
        combine: Combine | None = None,
        group_size: int = 8,
        scenarios_per_step: int | None = None,
        min_group_size: int | None = None,
        train: Train = None,
        evaluate_every: int | None = None,
        evaluation_scenarios: Sequence[Scenario] | None = None,
        evaluation_reward: RewardFunction | None = None,
        evaluation_size: int = 1,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.scenarios = tuple(scenarios)
        self.trial_scenarios = self.scenarios if evaluation_scenarios is None else tuple(evaluation_scenarios)
        self.steps = steps
        self._per_step = len(self.scenarios) if scenarios_per_step is None else scenarios_per_step
        self._group_size = group_size
        self._least = min(2, group_size) if min_group_size is None else min_group_size
        self._every = evaluate_every
        self._trial_size = evaluation_size
        self._seed = seed
        self._model = model
        self._selected = train
        self._check(reward, ruler, combine, evaluation_reward)
        self.rollout = RolloutNode(
            agent,
            model,
            scenario_of=self.scenarios.__getitem__,
            reward=reward,
            seed=seed,
            **options,
        )
        self.trial = RolloutNode(
            agent,
            model,
            scenario_of=self.trial_scenarios.__getitem__,
            reward=reward if evaluation_reward is None else evaluation_reward,
            kind="trial",
            writes="trials",
            seed=seed + 1,
            **options,
        )
        self.judge = None if ruler is None else RulerNode(ruler, model, combine=combine)
        self.plan = FunctionNode(self._plan, "plan")
        self.collect = FunctionNode(self._collect, "collect")
        self.train = FunctionNode(self._train, "train")
        self.evaluate = FunctionNode(self._evaluate, "evaluate")

    def _check(
        self,
        reward: RewardFunction | None,
        ruler: Ruler | None,
        combine: Combine | None,
        evaluation_reward: RewardFunction | None,
    ) -> None:
        for name, value in (
            ("steps", self.steps),
            ("group_size", self._group_size),
            ("scenarios_per_step", self._per_step),
            ("min_group_size", self._least),
            ("evaluate_every", 1 if self._every is None else self._every),
            ("evaluation_size", self._trial_size),
            ("evaluation_scenarios", len(self.trial_scenarios)),
        ):
            if value < 1:
                raise ConfigError(f"{name}={value}: expected at least 1 (is there a scenario?)")
        if self._least > self._group_size:
            raise ConfigError(f"min_group_size={self._least} is more than group_size={self._group_size}")
        if reward is None and ruler is None:
            raise ConfigError("nothing scores the rollouts: give reward=..., ruler=..., or both")
        if combine is not None and ruler is None:
            raise ConfigError("combine makes a reward of a judge's score, and there is no ruler=...")
        if self._every is not None and reward is None and evaluation_reward is None:
            raise ConfigError(
                "evaluate_every with a ruler alone: its scores compare the runs of one group, and say "
                "nothing from one evaluation to the next; give evaluation_reward=ruler.ascore_one, or a rule"
            )

    @property
    def evaluates(self) -> bool:
        """Whether evaluations are made at all."""
        return self._every is not None

    # -- routes ------------------------------------------------------------------------------------

    def after_plan(self, state: LearningState) -> list[Send] | str:
        """Sends of the next rollouts or trials; ``end`` after the last step."""
        if state["next"] == "trial":
            places, size = range(len(self.trial_scenarios)), self._trial_size
            return self._sends("trial", state, state["step"], list(places), size, first=0)
        if state["next"] == "rollout":
            step = state["step"] + 1
            chosen = self._chosen(step)
            return self._sends("rollout", state, step, chosen, self._group_size, first=step * len(chosen))
        return "end"

    def after_collect(self, state: LearningState) -> list[Send] | str:
        """Sends of the groups to judge; ``train`` where there is none, or no judge."""
        groups: dict[str, list[str]] = {}
        for rollout in finished(state["rollouts"]):
            groups.setdefault(rollout["group"], []).append(rollout["trajectory"])
        if self.judge is None or not groups:
            return "train"
        return [Send("judge", {"trajectories": members}) for members in groups.values()]

    def _sends(
        self, node: str, state: LearningState, batch: int, scenarios: Sequence[int], size: int, *, first: int
    ) -> list[Send]:
        tasks: list[RolloutTask] = [
            {
                "run": state["run"],
                "batch": batch,
                "place": place,
                "member": member,
                "places": len(scenarios),
                "of": len(scenarios) * size,
                "scenario": scenario,
                "occurrence": first + place,
            }
            for place, scenario in enumerate(scenarios)
            for member in range(size)
        ]
        return [Send(node, task) for task in tasks]

    def _chosen(self, step: int) -> list[int]:
        """Numbers of a step's scenarios: passes over all of them, each in an order of its own."""
        count = len(self.scenarios)
        orders: dict[int, list[int]] = {}
        chosen: list[int] = []
        for at in range((step - 1) * self._per_step, step * self._per_step):
            done, position = divmod(at, count)
            if done not in orders:
                orders[done] = list(range(count))
                random.Random(f"{self._seed}/{done}").shuffle(orders[done])
            chosen.append(orders[done][position])
        return chosen

    # -- nodes -------------------------------------------------------------------------------------

    async def _plan(self, state: Mapping[str, Any]) -> dict[str, Any]:
        step = state.get("step", 0)
        update: dict[str, Any] = {
            "run": state.get("run") or new_id("l"),
            "step": step,
            "policy": self._model.current_version().number,
        }
        if self._evaluation_due(step, state):
            return {**update, "next": "trial"}
        if step >= self.steps:
            return {**update, "next": "end"}
        return {**update, "next": "rollout", "scores": Overwrite(list[ScoreRecord]())}

    def _evaluation_due(self, step: int, state: Mapping[str, Any]) -> bool:
        if self._every is None or (step % self._every and step != self.steps):
            return False
        return all(made["step"] != step for made in state.get("evaluations", ()))

    async def _collect(self, state: Mapping[str, Any]) -> dict[str, Any]:
        rollouts = cast("list[RolloutRecord]", state["rollouts"])
        failed = len(rollouts) - len(finished(rollouts))
        tell("collected", step=state["step"] + 1, rollouts=len(rollouts), failed=failed)
        return {}

    async def _train(self, state: Mapping[str, Any]) -> dict[str, Any]:
        known = cast("LearningState", state)
        step = known["step"] + 1
        batch = await asyncio.to_thread(self._batch, known)
        report, skipped = None, None
        try:
            report = await self._learned(known, batch)
        except NothingToTrainError as nothing:
            skipped = str(nothing)
            self._check_not_in_vain(known, skipped)
        record: StepRecord = {
            "step": step,
            "policy": self._model.current_version().number,
            "reward_mean": batch.reward_mean,
            "rollouts": len(known["rollouts"]),
            "failed": len(known["rollouts"]) - len(finished(known["rollouts"])),
            "unscored": batch.unscored,
            "updated": report is not None and report.updated,
            "skipped": skipped,
        }
        metrics = {} if report is None else dict(report.metrics)
        tell("trained", **record, metrics=metrics)
        return {"step": step, "history": [record], "metrics": metrics}

    async def _learned(self, state: LearningState, batch: _Batch) -> "TrainReport":
        """Train on a batch, unless its weights are there already.

        Raises:
            NothingToTrainError: there is nothing to train.
            CheckpointError: the model is not as far as the graph.
        """
        current, last = self._model.current_version().number, self._model.last_update
        if current < state["policy"]:
            raise CheckpointError(
                f"the graph's checkpoint is of policy version {state['policy']}, and model "
                f"{self._model.name!r} is at version {current}: register it with the root that it was "
                "trained at, or begin a new thread"
            )
        if not batch.groups:
            raise NothingToTrainError(
                f"no group of step {state['step'] + 1} has {self._least} scored rollouts: "
                f"{batch.unscored} are unscored or excluded; first failure: {_first_failure(state)}"
            )
        if last is not None and last.groups == batch.ids:
            return last.report
        if current > state["policy"] and any(self._model.store.trained(m.id) for m in batch.members):
            raise CheckpointError(
                f"step {state['step'] + 1} was trained before, and the model has gone on to version "
                f"{current} since: the graph's checkpoint is older than the model. Give durability='sync' to "
                "invoke, and begin a new thread"
            )
        return await self._model.atrain(list(batch.groups), train=self._selected)

    def _check_not_in_vain(self, state: LearningState, why: str) -> None:
        before = state.get("history", [])[1 - IN_VAIN :]
        if len(before) == IN_VAIN - 1 and all(record["skipped"] for record in before):
            raise RolloutFailedError(f"the last {IN_VAIN} steps had nothing to train; the last one: {why}")

    def _batch(self, state: LearningState) -> _Batch:
        """The step's groups from the store, with the rewards that they have now."""
        unscored = {score["trajectory"] for score in state.get("scores", ()) if score["unscored"]}
        excluded = set(state.get("excluded", ()))
        members: dict[str, list[Trajectory]] = {}
        left = 0
        for record in state["rollouts"]:
            name = record["trajectory"]
            if record["failure"] is None and (name in unscored or {name, record["group"]} & excluded):
                left += 1
                continue
            members.setdefault(record["group"], []).append(self._model.store.trajectory(name))
        groups = [
            TrajectoryGroup(found[0].scenario, tuple(found), name)
            for name, found in members.items()
            if sum(not member.failed for member in found) >= self._least
        ]
        return _Batch(tuple(groups), left)

    async def _evaluate(self, state: Mapping[str, Any]) -> dict[str, Any]:
        trials = cast("list[RolloutRecord]", state["trials"])
        rewards = [trial["reward"] for trial in trials if trial["reward"] is not None]
        record: EvaluationRecord = {
            "step": state["step"],
            "policy": state["policy"],
            "reward_mean": fmean(rewards) if rewards else None,
            "finished": len(rewards),
            "failed": len(trials) - len(finished(trials)),
        }
        values = {"evaluation/failed": float(record["failed"])}
        if record["reward_mean"] is not None:
            values["evaluation/reward_mean"] = record["reward_mean"]
        await asyncio.to_thread(self._model.log_metrics, values)
        tell("evaluated", **record)
        return {"evaluations": [record]}


def _first_failure(state: LearningState) -> str:
    return next((r["failure"] for r in state["rollouts"] if r["failure"]), "none")

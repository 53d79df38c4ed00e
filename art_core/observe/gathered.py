"""Metrics of the rollouts that a training step was given.

Invariant: everything is taken from the rollouts themselves, and what they do not hold is absent; failed
rollouts are counted under their cause and are in no mean of rewards.

Groups go in as they were gathered, before replayed ones are added; numbers come out under the names of
`art_core.observe.metrics`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, cast

from art_core.judgings import JUDGINGS
from art_core.types import Step, Trajectory, TrajectoryGroup

SUCCESS = "success"
"""The name under which a rollout says whether it succeeded: of a component, a metric, or in its metadata."""

MOST_NODES = 100
"""Nodes with metrics of their own, those with the most calls: names that a graph makes up stay bounded."""

_SETTINGS = ("weight/", "scale/")  # what a component of a mixed reward weighs is no measurement


def gathered_metrics(
    groups: Iterable[TrajectoryGroup], *, success_reward: float | None = None
) -> dict[str, float]:
    """Numbers of rollouts.

    Args:
        groups: of one training step.
        success_reward: a rollout that does not say whether it succeeded did so when its reward is at least
            this; None: it does not count.
    """
    groups = list(groups)
    everyone = [t for group in groups for t in group]
    if not everyone:
        return {}
    calls = [step for t in everyone for step in t.steps]
    failures = Counter(t.failure.cause if t.failure else "unknown" for t in everyone if t.failed)
    faults: Counter[str] = Counter()
    for t in everyone:
        faults.update(t.faults)
    return {
        **_rewards(groups, everyone),
        **_success(everyone, success_reward),
        **{f"failures/{cause}": float(count) for cause, count in sorted(failures.items())},
        **{f"faults/{kind}": float(count) for kind, count in sorted(faults.items()) if count},
        **_calls(everyone, calls),
        **_nodes(everyone, calls),
        **_judging(groups),
    }


def _rewards(groups: Sequence[TrajectoryGroup], everyone: Sequence[Trajectory]) -> dict[str, float]:
    told = group_std(groups)
    for name, values in _by_name(t.components for t in everyone if not t.failed).items():
        told[f"reward/component/{name}"] = fmean(values)
        told[f"reward/component_std/{name}"] = pstdev(values)
    for name, values in _by_name(t.metrics for t in everyone if not t.failed).items():
        if not name.startswith(_SETTINGS):
            told[f"rollout/metric/{name}"] = fmean(values)
    return told


def group_std(groups: Iterable[TrajectoryGroup]) -> dict[str, float]:
    """The metric ``reward_group_std``, where some group has two rewards."""
    spreads = [pstdev(group.rewards) for group in groups if len(group.rewards) > 1]
    return {"reward_group_std": fmean(spreads)} if spreads else {}


def _by_name(mappings: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for mapping in mappings:
        for name, value in mapping.items():
            values[name].append(value)
    return dict(sorted(values.items()))


def succeeded(trajectory: Trajectory, success_reward: float | None = None) -> bool | None:
    """Whether a rollout succeeded; None when that is not known, as of one that failed.

    A component, a metric or an entry of the metadata that is named ``success`` says so (a number above one
    half is a yes), in this order; else the reward does.

    Args:
        trajectory: the rollout.
        success_reward: least reward of a success; None: rewards say nothing.
    """
    if trajectory.failed:
        return None
    for place in (trajectory.components, trajectory.metrics, trajectory.metadata):
        said = cast(Mapping[str, Any], place).get(SUCCESS)
        if isinstance(said, bool | int | float):
            return said > 0.5
    if success_reward is None or trajectory.reward is None:
        return None
    return trajectory.reward >= success_reward


def _success(everyone: Sequence[Trajectory], success_reward: float | None) -> dict[str, float]:
    known = [won for t in everyone if (won := succeeded(t, success_reward)) is not None]
    return {"success_rate": sum(known) / len(known)} if known else {}


def _calls(everyone: Sequence[Trajectory], calls: Sequence[Step]) -> dict[str, float]:
    told = {"calls": float(len(calls))}
    if durations := [t.duration for t in everyone if t.duration is not None]:
        told["rollout_seconds_mean"] = fmean(durations)
    if asked := [step.sampling.get("temperature") for step in calls if step.policy is not None]:
        told["temperature_mean"] = fmean(1.0 if t is None else float(t) for t in asked)
    if sampled := [step.tokens for step in calls if step.tokens is not None and step.policy is not None]:
        told["tokens_sampled"] = float(sum(len(tokens.completion) for tokens in sampled))
        told["tokens_prompt"] = float(sum(len(tokens.prompt) for tokens in sampled))
    return told


def _nodes(everyone: Sequence[Trajectory], calls: Sequence[Step]) -> dict[str, float]:
    by_node: defaultdict[str, list[Step]] = defaultdict(list)
    for step in calls:
        if step.identity.node is not None:
            by_node[step.identity.node].append(step)
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for t in everyone:
        nodes = {step.id: step.identity.node for step in t.steps}
        for node, reward in t.node_rewards.items():
            rewards[node].append(reward)
        for step_id, reward in t.step_rewards.items():
            if (node := nodes.get(step_id)) is not None and node not in t.node_rewards:
                rewards[node].append(reward)
    told: dict[str, float] = {}
    most_called = sorted(by_node, key=lambda node: (-len(by_node[node]), node))[:MOST_NODES]
    for node in sorted(most_called):
        own = by_node[node]
        told[f"node/{node}/calls"] = len(own) / len(everyone)
        told[f"node/{node}/latency"] = fmean(step.duration for step in own)
        if written := [n for step in own if (n := _written(step)) is not None]:
            told[f"node/{node}/tokens"] = fmean(written)
        if rewards[node]:
            told[f"node/{node}/reward"] = fmean(rewards[node])
    return told


def _written(step: Step) -> int | None:
    """Tokens of an answer: as recorded, or as the server counted them."""
    if step.tokens is not None:
        return len(step.tokens.completion)
    return step.usage.get("completion_tokens")


def _judging(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    told: Counter[str] = Counter()
    for judging in judgings(groups):
        for name in ("calls", "prompt_tokens", "completion_tokens", "cost"):
            if (value := judging.get(name)) is not None:
                told[f"judge_{name}"] += value
    return {name: float(value) for name, value in told.items()}


def judgings(groups: Iterable[TrajectoryGroup]) -> list[Mapping[str, Any]]:
    """What judges took: an entry for each group that was judged, and for each judgement of a single run.

    See `Judgement` and `art_core.judgings`.
    """
    found: list[Mapping[str, Any]] = []
    for group in groups:
        kept = (t.metadata.get("ruler") for t in group)
        judging = (k["judging"] for k in kept if isinstance(k, Mapping) and "judging" in k)
        if (one := next(judging, None)) is not None:
            found.append(cast(Mapping[str, Any], one))
        found += [own for t in group for own in own_judgings(t)]
    return found


def own_judgings(trajectory: Trajectory) -> list[Mapping[str, Any]]:
    """What judges took while this trajectory's own reward was worked out."""
    kept = trajectory.metadata.get(JUDGINGS)
    if not isinstance(kept, list):
        return []
    return [cast(Mapping[str, Any], one) for one in cast("list[object]", kept) if isinstance(one, Mapping)]

"""Advantages: how much better a rollout, or one of its steps, was than what it is compared with.

Invariant: a rollout without a reward is in no baseline, and rewards that differ only by float noise give
no advantages at all.

Rewards become credits of steps (`selection.returns`), credits are pooled with those that they are
compared with (the whole group, or the same node, agent, turn or prompt in it), and each pool is
centred on its baseline (`group_advantages`).
"""

import math
from collections.abc import Hashable, Sequence
from itertools import count
from typing import assert_never

from art_core.capture import superseded
from art_core.config import AdvantageName, BaselineName
from art_core.selection import returns
from art_core.types import Step, StepIdentity, TrajectoryGroup

MIN_SPREAD = 1e-6
"""Rewards of a pool that lie closer together than this are equal."""


def group_advantages(
    rewards: Sequence[float],
    kind: AdvantageName = "mean",
    *,
    owners: Sequence[Hashable] | None = None,
) -> list[float] | None:
    """Rewards relative to a baseline made of them.

    - ``mean``: ``A_i = r_i - mean(r)`` (Dr. GRPO; Liu et al. 2025, arXiv:2503.20783, section 3.2): easy
      and hard scenarios weigh by how much their rewards differ.
    - ``std``: the same divided by the group's (population) standard deviation (GRPO; Shao et al. 2024,
      arXiv:2402.03300, section 4.1.2): every group weighs the same.
    - ``leave_one_out``: ``A_i = r_i - mean of the others`` (RLOO; Kool et al. 2019; Ahmadian et al. 2024,
      arXiv:2402.14740, section 3.2). No reward is in its own baseline, so the gradient is unbiased; for a
      group of n it is the ``mean`` advantage times ``n / (n - 1)``.

    Sums are exact, so that the order of the members does not matter.

    Args:
        rewards: of the members that have one  [members].
        kind: which baseline and scale.
        owners: whose each reward is, where one rollout has several: ``leave_one_out`` leaves out all that
            are the same rollout's  [members]. None: each its own.

    Returns:
        Advantages  [members]; None when the rewards spread less than `MIN_SPREAD`, as for groups of
        one or none, and when ``leave_one_out`` leaves nobody: such a group teaches nothing.
    """
    if not rewards or max(rewards) - min(rewards) < MIN_SPREAD:
        return None
    match kind:
        case "mean":
            return _centred(rewards)
        case "std":
            centred = _centred(rewards)
            scale = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
            return [c / scale for c in centred]
        case "leave_one_out":
            return _leave_one_out(rewards, range(len(rewards)) if owners is None else owners)
        case _:
            assert_never(kind)


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def _leave_one_out(rewards: Sequence[float], owners: Sequence[Hashable]) -> list[float] | None:
    own: dict[Hashable, list[float]] = {}
    for owner, reward in zip(owners, rewards, strict=True):
        own.setdefault(owner, []).append(reward)
    if len(own) < 2:
        return None
    total = math.fsum(rewards)
    others = {
        owner: math.fsum([total, *(-r for r in mine)]) / (len(rewards) - len(mine))
        for owner, mine in own.items()
    }
    return [reward - others[owner] for owner, reward in zip(owners, rewards, strict=True)]


def step_advantages(
    group: TrajectoryGroup,
    kind: AdvantageName = "mean",
    *,
    baseline_per: BaselineName | None = None,
    gamma: float | None = None,
) -> dict[str, dict[str, float]]:
    """Advantages of a group's steps, by trajectory and step.

    Rollouts are compared with rollouts, and each step has its rollout's advantage, as long as all of
    them are worth the same: with one reward for each rollout, and neither ``gamma`` nor
    ``baseline_per``. Otherwise each step is compared with other steps of the group, those aside that a
    later attempt superseded: with the steps of

    - ``node``: the same LangGraph node, in the same subgraph; the default;
    - ``agent``: the same node of the outermost graph, with all that runs below it: in a graph of
      subgraphs, the same agent;
    - ``turn``: the same place in their rollouts: first calls with first calls, and so on;
    - ``prompt``: the very same prompt (the anchor states of GiGPO; Feng et al. 2025, arXiv:2505.10978,
      section 4.2). Steps whose prompt nobody shares are left out.

    Args:
        group: its members' rewards; failed and unscored members take no part.
        kind: baseline and scale; see `group_advantages`.
        baseline_per: what steps are compared with; None: rollouts, or else nodes, as above.
        gamma: discount of later rewards; see `selection.returns`.

    Returns:
        Advantages by trajectory id, then step id. A step has none where nothing that it is compared with
        was worth more or less.
    """
    rewarded_within = any(t.step_rewards or t.node_rewards for t in group if not t.failed)
    if rewarded_within or gamma is not None or baseline_per is not None:
        return _pooled(group, kind, baseline_per or "node", gamma)
    values = group_advantages(group.rewards, kind)
    if values is None:
        return {}
    return {t.id: {s.id: a for s in t.steps} for t, a in zip(group.scored, values, strict=True)}


def _pooled(
    group: TrajectoryGroup, kind: AdvantageName, baseline_per: BaselineName, gamma: float | None
) -> dict[str, dict[str, float]]:
    pools: dict[Hashable, list[tuple[str, str, float]]] = {}
    for trajectory in group:
        credited = returns(trajectory, gamma)
        replaced = superseded(trajectory.steps)
        turns = count()
        for step in trajectory.steps:
            if step.id in replaced:
                continue
            turn = next(turns)
            if step.id in credited:
                pool = _pool(step, turn, baseline_per)
                pools.setdefault(pool, []).append((trajectory.id, step.id, credited[step.id]))
    found: dict[str, dict[str, float]] = {}
    for steps in pools.values():
        owners = [trajectory_id for trajectory_id, _, _ in steps]
        values = group_advantages([credit for _, _, credit in steps], kind, owners=owners)
        if values is None:
            continue
        for (trajectory_id, step_id, _), advantage in zip(steps, values, strict=True):
            found.setdefault(trajectory_id, {})[step_id] = advantage
    return found


def _pool(step: Step, turn: int, baseline_per: BaselineName) -> Hashable:
    match baseline_per:
        case "node":
            return node_path(step.identity)
        case "agent":
            return node_path(step.identity)[:1]
        case "turn":
            return turn
        case "prompt":
            return step.id if step.tokens is None else step.tokens.prompt
        case _:
            assert_never(baseline_per)


def node_path(identity: StepIdentity) -> tuple[str, ...]:
    """Names of the nodes that enclose a call, outermost first and its own last; empty outside of graphs.

    The same for every rollout, as namespaces, which hold run ids, are not.
    """
    names = tuple(namespace.rsplit("|", 1)[-1].split(":", 1)[0] for namespace in identity.enclosing)
    return names or ((identity.node,) if identity.node is not None else ())

"""What one call of ``train`` works on: groups turned into minibatches.

Invariant: the result depends on what the groups hold and on the seed, not on the order in which
groups, trajectories or steps were given; whatever is not trained is counted.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from art_core.config import Averaging, TrainConfig
from art_core.errors import NothingToTrainError
from art_core.selection import Train
from art_core.training.advantages import step_advantages
from art_core.training.losses import token_weights
from art_core.training.samples import (
    Sample,
    canonical,
    fit,
    fork_rate,
    has_raw_logprobs,
    is_greedy,
    is_reshaped,
    trajectory_samples,
)
from art_core.training.token_tree import TokenTree, build_tree
from art_core.types import Step, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step is made of.

    Attributes:
        tree: the whole tree, with weights.
        samples: what was laid into it, in the order of its entries.
        best: answers of its groups' best rollouts, to be imitated too.
    """

    tree: TokenTree
    samples: tuple[Sample, ...]
    best: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """Minibatches, and the figures that are known before any training.

    Attributes:
        minibatches: empty when no group had a spread of rewards.
        metrics: see `grpo.TrainReport`.
        left_out: steps that were not trained, by reason.
    """

    minibatches: tuple[Minibatch, ...]
    metrics: dict[str, float]
    left_out: Counter[str]


def minibatch(
    samples: Sequence[Sample],
    averaging: Averaging,
    *,
    length: int | None = None,
    scale: float = 1.0,
    best: Sequence[Sample] = (),
) -> Minibatch:
    """Lay samples into one tree, and weigh their tokens.

    Args:
        samples: what is trained.
        averaging: how their tokens are weighed; see `losses.token_weights`.
        length: the constant of ``constant``.
        scale: factor of all weights.
        best: passed on.
    """
    ordered = canonical(samples)
    tree = build_tree(ordered)
    weights = token_weights(averaging, torch.from_numpy(tree.entries.rollout), length=length)
    tree = tree.with_weights(scale * weights.numpy())
    return Minibatch(tree, tuple(ordered), tuple(best))


def prepare(
    groups: Sequence[TrajectoryGroup],
    config: TrainConfig,
    generator: torch.Generator,
    *,
    train: Train = None,
    context_length: int | None = None,
) -> Batch:
    """Score groups, take their trainable steps, and lay them into trees.

    Args:
        groups: with rewards.
        config: how to train.
        generator: deals groups into minibatches.
        train: the user's choice among the steps; None: every one that can be trained.
        context_length: tokens that the model attends over; None: any number.

    Raises:
        ConfigError: a step is over-long, and that is to be an error.
        NothingToTrainError: there is no group, no reward, or no step that can be trained; the message
            says which.
    """
    rewards = sorted(reward for group in groups for t in group for reward in _rewards(t))
    _require_rewards(groups, rewards)
    left_out: Counter[str] = Counter()
    trained: list[tuple[list[Sample], list[Sample]]] = []
    trainable_steps = without_spread = 0
    sampled: list[Step] = []
    longest = min((n for n in (config.max_sample_tokens, context_length) if n is not None), default=None)
    for group in groups:
        advantages = step_advantages(
            group, config.advantage, baseline_per=config.baseline_per, gamma=config.gamma
        )
        samples: list[Sample] = []
        for trajectory in group:
            if trajectory.failed or not _rewards(trajectory):
                continue
            own, skipped = trajectory_samples(
                trajectory,
                advantages.get(trajectory.id, {}) if advantages else None,
                train=train,
                include_superseded=config.train_superseded,
                mask_truncated=config.mask_truncated,
            )
            own, too_long = fit(own, longest, config.overlong)
            left_out += skipped + too_long
            trainable_steps += len(own)
            known = {s.id: s for s in trajectory.steps}
            sampled += [known[s.step] for s in own]
            samples += own
        if not advantages:
            without_spread += 1
        elif samples:
            best = _best(group, samples, config.sft_own_best)
            trained.append((canonical(samples), best))
    if not trainable_steps:
        reasons = "; ".join(f"{n} x {reason}" for reason, n in left_out.most_common()) or "they have none"
        raise NothingToTrainError(
            f"{len(rewards)} scored trajectories hold no step that can be trained: {reasons}. Call the "
            "policy through ChatART, the model's client or the gateway, so that its tokens are recorded"
        )
    minibatches = _deal(trained, config, generator)
    everyone = [t for group in groups for t in group]
    metrics = {
        "reward_mean": math.fsum(rewards) / len(rewards),
        "reward_std": float(np.std(rewards)),
        "groups": float(len(groups)),
        "groups_without_spread": float(without_spread),
        "trajectories": float(len(everyone)),
        "trajectories_failed": float(sum(t.failed for t in everyone)),
        "trajectories_unscored": float(sum(not t.failed and not _rewards(t) for t in everyone)),
        "steps_left_out": float(left_out.total()),
        "steps_truncated": float(sum(s.finish_reason == "length" for t in everyone for s in t.steps)),
        **sampling_metrics(sampled),
        **tree_metrics(minibatches, [s for g, _ in trained for s in g]),
    }
    return Batch(minibatches, metrics, left_out)


def _deal(
    trained: Sequence[tuple[Sequence[Sample], Sequence[Sample]]],
    config: TrainConfig,
    generator: torch.Generator,
) -> tuple[Minibatch, ...]:
    """Groups dealt into minibatches, from an order that is theirs to one that is the seed's."""
    size = config.groups_per_update or max(1, len(trained))
    dealt = sorted(trained, key=lambda group: [(s.packed, s.advantage) for s in group[0]])
    if len(dealt) > size:
        dealt = [dealt[i] for i in torch.randperm(len(dealt), generator=generator).tolist()]
    return tuple(
        minibatch(
            [s for samples, _ in dealt[i : i + size] for s in samples],
            config.averaging,
            length=config.loss_length,
            best=[s for _, best in dealt[i : i + size] for s in best],
        )
        for i in range(0, len(dealt), size)
    )


def _best(group: TrajectoryGroup, samples: Sequence[Sample], count: int) -> list[Sample]:
    """Samples of a group's best rollouts: those of the highest rewards, above the group's mean."""
    by_rollout: dict[str, list[Sample]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.rollout, []).append(sample)
    worth = {t.id: math.fsum(r) / len(r) for t in group if (r := _rewards(t))}
    mean = math.fsum(worth.values()) / len(worth)
    above = [(r, canonical(own)) for r, own in by_rollout.items() if worth[r] > mean]
    above.sort(key=lambda rollout: (-worth[rollout[0]], [s.packed for s in rollout[1]]))
    # To imitate is to learn the answer, however it was sampled: at temperature 1, as in fine-tuning.
    return [replace(s, temperature=1.0) for _, own in above[:count] for s in own]


def _rewards(trajectory: Trajectory) -> list[float]:
    """What a trajectory was given: its reward, or else those of its steps and nodes."""
    if trajectory.failed:
        return []
    if trajectory.reward is not None:
        return [trajectory.reward]
    return [*trajectory.step_rewards.values(), *trajectory.node_rewards.values()]


def sampling_metrics(steps: Sequence[Step]) -> dict[str, float]:
    """How many steps were sampled in a way that the trainer's policy is not, or without telling how likely.

    Each is said once.

    Args:
        steps: those that can be trained.
    """
    greedy = sum(is_greedy(step.sampling) for step in steps)
    reshaped = sum(is_reshaped(step.sampling) for step in steps)
    raw = sum(map(has_raw_logprobs, steps))
    if greedy:
        _say_once(
            "%d of %d steps were sampled at temperature 0: they are no draws from a distribution, explore "
            "nothing, and are trained as if at temperature 1; sample them at a temperature above 0, or leave "
            "them out with train=Nodes(...)",
            greedy,
            len(steps),
        )
    if reshaped:
        _say_once(
            "%d of %d steps were sampled with top_p, top_k, min_p, penalties or logit_bias, which the "
            "policy in training knows nothing of: it is softmax(logits / temperature), and the importance "
            "weights alone make up for the difference; leave those settings out where you collect",
            reshaped,
            len(steps),
        )
    if raw:
        _say_once(
            "%d of %d steps were sampled at other temperatures than 1 by a server whose log-probabilities "
            "are the model's own, before temperature: they are not used, and the trainer's take their place, "
            "so nothing corrects for stale rollouts or for another precision of the server; start it with "
            "--logprobs-mode processed_logprobs (vLLM), or collect at temperature 1",
            raw,
            len(steps),
        )
    return {
        "steps_greedy": float(greedy),
        "steps_reshaped": float(reshaped),
        "steps_raw_logprobs": float(raw),
    }


_said: set[str] = set()


def _say_once(message: str, *numbers: int) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message, *numbers)


def tree_metrics(minibatches: Sequence[Minibatch], samples: Sequence[Sample]) -> dict[str, float]:
    """What the trees hold, and what they save."""
    total = sum(m.tree.tokens_total for m in minibatches)
    nodes = sum(len(m.tree) for m in minibatches)
    return {
        "entries": float(sum(len(m.tree.entries) for m in minibatches)),
        "tree_nodes": float(nodes),
        "tokens_total": float(total),
        "unique_share": nodes / total if total else 1.0,
        "fork_rate": fork_rate(samples),
        "null_logprobs": float(sum(int(np.isnan(m.tree.entries.old_logprob).sum()) for m in minibatches)),
    }


def _require_rewards(groups: Sequence[TrajectoryGroup], rewards: Sequence[float]) -> None:
    if not groups or not any(len(g) for g in groups):
        raise NothingToTrainError("there is nothing to train on: no trajectories were given")
    if not rewards:
        failed = [t for g in groups for t in g if t.failed]
        causes = Counter(t.failure.cause if t.failure else "unknown cause" for t in failed)
        why = ", ".join(f"{n} failed ({cause})" for cause, n in causes.most_common())
        unscored = sum(len(g) for g in groups) - len(failed)
        if unscored:
            why = ", ".join(filter(None, [why, f"{unscored} were never given a reward"]))
        raise NothingToTrainError(
            f"none of {sum(len(g) for g in groups)} trajectories has a reward: {why}. Give rewards with "
            "end_trajectory(id, reward=...), a reward function, or a judge"
        )

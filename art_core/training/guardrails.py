"""Guardrails: what an update must pass before it is applied, and what a run of bad updates leads to.

Invariant: an update that is not applied leaves weights and optimizer as they were; every act is an event
that says what was seen, what it was compared with, and what a person can do; what is decided depends on
what earlier updates showed, so it is part of a checkpoint.

Two levels. `Guardrails.check` looks at one gradient and may refuse it. `Guardrails.after` looks at a whole
call of ``train``: calls in trouble, one after the other, lower the learning rate; at its floor they end the
training; a calm stretch raises it again. A run in which no group's rewards differ is told of, not stopped.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from art_core.config import GuardrailConfig
from art_core.errors import TrainingStoppedError

logger = logging.getLogger(__name__)

NORMS_KEPT = 20
"""Gradient norms of past updates that a new one is compared with, by their median."""
NORMS_NEEDED = 8
"""Fewer than these say nothing about what is usual."""
LOWER_BY = 0.5
"""What the learning rate is multiplied by when it is lowered."""
LOWEST = 1 / 16
"""The smallest share of the configured learning rate."""
REWARD_MEMORY = 0.8
"""Weight of the past in the running mean of rewards."""
NOISE = 0.25
"""Share of the rewards' standard deviation that their running mean may lose without meaning anything."""
HIGHEST_KL_COEF = 1e3
"""A KL coefficient that its target drives beyond this has lost its grip."""


@dataclass(frozen=True, slots=True)
class TrainEvent:
    """Something that training did on its own.

    Attributes:
        kind: ``update_skipped``, ``learning_rate_lowered``, ``learning_rate_raised``, ``training_stopped``,
            ``no_spread``, ``token_budget_lowered``, ``gradient_checkpointing_on``, ``reward_audit``,
            ``reward_weights_unused``, ``node_rewards_unused``, ``tokens_untrained``.
        message: what happened and why, for a person.
        value: the number that it was decided by.
        limit: what the number was compared with; None where there is no such number.
        data: what else belongs to it, as JSON can hold it; of a ``reward_audit``, its findings.
    """

    kind: str
    message: str
    value: float
    limit: float | None = None
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why a call of ``train`` went badly."""

    why: str
    value: float
    limit: float


class Guardrails:
    """Watches the updates of one run.

    Args:
        config: limits; the defaults are wide enough for ordinary runs and need no tuning.
    """

    def __init__(self, config: GuardrailConfig) -> None:
        self.config = config
        self.rate_scale = 1.0
        self.stopped: str | None = None
        self._norms: deque[float] = deque(maxlen=NORMS_KEPT)
        self._troubled = 0
        self._calm = 0
        self._without_spread = 0
        self._reward: float | None = None
        self._best_reward: float | None = None
        self._first_reward: float | None = None
        self._first_entropy: float | None = None

    def require_going(self) -> None:
        """Refuse to train on after a stop.

        Raises:
            TrainingStoppedError: the run was stopped; the message says why and how to go on.
        """
        if self.stopped is not None:
            raise TrainingStoppedError(
                f"training was stopped: {self.stopped}. Go back to an earlier checkpoint (fork), change "
                "what was wrong, or go on as it is with resume_training()"
            )

    def stop(self, why: str) -> TrainEvent:
        """End the training: no call of ``train`` does anything until `resume`."""
        event = self._stop(why, 0.0, 0.0)
        logger.warning(event.message)
        return event

    def resume(self) -> None:
        """Forget a stop and what led to it; the learning rate is the configured one again."""
        self.stopped = None
        self._troubled = self._calm = self._without_spread = 0
        self.rate_scale = 1.0
        self._best_reward = self._first_reward = self._reward

    def forget_rewards(self) -> None:
        """Begin anew with what was seen of rewards: they are on another scale from now on."""
        self._reward = self._best_reward = self._first_reward = None
        self._without_spread = 0

    def check(self, *, update: int, loss: float, grad_norm: float, kl_old_new: float) -> TrainEvent | None:
        """Why an update must not be applied; None when it may be.

        Args:
            update: its number, for the message.
            loss: of the minibatch.
            grad_norm: before clipping.
            kl_old_new: mean KL(old, new) in nats, of the policy that sampled to the policy before the update.
        """
        event = _refusal(update, loss, grad_norm, kl_old_new, self.config, self._usual_norm())
        if event is not None:
            logger.warning(event.message)
        if math.isfinite(grad_norm):  # a norm that is usual from now on is not refused for ever
            self._norms.append(grad_norm)
        return event

    def after(self, metrics: Mapping[str, float]) -> list[TrainEvent]:
        """What a call of ``train`` leads to.

        Args:
            metrics: of the call, by the names of `report.TrainReport`.
        """
        events = self._watch_spread(metrics)
        trouble = self._trouble(metrics)
        if trouble is None:
            self._troubled, self._calm = 0, self._calm + 1
            if self.rate_scale < 1.0 and self._calm >= self.config.calm:
                events.append(self._raise_rate())
        else:
            self._troubled, self._calm = self._troubled + 1, 0
            if self._troubled >= self.config.patience:
                events.append(self._lower_rate_or_stop(trouble))
        for event in events:
            logger.warning(event.message)
        return events

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: everything that later decisions depend on."""
        return {
            "rate_scale": self.rate_scale,
            "stopped": self.stopped,
            "norms": list(self._norms),
            "troubled": self._troubled,
            "calm": self._calm,
            "without_spread": self._without_spread,
            "reward": self._reward,
            "best_reward": self._best_reward,
            "first_reward": self._first_reward,
            "first_entropy": self._first_entropy,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` said."""
        self.rate_scale = state["rate_scale"]
        self.stopped = state["stopped"]
        self._norms = deque(state["norms"], maxlen=NORMS_KEPT)
        self._troubled = state["troubled"]
        self._calm = state["calm"]
        self._without_spread = state["without_spread"]
        self._reward = state["reward"]
        self._best_reward = state["best_reward"]
        self._first_reward = state["first_reward"]
        self._first_entropy = state["first_entropy"]

    # -- inside ------------------------------------------------------------------------------------

    def _usual_norm(self) -> float | None:
        return median(self._norms) if len(self._norms) >= NORMS_NEEDED else None

    def _watch_spread(self, metrics: Mapping[str, float]) -> list[TrainEvent]:
        """Say so when, call after call, no group has rewards that differ.

        Nothing is damaged by that, and a solved task looks the same: it is no reason to stop.
        """
        groups = metrics.get("groups", 0.0)
        if not groups or metrics.get("groups_without_spread", 0.0) < groups:
            self._without_spread = 0
            return []
        self._without_spread += 1
        limit = self.config.spread_patience
        if limit is None or self._without_spread % limit:
            return []
        return [
            TrainEvent(
                "no_spread",
                f"in {self._without_spread} calls no group's rewards differed (mean "
                f"{metrics['reward_mean']:g}), so nothing was learned: the task is solved, too hard, or the "
                "reward is constant; try scenarios of another difficulty, or a finer reward",
                self._without_spread,
                limit,
            )
        ]

    def _trouble(self, metrics: Mapping[str, float]) -> _Trouble | None:
        """The first thing that is wrong with a call; None when nothing is."""
        config = self.config
        if metrics.get("updates_skipped", 0.0):
            return _Trouble("updates were skipped", metrics["updates_skipped"], 0.0)
        found: list[_Trouble] = []
        clipped = metrics.get("clip_fraction")
        if clipped is not None and config.max_clip_fraction is not None:
            found.append(_Trouble("the share of clipped tokens is", clipped, config.max_clip_fraction))
        entropy = metrics.get("entropy")
        if entropy is not None and config.max_entropy_growth is not None:
            if self._first_entropy is None:
                self._first_entropy = entropy
            limit = max(self._first_entropy, 0.1) * config.max_entropy_growth
            found.append(_Trouble("entropy (nats) is", entropy, limit))
        coef = metrics.get("kl_coef")
        if coef is not None:
            found.append(_Trouble("kl_coef, which follows kl_target, is", coef, HIGHEST_KL_COEF))
        reward = metrics.get("reward_mean")
        if reward is not None and config.max_reward_drop is not None:
            found.append(self._reward_drop(reward, metrics.get("reward_std", 0.0), config.max_reward_drop))
        return next((t for t in found if not t.value <= t.limit), None)

    def _reward_drop(self, reward: float, spread: float, share: float) -> _Trouble:
        """How far the running mean is below its best, and how far it may be."""
        if self._reward is None or self._best_reward is None or self._first_reward is None:
            self._reward = self._best_reward = self._first_reward = reward
        self._reward = REWARD_MEMORY * self._reward + (1 - REWARD_MEMORY) * reward
        self._best_reward = max(self._best_reward, self._reward)
        # A loss that is small beside the rewards' spread is noise, however little was gained before.
        room = max(share * (self._best_reward - self._first_reward), NOISE * spread)
        return _Trouble(
            "the running mean reward is below its best by", self._best_reward - self._reward, room
        )

    def _lower_rate_or_stop(self, trouble: _Trouble) -> TrainEvent:
        self._troubled = 0
        why = (
            f"in {self.config.patience} calls in a row {trouble.why} {trouble.value:.3g} "
            f"(limit {trouble.limit:.3g})"
        )
        if self.rate_scale * LOWER_BY < LOWEST:
            return self._stop(
                f"{why}, although the learning rate is down to {self.rate_scale:g} of what was configured",
                trouble.value,
                trouble.limit,
            )
        self.rate_scale *= LOWER_BY
        return TrainEvent(
            "learning_rate_lowered",
            f"learning rate lowered to {self.rate_scale:g} of what was configured: {why}",
            trouble.value,
            trouble.limit,
        )

    def _raise_rate(self) -> TrainEvent:
        self._calm = 0
        self.rate_scale = min(1.0, self.rate_scale / LOWER_BY)
        return TrainEvent(
            "learning_rate_raised",
            f"learning rate raised to {self.rate_scale:g} of what was configured after {self.config.calm} "
            "calls without trouble",
            self.rate_scale,
        )

    def _stop(self, why: str, value: float, limit: float) -> TrainEvent:
        self.stopped = why
        return TrainEvent("training_stopped", f"training stopped: {why}", value, limit)


def _refusal(
    update: int,
    loss: float,
    grad_norm: float,
    kl_old_new: float,
    config: GuardrailConfig,
    usual_norm: float | None,
) -> TrainEvent | None:
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        value = grad_norm if math.isfinite(loss) else loss
        what = "gradient norm" if math.isfinite(loss) else "loss"
        return TrainEvent("update_skipped", f"update {update} skipped: its {what} is {value}", value)
    if config.max_kl is not None and kl_old_new > config.max_kl:
        return TrainEvent(
            "update_skipped",
            f"update {update} skipped: KL(old, new) is {kl_old_new:.3g} nats, more than max_kl="
            f"{config.max_kl:g}: the policy that sampled is too far from the one in training (stale "
            "samples, or another engine's precision)",
            kl_old_new,
            config.max_kl,
        )
    if config.max_norm_growth is not None and usual_norm is not None:
        limit = config.max_norm_growth * usual_norm
        if grad_norm > limit > 0:
            return TrainEvent(
                "update_skipped",
                f"update {update} skipped: its gradient norm {grad_norm:.3g} is more than "
                f"max_norm_growth={config.max_norm_growth:g} times the usual {usual_norm:.3g}",
                grad_norm,
                limit,
            )
    return None

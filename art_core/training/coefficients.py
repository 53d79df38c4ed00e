"""Weights of the loss's KL and entropy terms, which may follow a target from update to update.

Invariant: a coefficient without a target is the configuration's; one with a target depends on what the
updates before it saw and on nothing else, so it is part of a checkpoint.
"""

from dataclasses import asdict, dataclass
from typing import Any

from art_core.config import TrainConfig

KL_GAIN = 0.1
"""How fast ``kl_coef`` follows its target: at most 2% an update."""

ENTROPY_STEP = 0.005
"""What an update adds to ``entropy_coef``, or takes from it."""


def next_kl_coef(coef: float, kl: float, target: float) -> float:
    """The KL coefficient after an update, moved so that KL comes nearer to its target.

    ``coef (1 + KL_GAIN clip(kl / target - 1, -0.2, 0.2))`` (Ziegler et al. 2019, arXiv:1909.08593,
    section 2.2).

    Args:
        coef: of this update.
        kl: to the base model, as this update saw it, in nats.
        target: what it should be, in nats.
    """
    return coef * (1 + KL_GAIN * min(max(kl / target - 1, -0.2), 0.2))


def next_entropy_coef(coef: float, entropy: float, target: float) -> float:
    """The weight of the entropy bonus after an update: one step up below the target, one down above it.

    Never negative (adaptive entropy control; He et al. 2025, "Skywork Open Reasoner 1",
    arXiv:2505.22312, section 4).

    Args:
        coef: of this update.
        entropy: mean over the update's tokens, in nats.
        target: what it should not fall below, in nats.
    """
    return max(0.0, coef + (ENTROPY_STEP if entropy < target else -ENTROPY_STEP))


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Coefficients of one update.

    Attributes:
        kl: weight of KL to the base model.
        entropy: weight of the entropy bonus, while it acts.
        bonus: whether the bonus acts: with a target, only after an update whose entropy was below it.
    """

    kl: float
    entropy: float
    bonus: bool = True

    @property
    def entropy_weight(self) -> float:
        """Weight of the entropy bonus in this update."""
        return self.entropy if self.bonus else 0.0

    @classmethod
    def of(cls, config: TrainConfig, before: "Coefficients | None" = None) -> "Coefficients":
        """What the configuration says, and ``before`` where a target decides."""
        if before is None:
            return cls(config.kl_coef, config.entropy_coef, config.entropy_target is None)
        return cls(
            config.kl_coef if config.kl_target is None else before.kl,
            config.entropy_coef if config.entropy_target is None else before.entropy,
            config.entropy_target is None or before.bonus,
        )

    def after(self, config: TrainConfig, *, kl: float | None, entropy: float) -> "Coefficients":
        """Coefficients of the next update.

        Args:
            config: with the targets.
            kl: to the base model, as this update saw it, in nats; None when it was not measured.
            entropy: as this update saw it, in nats.
        """
        return Coefficients(
            self.kl
            if config.kl_target is None or kl is None
            else next_kl_coef(self.kl, kl, config.kl_target),
            self.entropy
            if config.entropy_target is None
            else next_entropy_coef(self.entropy, entropy, config.entropy_target),
            config.entropy_target is None or entropy < config.entropy_target,
        )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

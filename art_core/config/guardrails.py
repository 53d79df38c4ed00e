"""What training must not do unnoticed, and how long it may go on.

Invariant: each limit is switched off by itself, with None.
"""

from pydantic import Field

from art_core.config.settings import Settings


class GuardrailConfig(Settings):
    """What training must not do unnoticed; None switches a guardrail off."""

    max_kl: float | None = Field(
        default=1.0,
        gt=0,
        description="refuse an update whose mean KL(old, new) in nats, from the policy that sampled, is more",
    )
    max_norm_growth: float | None = Field(
        default=30.0,
        gt=1,
        description="refuse an update whose gradient norm is this many times the usual one",
    )
    max_clip_fraction: float | None = Field(
        default=0.5, gt=0, le=1, description="trouble: share of tokens whose ratio was clipped"
    )
    max_entropy_growth: float | None = Field(
        default=5.0, gt=1, description="trouble: entropy as a multiple of the first one (or of 0.1 nats)"
    )
    max_reward_drop: float | None = Field(
        default=0.5,
        gt=0,
        description="trouble: share of what the running mean reward had gained that it has lost again",
    )
    patience: int = Field(
        default=3, ge=1, description="calls in trouble, one after the other, that halve the learning rate"
    )
    calm: int = Field(
        default=10, ge=1, description="calls without trouble after which a lowered rate is doubled"
    )
    spread_patience: int | None = Field(
        default=10,
        ge=1,
        description="calls without any group whose rewards differ, after which it is said",
    )
    audit_every: int | None = Field(
        default=10,
        ge=1,
        description="calls after which the rewards that were trained on are audited; findings are events",
    )
    audit_stops: bool = Field(default=False, description="a critical finding of that audit ends the training")

"""The forms of `tuning.py`: what its runs of the demo have in common, and what each of them changes.

Every variant is the base with one thing changed: a difference from the base has one reason, or is noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """A size of the benchmark: options of the demo that every run has, and what each variant changes."""

    base: tuple[str, ...]
    variants: dict[str, tuple[str, ...]]

    def options(self, variant: str, seed: int, given: Sequence[str] = ()) -> list[str]:
        """What the demo is given; what the variant changes is not overridden by ``given``."""
        return [*self.base, "--seed", str(seed), *given, *self.variants[variant]]


SHARED: dict[str, tuple[str, ...]] = {
    "base": (),
    "mean": ("--set", "advantage=mean"),
    "rate_1e-4": ("--learning-rate", "1e-4"),
    "rate_5e-4": ("--learning-rate", "5e-4"),
    "dapo": ("--set", "loss=dapo"),
    "dr_grpo": ("--set", "loss=dr_grpo"),
    "gspo": ("--set", "loss=gspo"),
    "cispo": ("--set", "loss=cispo"),
    "rank_4": ("--lora-rank", "4"),
    "clip_0.4": ("--set", "clip_low=0.4", "--set", "clip_high=0.4"),
    "leave_one_out": ("--set", "advantage=leave_one_out"),
}
"""Variants of both forms; what is asked most comes first."""
GPU = Form(
    base=(
        *("--mixed-opponents", "--opponents", "64", "--group-size", "16", "--steps", "22"),
        *("--warm-steps", "40", "--evaluate", "greedy", "--held-out", "500", "--token-budget", "8192"),
        *("--set", "epochs=4", "--set", "entropy_target=0.15"),
    ),
    variants={
        **SHARED,
        "no_entropy_target": ("--set", "entropy_target=null"),
        "one_update": ("--set", "epochs=1"),
        "two_updates": ("--set", "epochs=2"),
        "groups_of_8": ("--opponents", "128", "--group-size", "8"),
        "groups_of_64": ("--opponents", "16", "--group-size", "64"),
        "quarter_batch": ("--opponents", "16"),
        "groups_by_opponent": ("--no-mixed-opponents",),
    },
)
CPU = Form(
    # Two updates a step, each with half of the groups: with one, nothing is clipped and the losses hardly
    # differ; a second pass (epochs=2) would make each run take half as long again.
    base=(
        *("--opponents", "8", "--group-size", "16", "--steps", "12", "--warm-steps", "20"),
        *("--evaluate", "greedy", "--held-out", "200", "--set", "groups_per_update=4"),
    ),
    # Group sizes keep the number of games, and of updates, in a step.
    variants={
        **SHARED,
        "groups_of_8": ("--opponents", "16", "--group-size", "8", "--set", "groups_per_update=8"),
        "groups_of_32": ("--opponents", "4", "--group-size", "32", "--set", "groups_per_update=2"),
        "entropy_target": ("--set", "entropy_target=0.15"),
        "one_update": ("--set", "groups_per_update=null"),
        "half_batch": ("--opponents", "4", "--set", "groups_per_update=2"),
    },
)
FORMS = {"gpu": GPU, "cpu": CPU}
"""By the names that the files of results have for them."""

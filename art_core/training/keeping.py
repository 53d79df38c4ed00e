"""What passes keep in memory: all that they compute, or their layers' inputs alone (gradient checkpointing).

Invariant: all ranks keep alike. Nobody's decision is changed: only ``auto`` is ours to decide.
"""

from typing import Literal

from art_core.training.footprint import Foresight
from art_core.training.policy import Policy
from art_core.training.ranks import Ranks

SWITCHED_ON = "gradient checkpointing switched on"


class Keeping:
    """Switches a policy's gradient checkpointing.

    A sharded model's is on from the beginning: memory is short, and a pass that runs out of it cannot be made
    again. On a GPU it is off as long as passes are known to fit.

    Args:
        policy: whose passes.
        ranks: who shares them.
        wanted: `TrainConfig.gradient_checkpointing`.
    """

    def __init__(self, policy: Policy, ranks: Ranks, wanted: bool | Literal["auto"]) -> None:
        self._policy = policy
        self._sharded = ranks.sharded
        foreseen = ranks.sharded and policy.device.type == "cuda"
        self._foresight = Foresight(policy, ranks) if foreseen else None
        self._short = False
        self._wanted = wanted
        self.want(wanted)

    def want(self, wanted: bool | Literal["auto"]) -> None:
        """Go on under another setting."""
        before, self._wanted = self._wanted, wanted
        if wanted != "auto":
            self._policy.gradient_checkpointing = wanted
        elif self._sharded:
            self._policy.gradient_checkpointing = True
        elif before != "auto":  # else it is on because passes did not fit
            self._policy.gradient_checkpointing = False

    def relieve(self) -> str | None:
        """Keep less after a pass has not fitted; says what was changed, if anything was."""
        if self._wanted != "auto" or self._policy.gradient_checkpointing:
            return None
        self._policy.gradient_checkpointing = True
        return SWITCHED_ON

    def foresee(self, places: int, taken: int) -> str | None:
        """Keep all that a sharded model's passes compute while they fit; says what ends that.

        Args:
            places: of this rank's largest pass.
            taken: bytes that passes must leave.
        """
        if self._foresight is None or self._wanted != "auto" or self._short:
            return None
        kept_all = not self._policy.gradient_checkpointing
        self._short = not self._foresight.fits(places, taken)
        self._policy.gradient_checkpointing = self._short
        return SWITCHED_ON if kept_all and self._short else None

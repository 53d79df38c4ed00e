"""Guardrails: what an update must pass before it is applied.

Invariant: an update that is not applied leaves weights and optimizer as they were, and says so.
"""

import logging
import math
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainEvent:
    """Something that training did on its own.

    Attributes:
        kind: ``update_skipped``.
        message: what happened and why, for a person.
        value: the number that it was decided by.
        limit: what the number was compared with; None where there is no such number.
    """

    kind: str
    message: str
    value: float
    limit: float | None = None


def check_update(
    *, update: int, loss: float, grad_norm: float, kl_old_new: float, max_kl: float | None
) -> TrainEvent | None:
    """Why an update must not be applied; None when it may be.

    Args:
        update: its number, for the message.
        loss: of the minibatch.
        grad_norm: before clipping.
        kl_old_new: mean KL(old, new) in nats, of the policy that sampled to the policy before the update.
        max_kl: the most that it may be; None: anything.
    """
    event = None
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        value = grad_norm if math.isfinite(loss) else loss
        what = "gradient norm" if math.isfinite(loss) else "loss"
        event = TrainEvent("update_skipped", f"update {update} skipped: its {what} is {value}", value)
    elif max_kl is not None and kl_old_new > max_kl:
        event = TrainEvent(
            "update_skipped",
            f"update {update} skipped: KL(old, new) is {kl_old_new:.3g} nats, more than max_kl={max_kl:g}: "
            "the policy that sampled is too far from the one in training (stale samples, or another "
            "engine's precision)",
            kl_old_new,
            max_kl,
        )
    if event is not None:
        logger.warning(event.message)
    return event

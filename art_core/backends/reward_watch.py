"""RewardWatch: the audit of the rewards that training sees, every few calls.

Invariant: it only reads. What it finds is an event; training goes on unless the guardrails' ``audit_stops``
asks for an end. An audit that fails is an event, too, and fails nothing else.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from art_core.config import GuardrailConfig
from art_core.training.guardrails import TrainEvent
from art_core.types import TrajectoryGroup

logger = logging.getLogger(__name__)

EVENT = "reward_audit"
GROUPS = 64
"""Of the groups since the last audit, the newest so many are looked at."""


class RewardWatch:
    """Looks at the groups of every ``audit_every`` calls of training.

    It counts from the start of its process: what it has seen is no part of a checkpoint.
    """

    def __init__(self) -> None:
        self._groups: deque[TrajectoryGroup] = deque(maxlen=GROUPS)
        self._calls = 0

    def after(self, groups: Sequence[TrajectoryGroup], config: GuardrailConfig) -> TrainEvent | None:
        """What an audit has to say, where one is due.

        Args:
            groups: what this call of training was given.
            config: says how often.

        Returns:
            An event with the report's findings in its ``data``; None where no audit was due or nothing was
            found.
        """
        if config.audit_every is None:
            self._groups.clear()
            self._calls = 0
            return None
        self._groups.extend(groups)
        self._calls += 1
        if self._calls < config.audit_every or not self._groups:
            return None
        event = _audited(list(self._groups))
        self._groups.clear()
        self._calls = 0
        if event is not None:
            logger.warning(event.message)
        return event


def must_stop(event: TrainEvent | None, config: GuardrailConfig) -> str | None:
    """Why training has to end after an audit; None when it may go on."""
    if event is None or not config.audit_stops or not event.data.get("critical"):
        return None
    return f"audit_stops, and {event.message}"


def _audited(groups: list[TrajectoryGroup]) -> TrainEvent | None:
    from art_core.rewards.audit import audit

    try:
        report = audit(groups)
    except Exception as fault:
        logger.warning("the rewards could not be audited", exc_info=fault)
        return TrainEvent(
            EVENT,
            f"the rewards could not be audited: {type(fault).__name__}: {fault}",
            0.0,
            data={"critical": 0},
        )
    if not report.findings:
        return None
    said = "; ".join(f"{f.name} ({f.severity.value}): {f.message}" for f in report.findings)
    data: dict[str, Any] = {
        "critical": len(report.critical),
        "groups": report.groups,
        "findings": report.as_dict()["findings"],
    }
    return TrainEvent(
        EVENT,
        f"the rewards of the last {report.groups} groups look wrong: {said}",
        float(len(report.findings)),
        data=data,
    )

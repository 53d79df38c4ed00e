"""Happenings: a run's events as its page shows them.

Invariant: what an event says is shown as text, shortened; its kind decides how loudly.
"""

from collections.abc import Sequence
from typing import Any

from art_core.observe.dashboard.page import moment
from art_core.store.records import Event
from art_core.training.knobs import unturned
from art_core.views.text import shown

MESSAGE_LIMIT = 1000
"""Most characters of an event's message that are shown."""

MOST_SHOWN = 500
"""Events on a page; the newest."""

_TONES = {
    "run_failed": "bad",
    "training_stopped": "bad",
    "engine_failed": "bad",
    "version_lost": "bad",
    "replica_lost": "bad",
    "run_continued": "warn",
    "update_skipped": "warn",
    "learning_rate_lowered": "warn",
    "no_spread": "warn",
    "reward_audit": "warn",
    "knobs_refused": "warn",
    "reward_weights_unused": "warn",
    "node_rewards_unused": "warn",
    "tokens_untrained": "warn",
    "replica_out": "warn",
    "engine_restarted": "warn",
    "sleep_changed_answers": "warn",
    "wake_failed": "warn",
    "raw_logprobs": "warn",
    "checkpoint_missing": "warn",
}


def event_view(event: Event) -> dict[str, Any]:
    """An event as its page takes it, in HTML and as JSON."""
    return {
        "kind": shown(event.kind, 60),
        "tone": _TONES.get(event.kind, ""),
        "message": shown(event.message, MESSAGE_LIMIT),
        "at": event.created_at,
        "moment": moment(event.created_at),
        "knob": knob_view(event) if event.kind == "knob_turned" else None,
    }


def knob_view(event: Event) -> dict[str, Any]:
    """A turn of a knob: its name, what it was and what it is; None: ``unturned``."""
    name = str(event.data.get("name", ""))
    return {
        "name": shown(name, 80),
        "before": _value(event.data.get("before")),
        "after": _value(event.data.get("after")),
        "unturned": unturned(name),
        "moment": moment(event.created_at),
    }


def _value(value: object) -> str | None:
    return None if value is None else f"{value:.12g}" if isinstance(value, float) else shown(value, 40)


def event_views(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The newest events, newest first."""
    return [event_view(event) for event in reversed(events[-MOST_SHOWN:])]

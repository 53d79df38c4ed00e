"""The rollouts of a run that ended since somebody last asked, also those that nobody trains.

Invariant: each rollout is told once, however long it ran.

A group in which too many rollouts failed never reaches training; what became of it is in the store alone.
"""

from art_core.store import EndedRollout, Store

MOST_LOOKED_AT = 20_000
"""Rollouts that began since the oldest one that is waited for: one that never ends is given up then."""


class RolloutWatch:
    """Tells the rollouts of one run.

    Args:
        store: where they are recorded.
        run_id: of the run.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run = run_id
        self._floor = 0  # all that began up to here were told
        self._told: set[int] = set()  # of those that began later

    def ended(self) -> list[EndedRollout]:
        """Those that ended since the last call."""
        found, running = self._store.ended(self._run, self._floor)
        new = [rollout for rollout in found if rollout.seq not in self._told]
        if found:
            newest = found[-1].seq
            self._floor = max(
                newest if running is None else min(newest, running - 1), newest - MOST_LOOKED_AT
            )
        self._told = {rollout.seq for rollout in found if rollout.seq > self._floor}
        return new

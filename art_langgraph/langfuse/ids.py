"""Ids in Langfuse that follow from ours alone.

Invariant: the same thing of the same trajectory has the same id in every export, so that exporting twice
replaces, and whoever knows our id can compute Langfuse's.

A trace's id is what ``Langfuse.create_trace_id(seed=trajectory.id)`` gives.
"""

from hashlib import sha256


def trace_id(trajectory_id: str) -> str:
    """The trace of a trajectory: 32 hexadecimal digits."""
    return sha256(trajectory_id.encode()).hexdigest()[:32]


def observation_id(trajectory_id: str, part: str) -> str:
    """The observation of one part of a trajectory (``""`` for the rollout itself): 16 hexadecimal digits."""
    return sha256(f"{trajectory_id}\n{part}".encode()).hexdigest()[:16]


def score_id(trajectory_id: str, name: str, of: str = "") -> str:
    """The score of a trajectory, or of one part of it."""
    return "art-" + sha256(f"{trajectory_id}\n{name}\n{of}".encode()).hexdigest()[:32]

"""Ids of rollouts, steps, calls and runs."""

import os
import time


def new_id(prefix: str) -> str:
    """A unique id that says what it names (``t-0197...`` for trajectories).

    It begins with the time in milliseconds, so that indices of databases grow at their end; 80 random bits
    follow.
    """
    return f"{prefix}-{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"

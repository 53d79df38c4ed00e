"""Runs inside vLLM's own processes under test: while they wait for each other, they sleep.

As it comes, whoever waits asks again and again for a second, which on a machine of few cores keeps everything
else from computing, the other tests among it. What is computed is the same.
"""

import time
from typing import Any

SECONDS = 0.0005
"""For so long it is still asked again and again."""


def register() -> None:
    """Entry point of the plugin group ``vllm.general_plugins``; called in each of vLLM's processes."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def record_read(self: Any) -> None:
        self.last_read = time.monotonic()
        self.busy_loop_s = SECONDS  # not before the first read: the other side may not listen yet

    SpinCondition.record_read = record_read

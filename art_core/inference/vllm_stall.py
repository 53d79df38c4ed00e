"""Whether a vLLM that answers `/health` also makes progress: its HTTP server may outlive a stuck engine.

Invariant: a server counts as stalled only if requests run in it and not one engine step ended for as long as
the limit; a server that tells no metrics never counts as stalled.
"""

import re
from dataclasses import dataclass

_SERIES = re.compile(
    r"^vllm:(?P<name>num_requests_running|iteration_tokens_total_count)(?:\{[^}]*\})? (?P<value>\S+)$", re.M
)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a server had done at a moment.

    Attributes:
        running: requests in the engine.
        steps: engine steps since it was started.
    """

    running: float
    steps: float


def read_progress(metrics: str) -> Progress | None:
    """Read it from Prometheus' text format, over all engines of the server; None when it is not told."""
    sums: dict[str, float] = {}
    for found in _SERIES.finditer(metrics):
        sums[found["name"]] = sums.get(found["name"], 0.0) + float(found["value"])
    if len(sums) < 2:
        return None
    return Progress(sums["num_requests_running"], sums["iteration_tokens_total_count"])


class StallWatch:
    """Remembers since when a server has made no progress.

    Args:
        limit: seconds after which it is stalled.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._steps: float | None = None
        self._since = 0.0

    def stalled(self, progress: Progress | None, now: float) -> bool:
        """Whether it is, going by this reading and those before; ``now`` in seconds of one clock."""
        if progress is None or not progress.running or progress.steps != self._steps:
            self._steps = progress.steps if progress is not None else None
            self._since = now
            return False
        return now - self._since >= self.limit

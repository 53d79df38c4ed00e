"""A request while it is decoded: written by the scheduler's thread, read by the server's.

Invariant: lists only grow, and `Output.progress` is replaced after they grew; a reader that looks at
``progress`` first and then at that many entries sees a consistent state without a lock.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from art_core.errors import EngineError
from art_core.inference.embedded.sampling import Sampled, SamplingParams


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a choice is.

    Attributes:
        tokens: how many were sampled.
        visible: how many of them make up the text: an end token does not.
        finish_reason: ``stop`` or ``length``; None while it goes on.
        stop_reason: the stop text or the id of the stop token that ended it.
        text_end: where a stop text begins in the completion's text.
    """

    tokens: int = 0
    visible: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    text_end: int | None = None


@dataclass(slots=True)
class Output:
    """One choice."""

    sampled: list[Sampled] = field(default_factory=list[Sampled])
    progress: Progress = field(default_factory=Progress)


class Job:
    """One request.

    Args:
        version: the served name of the version that answers.
        prompt: token ids.
        params: how to sample.
        n: how many choices.
        keep_special: whether special tokens appear in the text that stop texts are sought in.
        follow: whether somebody reads tokens before the end.
        notify: called by the scheduler's thread at the end, and with ``follow`` whenever something is
            new; must not block.
    """

    def __init__(
        self,
        version: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        n: int = 1,
        keep_special: bool = False,
        follow: bool = False,
        notify: Callable[[], None],
    ) -> None:
        self.version = version
        self.prompt = prompt
        self.params = params
        self.keep_special = keep_special
        self.follow = follow
        self.outputs = [Output() for _ in range(n)]
        self.notify = notify
        self.open = n  # choices that wait or run; the scheduler's count
        self.error: EngineError | None = None
        self.cancelled = threading.Event()

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or all(o.progress.finish_reason for o in self.outputs)

"""How far a starting vLLM is, and showing it: a start takes from half a minute to several.

Invariant: at a terminal it is seen what is waited for and how long already; a log gets a line for each phase.

The phases are read from vLLM's log. A table: the line that came last says which one it is.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.errors import LiveError
from rich.markup import escape
from rich.status import Status

logger = logging.getLogger(__name__)

FIRST_PHASE = "importing vLLM"
READY = "ready"

_PHASES: tuple[tuple[str, str], ...] = (
    (r"Initializing a V1 LLM engine", "starting the engine"),
    (r"Starting to load model|Loading \w+ checkpoint shards", "loading weights"),
    (r"Model loading took|Loading weights took", "measuring memory"),
    (r"Starting torch\.compile|Dynamo bytecode|Compiling a graph|for vLLM's torch\.compile", "compiling"),
    (r"Directly load", "loading compiled graphs from the cache"),
    (r"KV cache size", "warming up"),
    (r"FlashInfer autotun", "choosing kernels"),
    (r"Capturing CUDA graph", "capturing CUDA graphs"),
    (r"Graph capturing finished|init engine .*took|Starting vLLM (API )?server", "starting the HTTP server"),
)
_ANY = re.compile("|".join(f"(?P<phase{i}>{pattern})" for i, (pattern, _) in enumerate(_PHASES)))


def find_phase(log: str) -> str:
    """What a starting vLLM does, going by the lines that its log ends with."""
    found = FIRST_PHASE
    for match in _ANY.finditer(log):
        found = next(_PHASES[int(name[5:])][1] for name, part in match.groupdict().items() if part)
    return found


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far a starting server is.

    Attributes:
        phase: what it does, in words; `READY` once it answers.
        seconds: since it was started.
        last_line: the newest line of its log.
        log: where the whole log is.
        ended: whether this is the last word: it answers, or has failed.
        note: what was chosen for this start, said once.
    """

    phase: str
    seconds: float
    last_line: str
    log: Path
    ended: bool = False
    note: str = ""


class StartDisplay:
    """Shows starts, one after the other: a line that changes at a terminal, else a log line for each phase.

    Args:
        name: of what is started.
        console: where; None: standard error.
    """

    def __init__(self, name: str = "vLLM", console: Console | None = None) -> None:
        self._name = name
        self._console = console or Console(stderr=True)
        self._status: Status | None = None
        self._phase = ""

    def __call__(self, progress: StartProgress) -> None:
        """Show how far it is."""
        if progress.note and (self._console.is_terminal or self._console.is_jupyter):
            self._console.print(f"{self._name}: {escape(progress.note)}", highlight=False)
        words = f"{self._name}: {progress.phase} ({progress.seconds:.0f} s)"
        if progress.ended:
            self._stop()
        elif self._console.is_terminal or self._console.is_jupyter:
            self._show(f"{escape(words)}  [dim]{escape(progress.last_line[:80])}[/dim]")
        if progress.phase != self._phase:
            self._phase = progress.phase
            logger.info("%s, log in %s", words, progress.log)
        if progress.ended:
            self._phase = ""

    def _show(self, words: str) -> None:
        if self._status is not None:
            self._status.update(words)
            return
        status = Status(words, console=self._console)
        try:
            status.start()
        except LiveError:
            return  # a bar of rollouts is shown, or another replica's start: the log has it
        self._status = status

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

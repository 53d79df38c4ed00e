"""Verdicts that were given before, by what was asked.

Invariant: an entry's key is the whole question and the judge's name, so a verdict is found again only if
the judge would be asked exactly the same. Failures are never kept.

With a path, entries are also lines of a JSON file, read once and appended to. A verdict that the disk
refuses is still used, and kept in memory: it was paid for.
"""

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from art_core.errors import ConfigError
from art_core.rewards.verdicts import Verdict
from art_core.types import Message

logger = logging.getLogger(__name__)


class VerdictCache:
    """The most recent verdicts. Thread-safe; one process writes a file at a time.

    Args:
        path: keeps them across processes; None: in memory alone.
        size: most verdicts in memory.

    Raises:
        ConfigError: the size is below 1, or the file cannot be read.
    """

    def __init__(self, path: str | Path | None = None, *, size: int = 10_000) -> None:
        if size < 1:
            raise ConfigError(f"a verdict cache of size {size}: expected at least 1")
        self._path = None if path is None else Path(path)
        self._size = size
        self._lock = threading.Lock()
        self._refused = False
        self._kept: OrderedDict[str, dict[str, Verdict]] = OrderedDict()
        if self._path is not None and self._path.exists():
            try:
                self._read(self._path)
            except OSError as unreadable:
                raise ConfigError(f"verdict cache {path}: it cannot be read: {unreadable}") from unreadable

    def get(self, key: str) -> Mapping[str, Verdict] | None:
        """The verdicts on a question; None when it was never answered."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: str, verdicts: Mapping[str, Verdict]) -> None:
        """Keep the verdicts on a question; a file that cannot be written is warned of, once."""
        with self._lock:
            self._remember(key, dict(verdicts))
            if self._path is None:
                return
            values = {name: [v.score, v.explanation] for name, v in verdicts.items()}
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # A newline before as well: a line cut short, by a kill or a full disk, stays alone.
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(f"\n{json.dumps({'key': key, 'verdicts': values})}\n")
            except OSError as refused:
                if not self._refused:
                    logger.warning(
                        "verdict cache %s cannot be written, so the judge will be asked again by the next "
                        "process; verdicts are kept in memory: %s",
                        self._path,
                        refused,
                    )
                self._refused = True

    def __len__(self) -> int:
        return len(self._kept)

    def _remember(self, key: str, verdicts: dict[str, Verdict]) -> None:
        self._kept[key] = verdicts
        self._kept.move_to_end(key)
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)

    def _read(self, path: Path) -> None:
        damaged = 0
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                    verdicts = {n: Verdict(float(s), str(e)) for n, (s, e) in entry["verdicts"].items()}
                    self._remember(str(entry["key"]), verdicts)
                except (ValueError, KeyError, TypeError, AttributeError):
                    damaged += 1
        if damaged:
            logger.warning("verdict cache %s: %d damaged lines are not used", path, damaged)


def question_key(judge: str, messages: Sequence[Message]) -> str:
    """The key of a question to a judge of this name."""
    return hashlib.sha256(json.dumps([judge, list(messages)], sort_keys=True).encode()).hexdigest()

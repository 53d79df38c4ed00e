"""A Langfuse server without Langfuse: real HTTP on loopback, what came in as data, faults on demand.

It speaks what Langfuse's SDK 5 speaks: OTLP over HTTP (protobuf, gzip), scores in batches, observations and
scores by pages, prompts, projects. `langfuse_project` keeps what came in, `langfuse_wire` spells it,
`langfuse_http` carries it, and `langfuse_faults` says what goes wrong.
"""

import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from fakes.langfuse_faults import Fault, draw
from fakes.langfuse_http import PUBLIC_KEY, SECRET_KEY, Asked, Handler, QuietServer
from fakes.langfuse_project import LangfuseProject

__all__ = ["PUBLIC_KEY", "SECRET_KEY", "LangfuseServer"]


@dataclass(slots=True)
class LangfuseServer(LangfuseProject):
    """Started with ``with``; `base_url` is where it is.

    Attributes:
        public_key: that requests must have.
        largest: bytes of a request that are taken.
        asked: the requests, as they came.
        faults: what goes wrong with the next ones.
    """

    public_key: str = PUBLIC_KEY
    largest: int = 5_000_000
    asked: list[Asked] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    _server: Any = None
    _thread: Any = None

    def __enter__(self) -> Self:
        outer = self

        class Bound(Handler):
            fake = outer

        self._server = QuietServer(("127.0.0.1", 0), Bound)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def break_(self, **fault: Any) -> None:
        self.faults.append(Fault(**fault))

    def mend(self) -> None:
        self.faults.clear()

    def requests(self, path: str) -> list[Asked]:
        return [a for a in self.asked if a.path.startswith(path)]

    def fault(self, path: str) -> Fault | None:
        """What goes wrong with this request to a path."""
        with self._lock:
            return draw(self.faults, path)

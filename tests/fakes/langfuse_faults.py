"""What goes wrong with a fake Langfuse: which of its requests, how often, and how."""

import threading
from dataclasses import dataclass


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next requests to a path.

    Attributes:
        path: beginning of the paths that it hits.
        times: how many requests; None: all of them, until `LangfuseServer.mend`.
        status: the answer's; 0 cuts the connection.
        retry_after: seconds or a date, in the answer's header.
        delay: seconds before the answer.
        until: the answer waits for this event.
        applied: what came in is kept first: the client cannot know.
        after: so many requests are served well before.
    """

    path: str = "/"
    times: int | None = 1
    status: int = 500
    retry_after: str | None = None
    delay: float = 0.0
    until: threading.Event | None = None
    applied: bool = False
    after: int = 0


def draw(faults: list[Fault], path: str) -> Fault | None:
    """The fault that hits a request to a path; one that has been drawn often enough leaves the list."""
    for fault in faults:
        if not path.startswith(fault.path):
            continue
        if fault.after > 0:
            fault.after -= 1
            return None
        if fault.times is not None:
            fault.times -= 1
            if fault.times == 0:
                faults.remove(fault)
        return fault
    return None

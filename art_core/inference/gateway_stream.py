"""Server-sent events, cut out of the bytes of an HTTP stream as they arrive.

Invariant: concatenating what comes out gives exactly what went in; an event comes out with the very read
that completes it.
"""

import re

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")

DONE = b"[DONE]"
"""The data of the event that ends an OpenAI stream."""


class EventSplitter:
    """Cuts bytes into events, each with the blank line that ends it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes; returns the events that they complete."""
        buffer = self._rest + data
        events: list[bytes] = []
        at = 0
        for end in _END_OF_EVENT.finditer(buffer):
            events.append(buffer[at : end.end()])
            at = end.end()
        self._rest = buffer[at:]
        return events

    @property
    def rest(self) -> bytes:
        """The beginning of an event whose end has not come."""
        return self._rest


def event_data(event: bytes) -> bytes | None:
    """The data of an event; None for comments, which servers send to keep connections alive."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def as_event(data: bytes) -> bytes:
    """One event with this data."""
    return b"data: " + data + b"\n\n"

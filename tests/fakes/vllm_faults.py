"""What goes wrong with a fake vLLM's completions: which fault when, and what it does to the connection."""

import asyncio
import random
from dataclasses import dataclass

from fakes.loopback_server import Cut, send
from fakes.vllm_wire import error_body

FAULTS = ("drop", "stall", "429", "500", "garbage", "cut_stream")
"""Kinds: closed without an answer, never answered, refused, broken, not JSON, cut in the middle."""


@dataclass(slots=True)
class Faults:
    """A share of the requests to fail.

    Attributes:
        rate: the share, from 0 to 1.
        kinds: of `FAULTS`, each as likely.
        random: what is drawn from.
        times: how many are left; None: no end.
    """

    rate: float
    kinds: tuple[str, ...]
    random: random.Random
    times: int | None

    def draw(self) -> str | None:
        """The kind that hits the next request, if one does."""
        if self.times == 0 or self.random.random() >= self.rate:
            return None
        self.times = None if self.times is None else self.times - 1
        return self.random.choice(self.kinds)


async def do_fault(
    kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, streaming: bool
) -> bool:
    """Do a fault; whether it took the answer's place (a cut stream starts as usual)."""
    if kind == "stall":
        await reader.read(1)  # returns when the client gives up
        raise Cut
    if kind == "drop":
        raise Cut
    if kind == "429":
        send(writer, 429, error_body("too many requests"))
    elif kind == "500":
        send(writer, 500, error_body("internal error"))
    elif kind == "garbage":
        broken = b'{"choices": [{"message": '
        send(writer, 200, b"data: %b\n\n" % broken if streaming else broken)
    return kind != "cut_stream"

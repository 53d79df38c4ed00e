"""Inputs of checkpointed layers between forward and backward, in the host's memory when they are many.

Invariant: each input is kept once and taken once, in the opposite order, and comes back as it was.
"""

from typing import Any

import torch
from torch import Tensor

OFFLOADED_ABOVE = 2**31
"""Bytes of layers' inputs above which checkpointing keeps them in the host's memory."""


class KeptInputs:
    """Keeps the inputs of one forward pass.

    The last layer's input is wanted first and stays. Copies run beside the computation, on a stream of their
    own; while a layer is computed again, the one before it is on its way back.

    Args:
        like: an input.
        count: how many there will be.
    """

    def __init__(self, like: Tensor, count: int) -> None:
        size = like.numel() * like.element_size() * count
        self._away = like.device.type == "cuda" and size > OFFLOADED_ABOVE
        self._inputs: list[Tensor | None] = []
        self._copies: dict[int, tuple[Tensor, Any]] = {}
        self._last = count - 1
        self._stream = torch.cuda.Stream(like.device) if self._away else None

    def put(self, x: Tensor) -> int:
        """Keep one; returns its number."""
        number = len(self._inputs)
        if self._stream is None or number == self._last:
            self._inputs.append(x.detach())
            return number
        there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            there.copy_(x.detach(), non_blocking=True)
        x.record_stream(self._stream)  # its memory is not given to others before it is copied
        self._inputs.append(there)
        return number

    def take(self, number: int) -> Tensor:
        """One that was kept, once."""
        self._fetch(number)
        self._fetch(number - 1)
        if number in self._copies:
            x, ready = self._copies.pop(number)
            now = torch.cuda.current_stream(x.device)
            now.wait_event(ready)
            x.record_stream(now)
        else:
            kept = self._inputs[number]
            assert kept is not None  # each is taken once
            x = kept
        self._inputs[number] = None
        return x

    def _fetch(self, number: int) -> None:
        kept = self._inputs[number] if number >= 0 else None
        if self._stream is None or kept is None or kept.device.type == "cuda" or number in self._copies:
            return
        with torch.cuda.stream(self._stream):
            x = kept.to(self._stream.device, non_blocking=True)
            self._copies[number] = x, self._stream.record_event()

"""Ranks: the processes that make one update together.

Invariant: what `Ranks.sum` and `sum_gradients` leave behind is the same, bit for bit, on every rank; so is
everything that is decided from it, and so are the weights after each update.

The trainer is the same program on every rank. It sees the same groups and the same trees, computes its
share of their pieces (`balance`), and adds up what came out. `Alone` is the case of one process.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """What the trainer needs of the other processes."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def sharded(self) -> bool:
        """Whether the model is spread over the ranks, which then exchange weights within each pass."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, on all of them; ``values`` itself may be changed."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank."""
        ...

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace gradients by their sums over ranks."""
        ...


class Alone:
    """One process: nobody to wait for."""

    rank = 0
    size = 1
    sharded = False

    def sum(self, values: Tensor) -> Tensor:
        """The values."""
        return values

    def any(self, flag: bool) -> bool:
        """The flag."""
        return flag

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Leave them as they are."""

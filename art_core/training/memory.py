"""The token budget: how much of a tree goes into one forward pass, and what happens when memory runs out.

Invariant: work that ran out of memory leaves no gradient behind; it is repeated from the beginning, with a
smaller budget or with less kept in memory, on every rank alike, or it ends in an error that says how much
was too much. A sharded model's work cannot be repeated, so whether it fits is foreseen.

`TokenBudget.run` cuts a tree to the budget, hands this rank's share to the work, and asks all ranks
whether it fitted.
"""

import ctypes
import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch

from art_core.errors import OutOfMemoryError
from art_core.training.balance import Share, share
from art_core.training.guardrails import TrainEvent
from art_core.training.layout import Path
from art_core.training.out_of_memory import is_out_of_memory, release
from art_core.training.paths import places
from art_core.training.ranks import Ranks
from art_core.training.token_tree import TokenTree

logger = logging.getLogger(__name__)

T = TypeVar("T")


EFFICIENT = 4096
"""Tokens of a pass below which keeping less in memory costs less than still smaller passes: each pass of a
tree computes the path to it again."""


class TokenBudget:
    """Most tokens in one forward pass; lowered when memory runs out, and then kept.

    Args:
        tokens: the budget to begin with, or what finds it when it is first needed.
        ranks: who shares the work.
        parameters: whose gradients the work accumulates.
        path: says how pieces are put before the model now.
        relieve: lets passes of a size take less memory from now on, and says how; None: it cannot.
        foresee: told how many places the largest pass here has, before a sharded model's passes, which cannot
            be made again; sees to it that they fit, on all ranks together, and says what that changed.
    """

    def __init__(
        self,
        tokens: int | Callable[[], int],
        ranks: Ranks,
        parameters: Sequence[torch.nn.Parameter],
        path: Callable[[], Path] = lambda: "tree",
        relieve: Callable[[], str | None] = lambda: None,
        foresee: Callable[[int], str | None] = lambda places: None,
    ) -> None:
        self._tokens = tokens
        self._relieve = relieve
        self._foresee = foresee
        self._ranks = ranks
        self._parameters = list(parameters)
        self._path = path
        self._events: list[TrainEvent] = []
        # By a tree's identity; the tree is held, so that the identity stays its own.
        self._shares: dict[tuple[int, int, Path], tuple[TokenTree, Share]] = {}

    @property
    def tokens(self) -> int:
        """The budget as it is now."""
        if not isinstance(self._tokens, int):
            self._tokens = self._tokens()
        return self._tokens

    def reset(self, tokens: int | Callable[[], int]) -> None:
        """Begin again with another budget."""
        self._tokens = tokens

    def take_events(self) -> list[TrainEvent]:
        """What was lowered since the last call."""
        events, self._events = self._events, []
        return events

    def share(self, tree: TokenTree) -> Share:
        """This rank's share of a tree, cut to the budget as it is now."""
        path = self._path()
        key = (id(tree), self.tokens, path)
        known = self._shares.get(key)
        if known is None or known[0] is not tree:
            known = tree, share(tree, self.tokens, path=path, rank=self._ranks.rank, ranks=self._ranks.size)
            self._shares[key] = known
        return known[1]

    def forget(self) -> None:
        """Let go of the trees that were cut, and of the host's memory that earlier passes have left free."""
        self._shares.clear()
        return_free_memory()

    def run(self, tree: TokenTree, work: Callable[[Share], T]) -> tuple[Share, T]:
        """Do work on this rank's share of a tree, in pieces that fit into memory.

        Args:
            tree: the whole tree, equal on all ranks.
            work: may accumulate gradients; must not communicate between ranks, except within the passes
                of a sharded model.

        Returns:
            The share that fitted, and what the work returned for it.

        Raises:
            OutOfMemoryError: not even the longest path fits by itself, or a sharded model ran out of
                memory, which cannot be repeated.
        """
        ranks = self._ranks
        while True:
            mine = self.share(tree)
            if ranks.sharded:
                self._prepare(mine)
            before = [None if p.grad is None else p.grad.clone() for p in self._parameters]
            too_much: str | None = None
            result: T | None = None
            try:
                result = work(mine)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                too_much = str(error).splitlines()[0]
                if ranks.sharded:
                    raise OutOfMemoryError(
                        f"out of memory with pieces of at most {self.tokens} tokens ({too_much}); the other "
                        "processes wait within the same pass of a sharded model, so it cannot be repeated: "
                        f"start again with token_budget below {self.tokens}, or use more processes"
                    ) from error
            # The error is gone by now, and with it the frames that held the pass's tensors.
            if not ranks.any(too_much is not None):
                assert result is not None
                return mine, result
            result = None
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
            del before
            release()
            self._lower(tree, too_much or "on another process")

    def _prepare(self, mine: Share) -> None:
        path = self._path()
        relief = self._foresee(max(places(piece, path) for piece in mine.pieces))
        if relief is not None:
            why = f"passes of up to {self.tokens} tokens are not expected to fit into memory"
            self._note("gradient_checkpointing_on", f"{relief}: {why}", self.tokens, None)

    def _lower(self, tree: TokenTree, why: str) -> None:
        longest = int(tree.depth.max()) + 1
        if self.tokens <= max(longest, EFFICIENT) and (relief := self._relieve()) is not None:
            self._note("gradient_checkpointing_on", f"{relief}: out of memory ({why})", self.tokens, None)
            return
        if self.tokens <= longest:
            raise OutOfMemoryError(
                f"out of memory with a piece of at most {longest} tokens, the length of the longest path "
                f"({why}); a path is never cut: shorten prompts or answers, train with "
                "gradient_checkpointing=True, lower the engine's share of the GPU, or shard the model over "
                "several processes (strategy='fsdp2')"
            )
        before = self.tokens
        self._tokens = max(longest, before // 2)
        message = f"token budget lowered from {before} to {self._tokens}: out of memory ({why})"
        self._note("token_budget_lowered", message, self._tokens, before)

    def _note(self, kind: str, message: str, value: float, limit: float | None) -> None:
        logger.warning(message)
        self._events.append(TrainEvent(kind, message, value, limit))


def return_free_memory() -> None:
    """Give the host memory that was freed and that the allocator holds on to, where it can (glibc).

    On a CPU, tensors of a few MiB lie between others in glibc's arenas. Their pages are used again, but not
    well: with trees of another shape in each update a process grows by the gigabyte, most of it free.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; None with another C library."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)

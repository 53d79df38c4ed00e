"""The footprint: how much memory a forward and backward pass takes, and so how large a piece may be.

Invariant: measuring leaves weights, gradients and random generators as they were.

Two passes of different sizes are measured; a pass of ``n`` tokens then takes ``fixed + per_token * n`` bytes
beyond what lies on the GPU anyway. What the line foretells wrongly, the back-off of `memory.TokenBudget`
puts right.
"""

import logging
from dataclasses import asdict, dataclass

import torch

from art_core.training.layout import Path
from art_core.training.logprobs import entry_logprobs
from art_core.training.measured import Measured, machine_key
from art_core.training.out_of_memory import is_out_of_memory, release
from art_core.training.policy import TRAINING, Policy
from art_core.training.ranks import Ranks
from art_core.training.samples import Sample
from art_core.training.token_tree import TokenTree, build_tree

logger = logging.getLogger(__name__)

CPU_BUDGET = 1024
"""Token budget where memory is not what limits it: larger pieces are no faster on a CPU."""

SIZES = (512, 2048)
"""Tokens of the passes that are measured."""

SMALLEST, LARGEST = 512, 32768
"""Bounds of what is found; beyond the upper one, a GPU is busy and larger pieces are no faster."""

USED = 0.85
"""Share of the memory left that is planned with."""

SURE = 0.75
"""The same where a pass that does not fit ends the training."""

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a pass, in bytes.

    Attributes:
        fixed: whatever its size.
        per_token: for each token of the piece.
    """

    fixed: float
    per_token: float

    def bytes(self, tokens: int) -> float:
        """What a pass of so many tokens takes."""
        return self.fixed + self.per_token * tokens

    def budget(self, available: float) -> int:
        """The most tokens that fit into ``available`` bytes, in steps of 256 and within bounds."""
        most = (USED * available - self.fixed) / max(self.per_token, 1.0)
        return int(min(max(most // 256 * 256, SMALLEST), LARGEST))


class Foresight:
    """Whether passes of a policy will fit that keep all that they compute; measured once for each path.

    All ranks ask together and hear the same, as they make the passes of a sharded model together.

    Args:
        policy: what is trained.
        ranks: who shares it.
    """

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self._policy = policy
        self._ranks = ranks
        self._known: dict[Path, Footprint | None] = {}

    def fits(self, places: int, taken: int = 0) -> bool:
        """Whether passes are expected to fit on every rank.

        Args:
            places: of this rank's largest layout.
            taken: bytes that passes must leave.
        """
        path = self._policy.path
        if path not in self._known:
            self._known[path] = self._measured()
        known = self._known[path]
        return known is not None and not self._ranks.any(not self._sure(known.bytes(places), taken))

    def _measured(self) -> Footprint | None:
        """None: even the passes that would have to be measured are too much."""
        policy = self._policy
        checkpointing, policy.gradient_checkpointing = policy.gradient_checkpointing, False
        try:
            small = peak_memory(policy, probe(policy, SIZES[0]))
            if self._ranks.any(not self._sure(small * SIZES[1] / SIZES[0])):
                return None
            return line(small, peak_memory(policy, probe(policy, SIZES[1])))
        finally:
            policy.gradient_checkpointing = checkpointing

    def _sure(self, needed: float, taken: int = 0) -> bool:
        left = available_memory(self._policy.device) - taken
        logger.info("a pass is expected to take %.1f of %.1f GiB", needed / GIB, left / GIB)
        return needed <= SURE * left


def found_budget(policy: Policy, ranks: Ranks, taken: int = 0) -> int:
    """The token budget for this policy on this machine, the same on all ranks.

    Args:
        policy: what is trained.
        ranks: who shares the work.
        taken: bytes that passes must leave, for an optimizer's state that is not there yet.
    """
    if policy.device.type != "cuda":
        return CPU_BUDGET
    # Ranks that share one model pass together or not at all, whatever their tables say.
    passes = footprint(policy, anew=ranks.sharded)
    own = SMALLEST if passes is None else passes.budget(available_memory(policy.device) - taken)
    each = torch.zeros(ranks.size, dtype=torch.int64)
    each[ranks.rank] = own
    budget = int(ranks.sum(each).min())
    logger.info("token budget: %d tokens in a pass", budget)
    return budget


def footprint(policy: Policy, *, anew: bool = False) -> Footprint | None:
    """What a pass of this policy takes, out of the table, or measured now, or measured ``anew`` anyway.

    Where the larger pass does not fit, the smaller one alone says it, for this time; where that does not fit
    either, nobody knows: None.
    """
    table = Measured("footprint")
    key = {
        **machine_key(policy),
        "path": policy.path,
        "gradient_checkpointing": policy.gradient_checkpointing,
        "sizes": SIZES,
    }
    known = table.get(key)
    if known is not None and not anew:
        return Footprint(**known)
    taken: list[int] = []
    for size in SIZES:
        try:
            taken.append(peak_memory(policy, probe(policy, size)))
        except (RuntimeError, MemoryError) as error:
            # With a sharded model the other ranks wait within the same pass: it cannot be gone on from.
            if anew or not is_out_of_memory(error):
                raise
            logger.warning("a pass of %d tokens is too much for the memory that is left: %s", size, error)
            break
    if len(taken) < len(SIZES):
        release()
        return Footprint(0.0, taken[0] / SIZES[0]) if taken else None
    found = line(*taken)
    table.put(key, asdict(found))
    return found


def line(small: int, large: int) -> Footprint:
    """What passes of `SIZES` took makes of those of other sizes."""
    per_token = max(large - small, 0) / (SIZES[1] - SIZES[0])
    return Footprint(max(small - per_token * SIZES[0], 0.0), per_token)


def peak_memory(policy: Policy, tree: TokenTree) -> int:
    """Bytes that a forward and backward pass takes beyond what lay on the GPU before it."""
    device = policy.device
    parameters = policy.trainable_parameters()
    gradients = [p.grad for p in parameters]
    taken = 0
    try:
        for _ in range(2):  # the first one compiles and fills caches
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            with policy.using(TRAINING):
                entry_logprobs(policy, tree).logprob.sum().backward()
            torch.cuda.synchronize(device)
            taken = torch.cuda.max_memory_allocated(device) - before
            for parameter in parameters:
                parameter.grad = None
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    return taken


def probe(policy: Policy, tokens: int) -> TokenTree:
    """A tree of two branches, half of it prompt, as wide in the vocabulary as text is."""
    half, quarter = tokens // 2, tokens // 4
    known = min(1000, len(policy.tokenizer))
    dice = torch.Generator().manual_seed(0)
    words = torch.randint(0, known, (half + 2 * quarter,), generator=dice).tolist()
    return build_tree(
        [
            Sample(
                tuple(words[:half]),
                (i, *words[half + i * quarter : half + (i + 1) * quarter - 1]),
                (None,) * quarter,
                1.0,
                f"s{i}",
                f"r{i}",
            )
            for i in range(2)
        ]
    )


def available_memory(device: torch.device) -> int:
    """Bytes that this process may still take: what is free, and what it holds and does not use."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return int(min(free + cached, share * total - torch.cuda.memory_allocated(device)))

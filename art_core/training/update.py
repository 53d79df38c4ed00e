"""One update's gradient, accumulated over the pieces of a minibatch.

Invariant: the gradient is that of the whole minibatch, however its tree was cut; nothing but
``.grad`` of the trainable parameters changes here.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from art_core.config import TrainConfig
from art_core.training.balance import Share
from art_core.training.coefficients import Coefficients
from art_core.training.logprobs import entry_logprobs
from art_core.training.losses import (
    importance_weights,
    kl,
    kl_penalty,
    log_ratio,
    policy_loss,
    segment_mean,
    segment_sum,
)
from art_core.training.memory import TokenBudget
from art_core.training.policy import TRAINING, Policy
from art_core.training.ranks import Ranks
from art_core.training.token_tree import TokenTree

Advance = Callable[[], None]
"""Called after each forward pass, to report progress."""


@dataclass(frozen=True, slots=True)
class UpdateFigures:
    """What an update saw, entry by entry, before it was applied. All without gradient.

    Attributes:
        loss: the minibatch's loss.
        logprob: under the policy before this update  [entries].
        old_logprob: under the policy that sampled; NaN where unknown  [entries].
        entropy: in nats  [entries].
        ratio: new / proximal probability; empty for SFT  [entries].
        clipped: whether the ratio was clipped; empty for SFT  [entries].
        importance: importance weights, truncated or masked (0); empty for SFT  [entries].
        kl_base: KL to the base model, in nats; empty unless it is part of the loss  [entries].
    """

    loss: float
    logprob: Tensor
    old_logprob: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
    importance: Tensor
    kl_base: Tensor

    @property
    def mean_entropy(self) -> float:
        """Mean entropy in nats; 0 without entries."""
        return float(self.entropy.mean()) if len(self.entropy) else 0.0

    @property
    def mean_kl_base(self) -> float | None:
        """Mean KL to the base model in nats; None unless it is part of the loss."""
        return float(self.kl_base.mean()) if len(self.kl_base) else None

    @property
    def kl_old_new(self) -> float:
        """Mean KL(old, new) in nats, over entries whose old log-probability is known; 0 without any."""
        known = ~torch.isnan(self.old_logprob)
        return float(kl(self.old_logprob[known], self.logprob[known]).mean()) if known.any() else 0.0


class PieceFigures(NamedTuple):
    """What an update saw of one piece; attributes as in `UpdateFigures`, the loss still on the device."""

    loss: Tensor
    logprob: Tensor
    old_logprob: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
    importance: Tensor
    kl_base: Tensor


@dataclass(frozen=True, slots=True)
class Passes:
    """How passes over a tree are made: by which policy, in pieces of which size, shared with whom.

    Attributes:
        policy: what runs.
        budget: cuts trees, and begins again with smaller pieces when memory runs out.
        ranks: who computes the other pieces.
        advance: called after each pass.
    """

    policy: Policy
    budget: TokenBudget
    ranks: Ranks
    advance: Advance


def reference_logprobs(passes: Passes, tree: TokenTree, adapter: str | None) -> Tensor:
    """Log-probabilities of a tree's entries under an adapter, without gradient  [entries]."""

    def work(mine: Share) -> list[Tensor]:
        found: list[Tensor] = []
        for piece in mine.pieces:
            with torch.no_grad(), passes.policy.using(adapter):
                found.append(entry_logprobs(passes.policy, piece).logprob)
            passes.advance()
        return found

    mine, found = passes.budget.run(tree, work)
    return passes.ranks.sum(mine.whole(found))


def accumulate_policy_gradient(
    passes: Passes,
    tree: TokenTree,
    config: TrainConfig,
    coefficients: Coefficients,
    *,
    proximal: Tensor | None,
    base: Tensor | None,
) -> UpdateFigures:
    """Add this rank's part of the gradient of a minibatch's policy loss.

    Args:
        passes: how; the policy's training adapter is used.
        tree: what to train on.
        config: which loss.
        coefficients: of its KL and entropy terms.
        proximal: log-probabilities before this call of ``train`` changed anything; None when nothing has
            changed yet, so that they are the ones found now  [entries].
        base: log-probabilities under the base model; None without a KL term  [entries].

    Returns:
        Figures of the whole tree.
    """
    sequences = _sequence_log_ratios(passes, tree, config, proximal)
    bonus = coefficients.entropy_weight
    low, high = config.clip_range
    policy = passes.policy

    def work(mine: Share) -> list[PieceFigures]:
        parts: list[PieceFigures] = []
        for i, piece in enumerate(mine.pieces):
            with policy.using(TRAINING):
                new = entry_logprobs(policy, piece, entropy_gradient=bonus > 0)
                logprob = new.logprob
                now = logprob.detach()
                before = now if proximal is None else mine.part(i, proximal)
                old = _tensor(piece.entries.old_logprob, now)
                moved, mismatch = sequences.moved, sequences.mismatch
                outcome = policy_loss(
                    config.loss,
                    logprob,
                    before,
                    _tensor(piece.entries.advantage, now),
                    clip_low=low,
                    clip_high=high,
                    level=config.ratio_level,
                    segment_log_ratio=torch.zeros_like(now) if moved is None else mine.part(i, moved),
                )
                importance = importance_weights(
                    before,
                    old,
                    config.importance_cap,
                    floor=config.importance_floor,
                    mask=config.importance_beyond == "mask",
                    sequence_log_ratio=None if mismatch is None else mine.part(i, mismatch),
                )
                losses = importance * outcome.loss
                kl_base = now.new_empty(0)
                if base is not None:
                    reference = mine.part(i, base)
                    losses = losses + coefficients.kl * kl_penalty(logprob, reference, before)
                    kl_base = kl(now, reference)
                loss = (_tensor(piece.entries.weight, now) * losses).sum()
                if bonus:
                    # A mean over all tokens, whatever weights the loss gives them: the coefficient then
                    # means the same for every loss.
                    loss = loss - bonus / len(tree.entries) * new.entropy.sum()
                loss = mine.counted(i, loss)
                loss.backward()
            parts.append(
                PieceFigures(
                    loss.detach(),
                    now,
                    old,
                    new.entropy.detach(),
                    outcome.ratio,
                    outcome.clipped,
                    importance,
                    kl_base,
                )
            )
            passes.advance()
        return parts

    return _whole(passes, tree, work)


def accumulate_sft_gradient(passes: Passes, tree: TokenTree, *, seed: int | None = None) -> UpdateFigures:
    """Add this rank's part of the gradient of a tree's negative log-likelihood, weighted by its weights.

    Args:
        passes: how; the policy's training adapter is used.
        tree: what to imitate.
        seed: of what the adapter's dropout drops; None: whatever the process's generators say.

    Returns:
        Figures of the whole tree.
    """
    policy = passes.policy

    def work(mine: Share) -> list[PieceFigures]:
        with _drawing_from(None if seed is None else seed + passes.ranks.rank, policy.device):
            return imitate(mine)

    def imitate(mine: Share) -> list[PieceFigures]:
        parts: list[PieceFigures] = []
        for i, piece in enumerate(mine.pieces):
            # Dropout helps imitation; a policy loss must see the policy that is served.
            with policy.using(TRAINING), policy.dropout():
                new = entry_logprobs(policy, piece)
                now = new.logprob.detach()
                loss = -(_tensor(piece.entries.weight, now) * new.logprob).sum()
                loss = mine.counted(i, loss)
                loss.backward()
            none = now.new_empty(0)
            old = _tensor(piece.entries.old_logprob, now)
            parts.append(PieceFigures(loss.detach(), now, old, new.entropy, none, none.bool(), none, none))
        return parts

    return _whole(passes, tree, work)


@contextmanager
def _drawing_from(seed: int | None, device: torch.device) -> Generator[None]:
    """Inside the block random numbers come from a seed; afterwards the process's generators are as before."""
    if seed is None:
        yield
        return
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _whole(passes: Passes, tree: TokenTree, work: Callable[[Share], list[PieceFigures]]) -> UpdateFigures:
    """Figures of the whole tree, from the pieces of all ranks."""
    mine, parts = passes.budget.run(tree, work)
    ranks = passes.ranks

    def whole(columns: Sequence[Tensor]) -> Tensor:
        return ranks.sum(mine.whole(columns)) if len(columns[0]) else columns[0]

    # Read once all pieces are on their way: each read waits for the device.
    losses = [float(p.loss) for p in parts]
    loss = ranks.sum(torch.tensor([sum(losses)], dtype=torch.float64))
    return UpdateFigures(
        float(loss),
        whole([p.logprob for p in parts]),
        whole([p.old_logprob for p in parts]),
        whole([p.entropy for p in parts]),
        whole([p.ratio for p in parts]),
        whole([p.clipped for p in parts]),
        whole([p.importance for p in parts]),
        whole([p.kl_base for p in parts]),
    )


def joined(parts: Sequence[UpdateFigures]) -> UpdateFigures:
    """Figures of several updates as one; losses are summed."""
    return UpdateFigures(
        sum(p.loss for p in parts),
        torch.cat([p.logprob for p in parts]),
        torch.cat([p.old_logprob for p in parts]),
        torch.cat([p.entropy for p in parts]),
        torch.cat([p.ratio for p in parts]),
        torch.cat([p.clipped for p in parts]),
        torch.cat([p.importance for p in parts]),
        torch.cat([p.kl_base for p in parts]),
    )


@dataclass(frozen=True, slots=True)
class _SequenceLogRatios:
    """Log-ratios of each entry's whole answer; None where they are not asked for.

    Attributes:
        moved: mean over the answer's tokens of new - proximal; None also when nothing has moved yet
            [entries].
        mismatch: sum over the answer's tokens of proximal - behaviour  [entries].
    """

    moved: Tensor | None = None
    mismatch: Tensor | None = None


def reads_ahead(config: TrainConfig, *, first: bool) -> bool:
    """Whether an update reads the log-probabilities of all pieces before its first gradient.

    Sequence-level ratios need it, since an answer may be spread over several pieces.

    Args:
        config: which loss.
        first: the update is the first that sees its minibatch, and nothing has changed before it.
    """
    if first:
        return config.mismatch_level == "sequence" and config.importance_cap is not None
    return config.ratio_level == "sequence"


def _sequence_log_ratios(
    passes: Passes, tree: TokenTree, config: TrainConfig, proximal: Tensor | None
) -> _SequenceLogRatios:
    now: Tensor | None = None
    if reads_ahead(config, first=proximal is None):
        now = reference_logprobs(passes, tree, TRAINING)
    steps = torch.from_numpy(tree.entries.step).to(passes.policy.device)
    moved = mismatch = None
    if config.ratio_level == "sequence" and proximal is not None and now is not None:
        moved = segment_mean(log_ratio(now, proximal), steps)
    if config.mismatch_level == "sequence" and config.importance_cap is not None:
        before = now if proximal is None else proximal
        if before is not None:
            mismatch = segment_sum(log_ratio(before, _tensor(tree.entries.old_logprob, before)), steps)
    return _SequenceLogRatios(moved, mismatch)


def _tensor(column: object, like: Tensor) -> Tensor:
    return torch.as_tensor(column, dtype=like.dtype, device=like.device)

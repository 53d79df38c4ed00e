"""One update's gradient, accumulated over the pieces of a minibatch.

Invariant: the gradient is that of the whole minibatch, however its tree was cut; nothing but
``.grad`` of the trainable parameters changes here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from art_core.config import TrainConfig
from art_core.training.batch import Minibatch
from art_core.training.coefficients import Coefficients
from art_core.training.logprobs import entry_logprobs
from art_core.training.losses import (
    importance_weights,
    kl,
    log_ratio,
    policy_loss,
    segment_mean,
    segment_sum,
)
from art_core.training.policy import TRAINING, Policy
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


def reference_logprobs(
    policy: Policy, pieces: Sequence[TokenTree], adapter: str | None, advance: Advance
) -> list[Tensor]:
    """Log-probabilities of every piece's entries under an adapter, without gradient."""
    found: list[Tensor] = []
    for piece in pieces:
        with torch.no_grad(), policy.using(adapter):
            found.append(entry_logprobs(policy, piece).logprob)
        advance()
    return found


def accumulate_policy_gradient(
    policy: Policy,
    batch: Minibatch,
    config: TrainConfig,
    coefficients: Coefficients,
    *,
    proximal: Sequence[Tensor] | None,
    base: Sequence[Tensor] | None,
    advance: Advance,
) -> tuple[UpdateFigures, list[Tensor]]:
    """Add the gradient of a minibatch's policy loss.

    Args:
        policy: its training adapter is used.
        batch: what to train on.
        config: which loss.
        coefficients: of its KL and entropy terms.
        proximal: log-probabilities by piece before this call of ``train`` changed anything; None when
            nothing has changed yet, so that they are the ones found now.
        base: log-probabilities by piece under the base model; None without a KL term.
        advance: progress.

    Returns:
        Figures, and the log-probabilities by piece as they were now.
    """
    sequences = _sequence_log_ratios(policy, batch, config, proximal, advance)
    found: list[Tensor] = []
    parts: list[UpdateFigures] = []
    for i, piece in enumerate(batch.pieces):
        with policy.using(TRAINING):
            new = entry_logprobs(policy, piece, entropy_gradient=coefficients.entropy > 0)
            logprob = new.logprob
            now = logprob.detach()
            before = now if proximal is None else proximal[i]
            old = _tensor(piece.entries.old_logprob, now)
            outcome = policy_loss(
                config.loss,
                logprob,
                before,
                _tensor(piece.entries.advantage, now),
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                level=config.ratio_level,
                segment_log_ratio=torch.zeros_like(now) if sequences.moved is None else sequences.moved[i],
            )
            importance = importance_weights(
                before,
                old,
                config.importance_cap,
                floor=config.importance_floor,
                mask=config.importance_beyond == "mask",
                sequence_log_ratio=None if sequences.mismatch is None else sequences.mismatch[i],
            )
            losses = importance * outcome.loss
            kl_base = now.new_empty(0)
            if base is not None:
                penalty = kl(logprob, base[i])
                losses = losses + coefficients.kl * penalty
                kl_base = penalty.detach()
            if coefficients.entropy > 0:
                losses = losses - coefficients.entropy * new.entropy
            loss = (_tensor(piece.entries.weight, now) * losses).sum()
            loss.backward()
        found.append(now)
        parts.append(
            UpdateFigures(
                float(loss.detach()),
                now,
                old,
                new.entropy.detach(),
                outcome.ratio,
                outcome.clipped,
                importance,
                kl_base,
            )
        )
        advance()
    return joined(parts), found


def accumulate_sft_gradient(policy: Policy, batch: Minibatch) -> UpdateFigures:
    """Add the gradient of a minibatch's negative log-likelihood, weighted by its entries' weights."""
    parts: list[UpdateFigures] = []
    for piece in batch.pieces:
        # Dropout helps imitation; a policy loss must see the policy that is served.
        with policy.using(TRAINING), policy.dropout():
            new = entry_logprobs(policy, piece)
            now = new.logprob.detach()
            loss = -(_tensor(piece.entries.weight, now) * new.logprob).sum()
            loss.backward()
        none = now.new_empty(0)
        old = _tensor(piece.entries.old_logprob, now)
        parts.append(
            UpdateFigures(float(loss.detach()), now, old, new.entropy, none, none.bool(), none, none)
        )
    return joined(parts)


def joined(parts: Sequence[UpdateFigures]) -> UpdateFigures:
    """Figures of several pieces, or of several updates, as one; losses are summed."""
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
    """Log-ratios of each entry's whole answer, by piece; None where they are not asked for.

    Attributes:
        moved: mean over the answer's tokens of new - proximal; None also when nothing has moved yet.
        mismatch: sum over the answer's tokens of proximal - behaviour.
    """

    moved: Sequence[Tensor] | None = None
    mismatch: Sequence[Tensor] | None = None


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
    policy: Policy,
    batch: Minibatch,
    config: TrainConfig,
    proximal: Sequence[Tensor] | None,
    advance: Advance,
) -> _SequenceLogRatios:
    now: Sequence[Tensor] = ()
    if reads_ahead(config, first=proximal is None):
        now = reference_logprobs(policy, batch.pieces, TRAINING, advance)
    if not batch.pieces:
        return _SequenceLogRatios()
    moved = mismatch = None
    if config.ratio_level == "sequence" and proximal is not None:
        moved = _over_answers(segment_mean, batch, now, proximal)
    if config.mismatch_level == "sequence" and config.importance_cap is not None:
        before = now if proximal is None else proximal
        old = [_tensor(p.entries.old_logprob, b) for p, b in zip(batch.pieces, before, strict=True)]
        mismatch = _over_answers(segment_sum, batch, before, old)
    return _SequenceLogRatios(moved, mismatch)


def _over_answers(
    reduce: Callable[[Tensor, Tensor], Tensor],
    batch: Minibatch,
    new: Sequence[Tensor],
    old: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Log-ratios reduced over each answer's tokens, given back by piece."""
    steps = torch.cat([torch.from_numpy(p.entries.step) for p in batch.pieces]).to(new[0].device)
    reduced = reduce(log_ratio(torch.cat(list(new)), torch.cat(list(old))), steps)
    return list(reduced.split([len(n) for n in new]))


def _tensor(column: object, like: Tensor) -> Tensor:
    return torch.as_tensor(column, dtype=like.dtype, device=like.device)

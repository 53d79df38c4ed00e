"""Policy losses: pure functions over train entries.

Invariant: nothing here makes an infinity or a NaN of finite log-probabilities, in value or gradient;
an entry whose old log-probability is unknown (NaN) is on-policy: its ratio is 1.

``policy_loss`` gives a loss per entry, ``token_weights`` says how entries are averaged; the loss of a
batch is ``(weight * loss).sum()``, which may be taken piece by piece.

Three policies are told apart (Hilton et al. 2021, arXiv:2110.00641; AReaL, arXiv:2505.24298): the
*behaviour* policy that the server sampled with, the *proximal* one that this call of ``train`` began
with, and the one being updated. The ratio that is clipped is new / proximal; the mismatch of proximal
and behaviour (stale versions, another engine's numerics) is a truncated importance weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from art_core.config import Averaging, LevelName, LossName

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before ``exp``: e^20 is beyond any clip and far from overflow."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Losses of train entries.

    Attributes:
        loss: to be weighted and summed  [entries].
        ratio: new / proximal probability, of the token or of its sequence; no gradient  [entries].
        clipped: whether clipping stopped the entry's gradient  [entries].
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """``new - old``, clamped to +-`MAX_LOG_RATIO`; 0 in value, with ``new``'s gradient, where old is NaN.

    Args:
        new: log-probabilities, with gradient  [entries].
        old: log-probabilities, without; NaN where unknown  [entries].
    """
    # Selected before anything is computed with it: a NaN times 0 would still be a NaN in backward.
    known = torch.where(torch.isnan(old), new.detach(), old)
    return (new - known).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_weights(
    proximal: Tensor,
    behaviour: Tensor,
    cap: float | None,
    *,
    floor: float | None = None,
    mask: bool = False,
    sequence_log_ratio: Tensor | None = None,
) -> Tensor:
    """Importance weights ``w = proximal / behaviour`` for what the server sampled, without gradient.

    - Truncated, ``min(w, cap)``: bounded variance for some bias (Ionides 2008; for the mismatch of server
      and trainer: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
      training").
    - Masked, ``w`` where ``floor <= w <= cap`` and 0 elsewhere: tokens on which server and trainer disagree
      that much say nothing reliable (IcePop; Ling team 2025, arXiv:2510.18855; masked importance
      sampling, Liu et al. 2025, "When speed kills stability").

    Args:
        proximal: the trainer's log-probabilities before the update  [entries].
        behaviour: the server's when it sampled; NaN where unknown, which weighs 1  [entries].
        cap: the largest weight; None: no correction, every weight is 1.
        floor: with ``mask``: the smallest weight that is kept; None: every small one is.
        mask: leave weights beyond the bounds out, rather than cut them.
        sequence_log_ratio: the log-ratio of each entry's whole answer (the sum over its tokens), in place
            of the token's own: one weight for each answer  [entries].

    Returns:
        Weights  [entries].
    """
    if cap is None:
        return torch.ones_like(proximal)
    log_w = log_ratio(proximal.detach(), behaviour)
    if sequence_log_ratio is not None:
        log_w = sequence_log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = log_w.exp()
    if not mask:
        return weights.clamp(max=cap)
    kept = weights <= cap
    if floor is not None:
        kept &= weights >= floor
    return torch.where(kept, weights, torch.zeros_like(weights))


def kl(new: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(new, reference) from tokens of new, never negative.

    ``exp(d) - 1 - d`` with ``d = reference - new`` (Schulman 2020, "Approximating KL divergence"; GRPO,
    arXiv:2402.03300, eq. 4). Swap the arguments and stop gradients for an estimate of the other
    direction. Unknown (NaN) references give 0.

    Args:
        new: log-probabilities  [entries].
        reference: log-probabilities of the other policy  [entries].

    Returns:
        Estimates in nats  [entries].
    """
    d = -log_ratio(new, reference)
    return torch.expm1(d) - d


def kl_penalty(new: Tensor, reference: Tensor, proximal: Tensor) -> Tensor:
    """KL(new, reference) as a loss: ``k3`` times the ratio new / proximal, with the gradient of both.

    The tokens were drawn from the proximal policy, not from the one that is differentiated: without the
    ratio, the gradient of ``k3`` is that of another divergence (DeepSeek-V3.2, arXiv:2512.02556, section
    3.1). In value it is ``k3`` as long as the policy has not moved.

    Args:
        new: log-probabilities, with gradient  [entries].
        reference: log-probabilities of the base model, without  [entries].
        proximal: under the policy before the update; NaN counts as equal to new  [entries].

    Returns:
        Penalties in nats  [entries].
    """
    return log_ratio(new, proximal).exp() * kl(new, reference)


def segment_mean(values: Tensor, segments: Tensor) -> Tensor:
    """Each entry's value replaced by the mean over its segment.

    Args:
        values: [entries].
        segments: number of each entry's step or rollout  [entries].
    """
    sizes = segment_sum(torch.ones_like(values), segments)
    return segment_sum(values, segments) / sizes


def segment_sum(values: Tensor, segments: Tensor) -> Tensor:
    """Each entry's value replaced by the sum over its segment.

    Args:
        values: [entries].
        segments: number of each entry's step or rollout  [entries].
    """
    found, index = torch.unique(segments, return_inverse=True)
    return values.new_zeros(len(found)).index_add(0, index, values)[index]


def policy_loss(
    name: LossName,
    new: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: LevelName | None = None,
    segment_log_ratio: Tensor | None = None,
) -> PolicyLoss:
    r"""The loss of each train entry.

    With ratio ``r = exp(new - proximal)``:

    - ``grpo`` (arXiv:2402.03300, eq. 3), ``dr_grpo`` (arXiv:2503.20783), ``dapo`` (arXiv:2503.14476,
      eq. 8): ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, PPO's clipped surrogate; they differ
      in how tokens are averaged (`config.AVERAGING`), and DAPO clips higher than it clips low (0.28, 0.2).
    - ``gspo`` (arXiv:2507.18071, eq. 5 and 14): the same at the level of the sequence. Its ratios stay near
      1: clip at about 3e-4.
    - ``cispo`` (MiniMax-M1, arXiv:2506.13585, eq. 4): ``-sg(min(r, 1 + clip_high)) A new``: no token's
      gradient is dropped, only its weight is bounded. There is no lower clip.

    At the level of the sequence, the ratio is the geometric mean over an answer's tokens, ``s =
    exp(mean(log r))``, and its gradient is spread over them (GSPO-token), which is the gradient of ``s``
    where an answer's tokens weigh the same.

    Args:
        name: which one.
        new: log-probabilities under the policy in training, with gradient  [entries].
        proximal: under the policy before the update, without; NaN counts as equal to new  [entries].
        advantages: [entries].
        clip_low: the ratio is clipped below ``1 - clip_low``.
        clip_high: the ratio is clipped above ``1 + clip_high``.
        level: what the ratio is of; None: the loss's own, sequence for gspo and token for others.
        segment_log_ratio: sequence: mean log-ratio of each entry's answer, over all its tokens, also
            those that other pieces of the tree hold; no gradient  [entries].

    Returns:
        Losses, ratios and which entries were clipped.

    Raises:
        ValueError: the ratio is a sequence's and there is no ``segment_log_ratio``.
    """
    log_r = log_ratio(new, proximal)
    if (level or ("sequence" if name == "gspo" else "token")) == "sequence":
        if segment_log_ratio is None:
            raise ValueError(
                "a sequence's ratio needs segment_log_ratio, the mean log-ratio of each entry's answer"
            )
        # The segment's ratio in value, this token's share of its gradient.
        log_r = segment_log_ratio.detach() + (new - new.detach())
    ratio = log_r.exp()
    if name == "cispo":
        bounded = ratio.detach().clamp(max=1 + clip_high)
        return PolicyLoss(-bounded * advantages * new, ratio.detach(), ratio.detach() > 1 + clip_high)
    surrogate = ratio * advantages
    limited = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(-torch.minimum(surrogate, limited), ratio.detach(), (limited < surrogate).detach())


def token_weights(averaging: Averaging, rollouts: Tensor, *, length: int | None = None) -> Tensor:
    """Weights that make a sum over entries the average that a loss wants.

    - ``rollout``: mean over each rollout's tokens, then over rollouts.
    - ``token``: mean over all tokens, so that long rollouts weigh more.
    - ``constant``: sum over each rollout's tokens divided by one constant, then mean over rollouts: no
      rollout's tokens weigh less because it is long (Dr. GRPO, arXiv:2503.20783, section 3.2).

    Args:
        averaging: which.
        rollouts: number of each entry's rollout  [entries].
        length: the constant, in tokens; None: the length of the batch's longest rollout.

    Returns:
        Weights in float64  [entries].
    """
    if not len(rollouts):
        return torch.zeros(0, dtype=torch.float64)
    if averaging == "token":
        return torch.full((len(rollouts),), 1 / len(rollouts), dtype=torch.float64)
    _, index, lengths = torch.unique(rollouts, return_inverse=True, return_counts=True)
    count = len(lengths)
    if averaging == "constant":
        return torch.full((len(rollouts),), 1 / (count * (length or int(lengths.max()))), dtype=torch.float64)
    return 1 / (lengths[index].to(torch.float64) * count)

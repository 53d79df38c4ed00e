"""Log-probabilities of a tree's train entries.

Invariant: logits exist for the parents of train entries alone, and for one chunk of them at a time;
the backward pass computes a chunk's logits again.

The log-probability of a node is read at its parent's hidden state. Nodes are computed once, however
many entries they carry (on the path ``tree``; see `layout`); siblings share their parent's logits.

Each entry is a draw from softmax(logits / temperature) of its own temperature. Entries of one node and
several temperatures are several targets, and a parent has one row of logits for each temperature that it is
read at. At temperature 1 nothing is divided.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from art_core.errors import ConfigError
from art_core.training.head import frozen_head_logprobs
from art_core.training.layout import lay_out
from art_core.training.policy import Policy
from art_core.training.token_tree import TokenTree

CHUNK = 256
"""Hidden states that are turned into logits at a time."""


@dataclass(frozen=True, slots=True)
class EntryLogprobs:
    """What the policy thinks of a tree's entries.

    Attributes:
        logprob: log-probability of each entry's token, with gradient unless that is off  [entries].
        entropy: of the distribution that it was drawn from, in nats; with gradient only when that
            was asked for  [entries].
    """

    logprob: Tensor
    entropy: Tensor


def entry_logprobs(
    policy: Policy, tree: TokenTree, *, entropy_gradient: bool = False, chunk: int | None = None
) -> EntryLogprobs:
    """Run the policy, with the adapter that is active, over a tree.

    Args:
        policy: what runs.
        tree: whose entries are read.
        entropy_gradient: give the entropies a gradient, as an entropy bonus needs.
        chunk: hidden states whose logits exist at the same time; None: as many as are quick.

    Raises:
        ConfigError: a path is longer than the model can attend over.
    """
    device = policy.device
    check_length(policy, tree)
    heats, entry_heat = np.unique(tree.entries.temperature, return_inverse=True)
    # A target is a node at a temperature, a row a place at a temperature; each is one number here.
    targets, entry_target = np.unique(tree.entries.node * len(heats) + entry_heat, return_inverse=True)
    nodes, heat = np.divmod(targets, len(heats))
    layout = lay_out(tree, nodes, policy.path)
    rows_at, target_row = np.unique(layout.places * len(heats) + heat, return_inverse=True)
    places, row_heat = np.divmod(rows_at, len(heats))
    # Sorted by row, so that each chunk of rows owns a slice of the targets.
    order = np.argsort(target_row, kind="stable")
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    # All indices go to the device first: a copy that follows the model's pass would wait for it.
    columns = (places, tree.token_ids[nodes][order], back[entry_target], target_row[entry_target])
    at, tokens, own_target, own_row = (torch.from_numpy(c).to(device) for c in columns)
    read_at = torch.from_numpy(target_row[order])
    temperature = None
    if (heats != 1).any():
        temperature = torch.from_numpy(heats[row_heat]).to(device, torch.float32)
    rows = policy.states(layout)[at]
    if policy.head_weight is not None:
        logprob, entropy = frozen_head_logprobs(
            rows, policy.head_weight, read_at, tokens, temperature=temperature, chunk=chunk
        )
        entropy = entropy if entropy_gradient else entropy.detach()
    else:
        logprob, entropy = target_logprobs(
            policy.head,
            rows,
            read_at.to(device),
            tokens,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
            chunk=chunk or CHUNK,
        )
    return EntryLogprobs(logprob[own_target], entropy[own_row])


def check_length(policy: Policy, tree: TokenTree) -> None:
    """Refuse a tree with a path that the model cannot attend over.

    Raises:
        ConfigError: naming both lengths.
    """
    longest, limit = int(tree.depth.max()) + 1, policy.context_length
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a step has {longest} tokens, but this model attends over {limit} at most; lower max_model_len "
            "where it is served, or shorten the prompts"
        )


def target_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    rows: Tensor,
    tokens: Tensor,
    *,
    temperature: Tensor | None = None,
    entropy_gradient: bool = False,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of chosen tokens at chosen hidden states, through any head.

    A frozen linear head has a quicker way: `head.frozen_head_logprobs`. The projection runs in the model's
    type, the softmax in float32.

    Args:
        head: hidden states [n, width] to logits [n, vocabulary].
        hidden: [rows, width].
        rows: which row each target is read at, ascending  [targets].
        tokens: [targets].
        temperature: what each row's logits are divided by; None: nothing  [rows].
        entropy_gradient: give the entropies a gradient, too.
        chunk: rows whose logits exist at the same time.

    Returns:
        Log-probabilities [targets], with gradient; entropies [rows], without unless asked for.
    """
    if len(hidden) <= chunk:  # one chunk: its logits are kept, which saves computing them again
        return _chunk_logprobs(head, hidden, rows, tokens, temperature, entropy_gradient)
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    edges = torch.arange(0, len(hidden) + chunk, chunk, device=rows.device)
    bounds = torch.searchsorted(rows, edges).tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        part = hidden[i * chunk : (i + 1) * chunk]
        logprob, entropy = checkpoint(
            _chunk_logprobs,
            head,
            part,
            rows[start:end] - i * chunk,
            tokens[start:end],
            None if temperature is None else temperature[i * chunk : (i + 1) * chunk],
            entropy_gradient,
            use_reentrant=False,
        )
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    rows: Tensor,
    tokens: Tensor,
    temperature: Tensor | None,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    if temperature is not None:
        logits = logits / temperature[:, None]
    total = torch.logsumexp(logits, dim=-1)
    if entropy_gradient:
        entropy = _entropy(logits, total)
    else:
        with torch.no_grad():
            entropy = torch.special.entr((logits - total[:, None]).exp()).sum(-1)
    return logits[rows, tokens] - total[rows], entropy


def _entropy(logits: Tensor, total: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats, with a gradient that is finite everywhere.

    A token that a mask made impossible has logit -inf: it adds nothing, and 0 * inf must not appear in
    the gradient either.

    Args:
        logits: [rows, vocabulary].
        total: their logsumexp  [rows].
    """
    logprob = logits - total[:, None]
    return -(logprob.exp() * torch.where(torch.isfinite(logits), logprob, 0.0)).sum(-1)

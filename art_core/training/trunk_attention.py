"""Attention of trees with long trunks: the trunk by a dense kernel, the branches by FlexAttention.

Invariant: the result and its gradient are those of attention under the tree's whole mask.

A group's prompt is a trunk that every later token attends to in full. Those pairs are a rectangle without a
mask, most of an agent group's work, and dense kernels (cuDNN's, FlashAttention's) do it faster than any
block-sparse one. What a token sees in the trunk and what it sees in its own branch are two softmaxes; from
their log-sum-exps they are joined exactly (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867). In
the backward pass the dense kernel is given the joined output and log-sum-exp, so that its probabilities and
its row sums are those of the whole softmax, as in ring attention (Liu et al. 2023, arXiv:2310.01889).
"""

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from art_core.training.attention import KERNEL_OPTIONS, TreeMask
from art_core.training.attention_kernels import CANDIDATES, CHAINS, Chains, DenseKernel, chains_of
from art_core.training.token_tree import Ints

logger = logging.getLogger(__name__)

SHORTEST_TRUNK = 512
"""Shorter trunks are left to FlexAttention: a rectangle must be worth its kernel."""


class Root(NamedTuple):
    """One tree of the forest that a row of places is.

    Attributes:
        start: its first place.
        branch: the first place that is not in its trunk.
        end: one past its last place.
    """

    start: int
    branch: int
    end: int


def roots(exits: Ints) -> list[Root]:
    """The trees of a forest, and how far their trunks go.

    Args:
        exits: one past each place's last descendant  [places].
    """
    found: list[Root] = []
    start = 0
    while start < len(exits):
        end = int(exits[start])
        other = exits[start:end] != end
        branch = start + int(other.argmax()) if other.any() else end
        found.append(Root(start, branch, end))
        start = end
    return found


def rectangle_share(exits: Ints) -> float:
    """How much of all pairs that attend lies between branches and trunks long enough to be worth it."""
    pairs = float((exits - np.arange(len(exits))).sum())
    inside = sum((r.end - r.branch) * (r.branch - r.start) for r in roots(exits) if _worth_it(r))
    return inside / pairs


def _worth_it(root: Root) -> bool:
    return root.branch - root.start >= SHORTEST_TRUNK and root.end > root.branch


# -- which kernels are right here ---------------------------------------------------------------------------

_chosen: dict[tuple[Any, ...], DenseKernel | None] = {}
_chains_work: dict[tuple[Any, ...], bool] = {}


def dense_kernel(query: Tensor, key: Tensor) -> DenseKernel | None:
    """The fastest kernel that does these shapes right; None when there is none."""
    case = _case(query, key)
    if case not in _chosen:
        _chosen[case] = None
        for name, kernel in CANDIDATES.get(query.device.type, {}).items():
            wrong = _wrong(kernel, None, query, key)
            if wrong is None:
                also = _wrong(kernel, CHAINS[query.device.type], query, key)
                if also is not None:
                    logger.info("branches without branches are FlexAttention's: %s", also)
                _chains_work[case] = also is None
                logger.info("the trunks of token trees are attended to by the kernel %s", name)
                _chosen[case] = kernel
                break
            logger.info("the kernel %s does not serve for trunks: %s", name, wrong)
    return _chosen[case]


def _case(query: Tensor, key: Tensor) -> tuple[Any, ...]:
    return query.device.type, query.dtype, query.shape[1], key.shape[1], query.shape[-1]


def chains_kernel(query: Tensor, key: Tensor) -> DenseKernel | None:
    """The kernel for `Chains` of these shapes; None when it does not do them right."""
    dense_kernel(query, key)
    return CHAINS[query.device.type] if _chains_work.get(_case(query, key)) else None


@torch.no_grad()
def _wrong(kernel: DenseKernel, chains: DenseKernel | None, query: Tensor, key: Tensor) -> str | None:
    """What is wrong with kernels on a small case of these heads and types; None when nothing is."""
    generator = torch.Generator(query.device).manual_seed(0)

    def random(heads: int, places: int) -> Tensor:
        shape = (1, places, heads, query.shape[-1])
        return torch.randn(shape, generator=generator, device=query.device, dtype=query.dtype).transpose(1, 2)

    heads, shared = query.shape[1], key.shape[1]
    # The branches' places are no multiple of any number of slices.
    exits = np.concatenate([np.full(128, 387), np.full(128, 256), np.full(131, 387)])
    q, grad = random(heads, 387), random(heads, 387)
    k, v = random(shared, 387), random(shared, 387)
    matrix = TreeMask(exits, query.device).dense()
    try:
        with torch.enable_grad():
            leaves = [t.detach().float().requires_grad_() for t in (q, k, v)]
            wide = [t.repeat_interleave(heads // shared, dim=1) for t in leaves[1:]]
            expected = torch.nn.functional.scaled_dot_product_attention(leaves[0], *wide, attn_mask=matrix)
            expected.backward(grad.float())
            own = [t.detach().requires_grad_() for t in (q, k, v)]
            mask = TreeMask(exits, query.device)
            attend = TrunkAttention(mask, kernels=(kernel, chains), shortest=1)
            out = attend(own[0], own[1], own[2], query.shape[-1] ** -0.5)
            out.backward(grad)
    except Exception as failed:  # whatever a kernel raises, it only means that another one must do
        return f"{type(failed).__name__}: {str(failed).splitlines()[0] if str(failed) else ''}"
    limit = 0.03 if query.dtype in (torch.bfloat16, torch.float16) else 1e-4
    for name, a, b in (
        ("output", out, expected),
        *((f"gradient {i}", x.grad, y.grad) for i, (x, y) in enumerate(zip(own, leaves, strict=True))),
    ):
        if a is None or b is None:
            return f"{name}: missing"
        away = float((a.float() - b.float()).norm() / b.float().norm())
        if not away < limit:
            return f"{name} is {away:.2g} away, relative to its size"
    return None


# -- the whole -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tree:
    """A root, and who sees whom behind its trunk: `Chains`, else a `BlockMask` on CUDA or a matrix."""

    root: Root
    behind: Any


class TrunkAttention:
    """Attention under a tree's mask; see the module's docstring.

    Args:
        mask: who sees whom.
        kernels: for trunks and for chains; None: those that are right here.
        shortest: trunks of fewer places are left to FlexAttention; None: `SHORTEST_TRUNK`.
    """

    def __init__(
        self,
        mask: TreeMask,
        *,
        kernels: tuple[DenseKernel, DenseKernel | None] | None = None,
        shortest: int | None = None,
    ) -> None:
        shortest = SHORTEST_TRUNK if shortest is None else shortest
        self._mask = mask
        self._kernels = kernels
        parts: list[Root] = []
        for root in roots(mask.exits):
            long = root.branch - root.start >= shortest
            # Neighbours without a trunk are one forest to FlexAttention.
            if not long and parts and parts[-1].branch == parts[-1].start:
                parts[-1] = parts[-1]._replace(end=root.end)
            else:
                parts.append(root if long else root._replace(branch=root.start))
        self._parts = parts
        self._trees: list[_Tree] | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Shapes as in `attention.flex`."""
        if self._kernels is None:
            dense = dense_kernel(query, key)
            assert dense is not None  # whoever chose this attention has asked
            self._kernels = dense, chains_kernel(query, key)
        if self._trees is None:
            chains = self._kernels[1] is not None
            self._trees = [_Tree(part, _behind(self._mask, part, chains)) for part in self._parts]
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        return _Attention.apply(query, key, value, self._trees, self._kernels, scale, needs)


def _behind(mask: TreeMask, part: Root, chains: bool) -> Any:
    if part.branch == part.end:
        return None
    exits = mask.exits[part.branch : part.end] - part.branch
    found = chains_of(exits, mask.device) if chains else None
    if found is not None:
        return found
    own = TreeMask(exits, mask.device)
    return own.blocks() if mask.device.type == "cuda" else own.dense()


_compiled: dict[str, Any] = {}


def _maybe_compiled(name: str, function: Any, like: Tensor) -> Any:
    if like.device.type != "cuda":
        return function
    if name not in _compiled:
        _compiled[name] = torch.compile(function)
    return _compiled[name]


def _flex_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Any:
    out, aux = flex_attention(
        q,
        k,
        v,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=KERNEL_OPTIONS,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


def _dense_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Any:
    """The same where FlexAttention has no backward pass."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1).float() for t in (k, v))
    scores = (q.float() @ k.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v).to(q.dtype), lse


def _join(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two softmaxes over disjoint keys as one  [1, heads, n, width], [1, heads, n]."""
    lse = torch.logaddexp(a_lse.float(), b_lse.float())
    out = a.float() * (a_lse - lse).exp()[..., None] + b.float() * (b_lse - lse).exp()[..., None]
    return out.to(a.dtype), lse


def _part_gradients(
    grad: Tensor, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of one of the two softmaxes and of its log-sum-exp, from that of the whole."""
    weight = (part_lse - lse).exp()[..., None]
    wide = grad.float()
    through = (wide * (part.float() - out.float())).sum(-1)
    return (wide * weight).to(grad.dtype), through * weight[..., 0]


def _like(t: Tensor) -> Tensor:
    """Room for a gradient, in the strides that compiled layers expect: others they copy.

    A compiled function's own outputs, of one row, may have any stride from row to row.
    """
    rows, heads, n, width = t.shape
    return t.new_empty(rows, n, heads, width).transpose(1, 2)


class _Attention(torch.autograd.Function):
    """All trees of a row.

    What FlexAttention's backward needs is kept by its own graph; the other kernels are given the joined
    output and log-sum-exp.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        trees: list[_Tree],
        kernels: tuple[DenseKernel, DenseKernel | None],
        scale: float,
        needs: bool,
    ) -> Tensor:
        dense, chains = kernels
        flex = _flex_with_lse if q.device.type == "cuda" else _dense_with_lse
        flex = _maybe_compiled("flex", flex, q)
        join = _maybe_compiled("join", _join, q)
        out = _like(q)
        kept: list[Any] = []
        for tree in trees:
            start, branch, end = tree.root
            trunk = inner = lse = seen_kept = own_kept = None
            if branch > start:
                parts = [t[:, :, start:branch] for t in (q, k, v)]
                found, found_lse, trunk_kept = dense.forward(*parts, True, scale)
                out[:, :, start:branch] = found
                trunk = found_lse, trunk_kept
            if tree.behind is not None:
                parts = [t[:, :, branch:end] for t in (q, k, v)]
                if isinstance(tree.behind, Chains):
                    assert chains is not None
                    found, lse, own_kept = chains.forward(*parts, tree.behind, scale)
                else:
                    leaves = [t.detach().requires_grad_(needs) for t in parts]
                    with torch.set_grad_enabled(needs):
                        own, own_lse = flex(*leaves, tree.behind, scale)
                    inner = (leaves, own, own_lse) if needs else None
                    found, lse = own.detach(), own_lse.detach()
                if branch > start:
                    seen, seen_lse, seen_kept = dense.forward(
                        parts[0], k[:, :, start:branch], v[:, :, start:branch], False, scale
                    )
                    found, lse = join(seen, seen_lse, found, lse)
                out[:, :, branch:end] = found
            kept.append((trunk, inner, lse, seen_kept, own_kept) if needs else None)
        if needs:
            ctx.save_for_backward(q, k, v, out)
            ctx.kept, ctx.trees, ctx.kernels, ctx.scale = kept, trees, kernels, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, v, out = ctx.saved_tensors
        dense, chains = ctx.kernels
        scale: float = ctx.scale
        share = _maybe_compiled("share", _part_gradients, q)
        dq, dk, dv = (_like(t) for t in (q, k, v))
        kept, ctx.kept = ctx.kept, None
        for i, tree in enumerate(ctx.trees):
            start, branch, end = tree.root
            trunk, inner, lse, seen_kept, own_kept = kept[i]
            kept[i] = None
            before, after = slice(start, branch), slice(branch, end)
            if trunk is not None:
                parts = [t[:, :, before] for t in (q, k, v, out)]
                found = dense.backward(grad[:, :, before], *parts, *trunk, True, scale)
                for whole, part in zip((dq, dk, dv), found, strict=True):
                    whole[:, :, before] = part
            if tree.behind is None:
                continue
            by, queries, keys, values, result = (t[:, :, after] for t in (grad, q, k, v, out))
            if inner is None:
                assert chains is not None
                found = chains.backward(by, queries, keys, values, result, lse, own_kept, tree.behind, scale)
            elif trunk is None:
                found = torch.autograd.grad(inner[1], inner[0], by)
            else:
                leaves, own, own_lse = inner
                gradients = share(by, result, lse, own.detach(), own_lse.detach())
                found = torch.autograd.grad((own, own_lse), leaves, gradients)
            if trunk is not None:
                seen = dense.backward(
                    by, queries, k[:, :, before], v[:, :, before], result, lse, seen_kept, False, scale
                )
                torch.add(found[0], seen[0], out=dq[:, :, after])
                dk[:, :, before] += seen[1]
                dv[:, :, before] += seen[2]
            else:
                dq[:, :, after] = found[0]
            dk[:, :, after] = found[1]
            dv[:, :, after] = found[2]
        return dq, dk, dv, None, None, None, None

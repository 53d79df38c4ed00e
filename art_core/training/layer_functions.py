"""One decoder layer of Llama's shape: its weights, and plain functions of them.

Invariant: a function gives what transformers' module and PEFT's adapter give, to the precision of the type.

`layer_weights` reads a module under its active adapter. The functions lead from one layer's attention to the
next one's; attention itself is the caller's. Down-projections of adapters that read the same input run as one
matrix product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import lookup_backend
from torch._functorch import config as functorch_config


class Projection(NamedTuple):
    """A linear layer with its adapter.

    Attributes:
        weight: [out, in].
        bias: [out], or None.
        a: the adapter's first matrix  [rank, in]; None without an adapter.
        b: its second  [out, rank].
        scale: of what the adapter adds.
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    scale: float


class Layer(NamedTuple):
    """One decoder layer's weights.

    Attributes:
        q, k, v, o, gate, up, down: its projections.
        first_norm: before attention  [width].
        second_norm: before the MLP  [width].
        q_norm, k_norm: of each head (Qwen3)  [head width]; None elsewhere.
        eps: of the norms.
        head_dim: width of a head.
    """

    q: Projection
    k: Projection
    v: Projection
    o: Projection
    gate: Projection
    up: Projection
    down: Projection
    first_norm: Tensor
    second_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    head_dim: int


def layer_weights(module: Any) -> Layer:
    """A decoder layer's weights under the adapter that is active now."""
    attention, feed = module.self_attn, module.mlp
    return Layer(
        *(_projection(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(_projection(getattr(feed, name)) for name in ("gate_proj", "up_proj", "down_proj")),
        first_norm=module.input_layernorm.weight,
        second_norm=module.post_attention_layernorm.weight,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        eps=module.input_layernorm.variance_epsilon,
        head_dim=attention.head_dim,
    )


def _projection(linear: Any) -> Projection:
    base = getattr(linear, "base_layer", linear)
    a = b = None
    scale = 1.0
    if base is not linear and not linear.disable_adapters:
        (name,) = linear.active_adapters
        if name in linear.lora_A:
            a, b = linear.lora_A[name].weight, linear.lora_B[name].weight
            scale = float(linear.scaling[name])
    return Projection(base.weight, base.bias, a, b, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves rotated against each other.

    Args:
        x: [rows, n, heads, width].
        cos: [rows, n, 1, width].
        sin: [rows, n, 1, width].
    """
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def project(x: Tensor, projections: tuple[Projection, ...], exact: bool) -> list[Tensor]:
    """Several linear layers of one input, adapters included.

    Args:
        x: [n, in].
        projections: what to apply.
        exact: compute adapters in float32.

    Returns:
        [n, out] each.
    """
    kind = torch.float32 if exact else x.dtype
    adapted = [p.a for p in projections if p.a is not None]
    inner: list[Tensor] = []
    if adapted:
        down = F.linear(
            x.to(kind), torch.cat([a.to(kind) for a in adapted]) if adapted[1:] else adapted[0].to(kind)
        )
        inner = list(down.split([len(a) for a in adapted], dim=-1))
    found: list[Tensor] = []
    for p in projections:
        y = F.linear(x, p.weight, p.bias)
        if p.a is not None and p.b is not None:
            added = inner.pop(0) @ p.b.to(kind).t()
            y = (y + added * p.scale).to(x.dtype)
        found.append(y)
    return found


def before_attention(
    x: Tensor, cos: Tensor, sin: Tensor, layer: Layer, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, projections and rotation.

    Args:
        x: [rows, n, width].
        cos: [rows, n, 1, head width].
        sin: [rows, n, 1, head width].
        layer: weights.
        exact: compute adapters in float32.

    Returns:
        Queries, keys, values  [rows, heads, n, head width].
    """
    rows, n, width = x.shape
    normed = rms_norm(x, layer.first_norm, layer.eps).view(rows * n, width)
    q, k, v = (
        y.view(rows, n, -1, layer.head_dim) for y in project(normed, (layer.q, layer.k, layer.v), exact)
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, layer.eps), rms_norm(k, layer.k_norm, layer.eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def after_attention(x: Tensor, attended: Tensor, layer: Layer, exact: bool) -> Tensor:
    """Output projection and residual.

    Args:
        x: the layer's input  [rows, n, width].
        attended: [rows, heads, n, head width].
        layer: weights.
        exact: compute adapters in float32.
    """
    rows, n, width = x.shape
    flat = attended.transpose(1, 2).reshape(rows * n, -1)
    return x + project(flat, (layer.o,), exact)[0].view(rows, n, width)


def mlp(x: Tensor, layer: Layer, exact: bool) -> Tensor:
    """Norm, gated MLP and residual  [rows, n, width]."""
    rows, n, width = x.shape
    normed = rms_norm(x, layer.second_norm, layer.eps).view(rows * n, width)
    gate, up = project(normed, (layer.gate, layer.up), exact)
    return x + project(F.silu(gate) * up, (layer.down,), exact)[0].view(rows, n, width)


def between_attentions(
    x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor, layer: Layer, following: Layer, exact: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From one layer's attention to the next one's: that layer's input, queries, keys and values."""
    x = mlp(after_attention(x, attended, layer, exact), layer, exact)
    return x, *before_attention(x, cos, sin, following, exact)


def after_last_attention(x: Tensor, attended: Tensor, layer: Layer, exact: bool) -> Tensor:
    """The rest of the last layer."""
    return mlp(after_attention(x, attended, layer, exact), layer, exact)


@dataclass(frozen=True, slots=True)
class LayerFunctions:
    """The functions of a layer, compiled or as they are; each call has a price, so long ones are better."""

    before: Callable[..., tuple[Tensor, Tensor, Tensor]]
    after: Callable[..., Tensor]
    mlp: Callable[..., Tensor]
    between: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    last: Callable[..., Tensor]


PLAIN = LayerFunctions(before_attention, after_attention, mlp, between_attentions, after_last_attention)
_compiled: list[LayerFunctions] = []


def compiled_functions() -> LayerFunctions:
    """The functions under `torch.compile`, one set for the process."""
    if not _compiled:
        compiler = keeping_little("inductor")
        _compiled.append(
            LayerFunctions(
                torch.compile(before_attention, backend=compiler),
                torch.compile(after_attention, backend=compiler),
                torch.compile(mlp, backend=compiler),
                torch.compile(between_attentions, backend=compiler),
                torch.compile(after_last_attention, backend=compiler),
            )
        )
    return _compiled[0]


def keeping_little(backend: str) -> Callable[[Any, Any], Any]:
    """A compiler that keeps no more for the backward pass than what is dear to compute again.

    By itself it also keeps what a cheap kernel could give again when a matrix product reads it there: the
    MLP's gated activation, and the outputs of norms, a third of all that a layer keeps.

    Args:
        backend: a compiler of ``torch.compile``, such as ``inductor``.
    """

    def compiler(graph: Any, inputs: Any) -> Any:
        with functorch_config.patch(ban_recompute_materialized_backward=False):
            return lookup_backend(backend)(graph, inputs)

    return compiler

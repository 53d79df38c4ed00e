"""A faster decoder for models of Llama's shape: the same weights and the same function, in fewer kernels.

Invariant: hidden states and gradients are those of transformers' modules with PEFT's adapters, to the
precision of the type; what this module does not know, it refuses by name, and the modules run instead.

Plain functions over a layer's weights lead from one layer's attention to the next one's. On CUDA they are
compiled once for all layers, so that norms, rotary embedding, activation, adapter and residual become a few
kernels; attention runs between them by itself. Down-projections of adapters that read the
same input run as one matrix product. Adapters are held in float32 and computed in the type of the model,
as under autocast, unless `compute` is float32.

With checkpointing a layer keeps its input alone. Its backward pass computes the layer again: attention as a
whole, the MLP in tiles of nodes, so that its wide activations exist for one tile at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from art_core.errors import ConfigError
from art_core.training.kept_inputs import KeptInputs

KNOWN_MODELS = frozenset({"llama", "qwen2", "qwen3", "mistral"})
"""Model types of transformers whose layers this module computes."""

TILE = 4096
"""Nodes whose MLP activations exist at the same time under checkpointing."""

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Queries [rows, heads, n, width], keys, values, scale -> [rows, heads, n, width]."""


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
        _compiled.append(
            LayerFunctions(
                torch.compile(before_attention),
                torch.compile(after_attention),
                torch.compile(mlp),
                torch.compile(between_attentions),
                torch.compile(after_last_attention),
            )
        )
    return _compiled[0]


class FusedDecoder:
    """Runs a model's decoder layers by this module's functions.

    Args:
        model: a causal language model of transformers, whose linear layers may carry PEFT adapters.
        compile: compile the functions; None: on CUDA only.
        exact: compute adapters in float32, as PEFT does without autocast.

    Raises:
        ConfigError: the model has something that this module does not know; the message says what.
    """

    def __init__(self, model: Any, *, compile: bool | None = None, exact: bool = False) -> None:
        self._decoder = model.get_decoder()
        check_supported(model)
        if compile is None:
            compile = next(model.parameters()).device.type == "cuda"
        self._functions = compiled_functions() if compile else PLAIN
        self._exact = exact

    def run(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, *, checkpointing: bool = False
    ) -> Tensor:
        """Hidden states after the last norm.

        Args:
            token_ids: [rows, n].
            positions: [rows, n].
            attend: who sees whom.
            checkpointing: keep the layers' inputs alone and compute the rest again in backward.

        Returns:
            [rows, n, width].
        """
        decoder = self._decoder
        # The input always has a gradient, so that all layers are one case to the compiler.
        x = decoder.embed_tokens(token_ids).detach().requires_grad_(torch.is_grad_enabled())
        cos, sin = decoder.rotary_emb(x, position_ids=positions)
        cos, sin = cos[:, :, None], sin[:, :, None]
        if checkpointing and torch.is_grad_enabled():
            kept = KeptInputs(x, len(decoder.layers))
            for module in decoder.layers:
                layer = layer_weights(module)
                scale = module.self_attn.scaling
                step = _Step(self._functions, layer, cos, sin, attend, scale, self._exact)
                # Parameters are reached through `step`; the input ties it to the graph.
                x = _Checkpointed.apply(x, step, kept)
        else:
            x = self._straight(x, cos, sin, attend)
        return decoder.norm(x)

    def _straight(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """All layers, in one call from attention to attention."""
        run, exact = self._functions, self._exact
        layers = [layer_weights(module) for module in self._decoder.layers]
        scales = [module.self_attn.scaling for module in self._decoder.layers]
        q, k, v = run.before(x, cos, sin, layers[0], exact)
        for i, layer in enumerate(layers[:-1]):
            attended = attend(q, k, v, scales[i])
            x, q, k, v = run.between(x, attended, cos, sin, layer, layers[i + 1], exact)
        return run.last(x, attend(q, k, v, scales[-1]), layers[-1], exact)


@dataclass(frozen=True, slots=True)
class _Step:
    """One layer in one forward pass."""

    functions: LayerFunctions
    layer: Layer
    cos: Tensor
    sin: Tensor
    attend: Attend
    scale: float
    exact: bool

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.functions.before(x, self.cos, self.sin, self.layer, self.exact)
        return self.functions.after(x, self.attend(q, k, v, self.scale), self.layer, self.exact)

    def mlp(self, x: Tensor) -> Tensor:
        return self.functions.mlp(x, self.layer, self.exact)


class _Checkpointed(torch.autograd.Function):
    """A layer whose backward pass computes it again; see the module's docstring.

    Gradients of adapters are added to ``.grad`` while it runs, as in reentrant checkpointing, so
    ``torch.autograd.grad`` with respect to them finds nothing and says so.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: _Step, kept: KeptInputs) -> Tensor:  # type: ignore[override]
        ctx.kept, ctx.number = kept, kept.put(x)
        ctx.step = step
        hidden = step.attention(x)
        return torch.cat([step.mlp(tile) for tile in hidden.split(_tile(hidden), dim=1)], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        x = ctx.kept.take(ctx.number)
        step: _Step = ctx.step
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            hidden = step.attention(x)
        parts: list[Tensor] = []
        tile = _tile(hidden)
        for part, grad_part in zip(hidden.detach().split(tile, dim=1), grad.split(tile, dim=1), strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                out = step.mlp(leaf)
            torch.autograd.backward(out, grad_part)
            parts.append(leaf.grad)  # type: ignore[arg-type]
        torch.autograd.backward(hidden, torch.cat(parts, dim=1) if parts[1:] else parts[0])
        return x.grad, None, None


def _tile(hidden: Tensor) -> int:
    """Even tiles of at most `TILE` nodes, all rows counted."""
    rows, n, _ = hidden.shape
    tiles = -(-rows * n // TILE)
    return -(-n // tiles)


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


_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def check_supported(model: Any) -> None:
    """Refuse a model with parts that this module does not compute.

    Raises:
        ConfigError: naming the part.
    """
    config: Any = model.config
    if config.model_type not in KNOWN_MODELS:
        raise ConfigError(
            f"fused kernels know {', '.join(sorted(KNOWN_MODELS))}, not {config.model_type!r}; "
            "the model's own modules can run instead (kernels='modules')"
        )
    if config.hidden_act != "silu":
        raise ConfigError(f"fused kernels know the activation silu, not {config.hidden_act!r}")
    for module in model.get_decoder().layers:
        for part, known in (
            (module, _LAYER_PARTS),
            (module.self_attn, _ATTENTION_PARTS),
            (module.mlp, _MLP_PARTS),
        ):
            unknown = {name for name, _ in part.named_children()} - known
            if unknown:
                raise ConfigError(f"fused kernels do not know a layer's {', '.join(sorted(unknown))}")
        for linear in module.modules():
            base = getattr(linear, "base_layer", None)
            if base is None:
                continue
            if type(base) is not torch.nn.Linear:
                raise ConfigError(f"fused kernels know plain linear layers, not {type(base).__name__}")
            if linear.lora_variant or any(linear.lora_bias.values()) or linear.merged:
                raise ConfigError("fused kernels know plain LoRA: no DoRA, no bias, not merged")

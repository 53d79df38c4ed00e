"""A faster decoder for models of Llama's shape: the same weights and the same function, in fewer kernels.

Invariant: hidden states and gradients are those of transformers' modules with PEFT's adapters, to the
precision of the type; what this module does not know, it refuses by name, and the modules run instead.

The functions of `layer_functions` lead from one layer's attention to the next one's. On CUDA they are
compiled once for all layers, so that norms, rotary embedding, activation, adapter and residual become a few
kernels; attention runs between them by itself. Adapters are held in float32 and computed in the type of the
model, as under autocast, unless `exact` asks for float32.

With checkpointing a layer keeps its input alone. Its backward pass computes the layer again: attention as a
whole, the MLP in tiles of nodes, so that its wide activations exist for one tile at a time.

Weights of a sharded model are gathered around their use (`gathered`), forward and backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from art_core.errors import ConfigError
from art_core.training.gathered import Gathered
from art_core.training.kept_inputs import KeptInputs
from art_core.training.layer_functions import PLAIN, Layer, LayerFunctions, compiled_functions

KNOWN_MODELS = frozenset({"llama", "qwen2", "qwen3", "mistral"})
"""Model types of transformers whose layers this module computes."""

TILE = 4096
"""Nodes whose MLP activations exist at the same time under checkpointing."""

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Queries [rows, heads, n, width], keys, values, scale -> [rows, heads, n, width]."""


class FusedDecoder:
    """Runs a model's decoder layers by the functions of `layer_functions`.

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
        self._layers = Gathered(self._decoder.layers)

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
            kept = KeptInputs(x, len(self._layers))
            for number in range(len(self._layers)):
                scale = self._layers.scale(number)
                step = _Step(self._functions, self._layers, number, cos, sin, attend, scale, self._exact)
                # Parameters are reached through `step`; the input ties it to the graph.
                x = _Checkpointed.apply(x, step, kept)
        else:
            x = self._straight(x, cos, sin, attend)
        return decoder.norm(x)

    def _straight(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """All layers, in one call from attention to attention."""
        run, exact, layers = self._functions, self._exact, self._layers
        last = len(layers) - 1
        layers.before_backward([x], lambda: layers.release(0))
        layers.hold(0, 1)
        q, k, v = run.before(x, cos, sin, layers.weights(0), exact)
        layers.before_backward([q, k, v], lambda: self._turn(0))
        for i in range(last):
            attended = attend(q, k, v, layers.scale(i))
            layers.hold(i + 1, i + 2)
            x, q, k, v = run.between(x, attended, cos, sin, layers.weights(i), layers.weights(i + 1), exact)
            layers.before_backward([x, q, k, v], partial(self._turn, i + 1))
            layers.release(i)
        x = run.last(x, attend(q, k, v, layers.scale(last)), layers.weights(last), exact)
        layers.before_backward([x], lambda: layers.hold(last, last - 1))
        layers.release(last)
        return x

    def _turn(self, number: int) -> None:
        """Backward has come to the call that made this layer's queries: the layer above is done."""
        self._layers.release(number + 1)
        if number:
            self._layers.hold(number - 1, number - 2)


@dataclass(frozen=True, slots=True)
class _Step:
    """One layer in one forward pass."""

    functions: LayerFunctions
    layers: Gathered
    number: int
    cos: Tensor
    sin: Tensor
    attend: Attend
    scale: float
    exact: bool

    def attention(self, x: Tensor, layer: Layer) -> Tensor:
        q, k, v = self.functions.before(x, self.cos, self.sin, layer, self.exact)
        return self.functions.after(x, self.attend(q, k, v, self.scale), layer, self.exact)

    def mlp(self, x: Tensor, layer: Layer) -> Tensor:
        return self.functions.mlp(x, layer, self.exact)


class _Checkpointed(torch.autograd.Function):
    """A layer whose backward pass computes it again; see the module's docstring.

    Gradients of adapters are added to ``.grad`` while it runs, as in reentrant checkpointing, so
    ``torch.autograd.grad`` with respect to them finds nothing and says so.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: _Step, kept: KeptInputs) -> Tensor:  # type: ignore[override]
        ctx.kept, ctx.number = kept, kept.put(x)
        ctx.step = step
        with step.layers.held(step.number, step.number + 1) as layer:
            hidden = step.attention(x, layer)
            return torch.cat([step.mlp(tile, layer) for tile in hidden.split(_tile(hidden), dim=1)], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        x = ctx.kept.take(ctx.number)
        step: _Step = ctx.step
        with step.layers.held(step.number, step.number - 1) as layer:
            return _again(step, layer, x, grad), None, None


def _again(step: _Step, layer: Layer, x: Tensor, grad: Tensor) -> Tensor | None:
    """Compute a layer again, and go backward through it; returns the gradient of its input."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        hidden = step.attention(x, layer)
    parts: list[Tensor] = []
    tile = _tile(hidden)
    for part, grad_part in zip(hidden.detach().split(tile, dim=1), grad.split(tile, dim=1), strict=True):
        with torch.enable_grad():
            leaf = part.detach().requires_grad_()
            out = step.mlp(leaf, layer)
        torch.autograd.backward(out, grad_part)
        parts.append(leaf.grad)  # type: ignore[arg-type]
    torch.autograd.backward(hidden, torch.cat(parts, dim=1) if parts[1:] else parts[0])
    return x.grad


def _tile(hidden: Tensor) -> int:
    """Even tiles of at most `TILE` nodes, all rows counted."""
    rows, n, _ = hidden.shape
    tiles = -(-rows * n // TILE)
    return -(-n // tiles)


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

"""What a compiled layer keeps between forward and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from art_core.training.layer_functions import Layer, Projection, keeping_little, mlp

WIDTH, INNER, NODES = 32, 128, 64
BACKEND = "aot_eager_decomp_partition"
"""Divides a graph as Inductor does, without the minutes that its code takes to compile."""


@pytest.fixture
def layer() -> Layer:
    torch.manual_seed(0)

    def projection(wide_in: int, wide_out: int) -> Projection:
        a, b = (torch.randn(4, wide_in), torch.randn(wide_out, 4))
        return Projection(
            torch.randn(wide_out, wide_in), None, a.requires_grad_(), b.requires_grad_(), scale=0.5
        )

    square = projection(WIDTH, WIDTH)
    return Layer(
        q=square,
        k=square,
        v=square,
        o=square,
        gate=projection(WIDTH, INNER),
        up=projection(WIDTH, INNER),
        down=projection(INNER, WIDTH),
        first_norm=torch.rand(WIDTH),
        second_norm=torch.rand(WIDTH),
        q_norm=None,
        k_norm=None,
        eps=1e-6,
        head_dim=16,
    )


def run(function: Callable[..., Tensor], layer: Layer) -> tuple[float, list[Tensor]]:
    """Numbers that are kept for each node, and the gradients."""
    torch.compiler.reset()
    torch.manual_seed(1)
    x = torch.randn(1, NODES, WIDTH, requires_grad=True)
    leaves = [x, *(t for p in (layer.gate, layer.up, layer.down) for t in (p.a, p.b) if t is not None)]
    given = {t.untyped_storage().data_ptr() for t in (*leaves, *(p.weight for p in layer[:7]))}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = function(x, layer, False)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    numbers = sum(size for at, size in kept.items() if at not in given) / x.element_size()
    return numbers / NODES, list(gradients)


def test_a_compiled_mlp_keeps_two_wide_activations_where_the_compiler_alone_keeps_three(layer: Layer) -> None:
    by_itself, _ = run(torch.compile(mlp, backend=BACKEND), layer)
    kept, gradients = run(torch.compile(mlp, backend=keeping_little(BACKEND)), layer)
    assert by_itself > 3 * INNER
    assert kept < 2.5 * INNER
    _, expected = run(mlp, layer)
    for ours, plain in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)

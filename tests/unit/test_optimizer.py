"""One optimizer's state on whatever machine goes on with it."""

import copy
from typing import Any

import pytest
import torch

from art_core.training.optimizer import Optimizer


def stepped(optimizer: Optimizer, times: int) -> list[torch.Tensor]:
    for i in range(times):
        for n, parameter in enumerate(optimizer.parameters):
            parameter.grad = torch.full_like(parameter, 0.3 * (i + 1) - 0.2 * n)
        optimizer.step(0.1, optimizer.grad_norm())
    return [p.detach().clone() for p in optimizer.parameters]


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 5)]


@pytest.mark.parametrize("fused", [True, None, False])
@pytest.mark.parametrize("offload", [False, True])
def test_a_state_goes_on_here_however_another_machine_computed_it(fused: bool | None, offload: bool):
    first = Optimizer(parameters(), weight_decay=0.1, max_grad_norm=0.5)
    stepped(first, 3)
    state = copy.deepcopy(first.state_dict())  # as from a file
    written: list[dict[str, Any]] = [{**g, "fused": fused} for g in state["adamw"]["param_groups"]]
    resumed = Optimizer(
        [torch.nn.Parameter(p.detach().clone()) for p in first.parameters],
        weight_decay=0.1,
        max_grad_norm=0.5,
        offload=offload,
    )
    resumed.load_state_dict({**state, "adamw": {**state["adamw"], "param_groups": written}})
    assert [g["fused"] for g in resumed.state_dict()["adamw"]["param_groups"]] == [None]
    for mine, theirs in zip(stepped(resumed, 2), stepped(first, 2), strict=True):
        assert torch.equal(mine, theirs)
    assert resumed.updates == first.updates == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_goes_on_from_the_state_of_a_cpu_and_the_other_way_round():
    here = Optimizer(parameters(), weight_decay=0.1, max_grad_norm=0.5)
    there = Optimizer([torch.nn.Parameter(p.detach().cuda()) for p in here.parameters], weight_decay=0.1,
                      max_grad_norm=0.5)  # fmt: skip
    stepped(here, 3)
    for mine, theirs in zip(here.parameters, there.parameters, strict=True):
        theirs.data.copy_(mine.data)
    there.load_state_dict(copy.deepcopy(here.state_dict()))
    # The GPU's kernel reckons the bias correction, 1 - 0.999^t, in float32: 1e-4 of a step of 0.1. Another
    # number of steps, or moments that were lost, would make a tenth of one.
    for mine, theirs in zip(stepped(here, 2), stepped(there, 2), strict=True):
        assert torch.allclose(mine, theirs.cpu(), rtol=0, atol=1e-4)
    assert there.state_dict()["adamw"]["param_groups"][0]["fused"] is True
    here.load_state_dict(copy.deepcopy(there.state_dict()))
    for mine, theirs in zip(stepped(here, 2), stepped(there, 2), strict=True):
        assert torch.allclose(mine, theirs.cpu(), rtol=0, atol=1e-4)

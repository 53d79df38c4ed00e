"""Fused kernels over sharded layers, in two processes on gloo: gradients, and what lies whole meanwhile."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from helpers.ranks import tiny_policy
from torch import Tensor
from torch.distributed.tensor import DTensor

from art_core.training import attention
from art_core.training.distributed import join, leave, shard
from art_core.training.gathered import Gathered
from art_core.training.kernels import FusedDecoder
from art_core.training.layer_functions import PLAIN, LayerFunctions, keeping_little
from art_core.training.rank import Place

BACKEND = "aot_eager_decomp_partition"
"""Divides a graph as Inductor does, without the minutes that its code takes to compile."""
PROCESSES = 2


class Watched(Gathered):
    """Notes how many layers lie whole whenever one has been gathered."""

    def __init__(self, layers: Any) -> None:
        super().__init__(layers)
        self.most = 0
        self.order: list[int] = []

    def whole(self) -> int:
        return sum(not isinstance(self.weights(i).gate.weight, DTensor) for i in range(len(self)))

    def hold(self, number: int, following: int) -> None:
        super().hold(number, following)
        self.order.append(number)
        self.most = max(self.most, self.whole())


def compiled() -> LayerFunctions:
    """The functions, divided into forward and backward as on a GPU."""
    compiler = keeping_little(BACKEND)
    return LayerFunctions(
        *(torch.compile(getattr(PLAIN, name), backend=compiler) for name in PLAIN.__slots__)
    )


def largest(tensors: Iterable[Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors)


def differences(model: Path, scratch: Path) -> list[dict[str, Any]]:
    """Fused kernels over sharded weights against those over whole ones: a record for each way and rank.

    Raises:
        Exception: what a process raised.
    """
    mp.spawn(_rank, (str(model), str(scratch)), nprocs=PROCESSES)
    return [record for rank in range(PROCESSES) for record in json.loads((scratch / f"{rank}").read_text())]


def _rank(rank: int, model: str, scratch: str) -> None:
    torch.set_num_threads(1)
    place = Place(rank, PROCESSES, Path(scratch) / "rendezvous", timeout=60)
    _, device = join(place, "fsdp2")
    policy = tiny_policy(Path(model), Path(scratch) / "no-faults")("cpu")
    parameters = policy.trainable_parameters()
    lm: Any = policy.model.get_base_model()
    # Different inputs and lengths on each rank, as pieces of a tree have.
    dice = torch.Generator().manual_seed(rank)
    ids = torch.randint(5, 200, (1, 7 + 6 * rank), generator=dice)
    at = torch.arange(ids.shape[1])[None]

    def gradients(decoder: FusedDecoder, checkpointing: bool, between: Any = None) -> list[Tensor]:
        hidden = decoder.run(ids, at, attention.causal, checkpointing=checkpointing)
        if between is not None:
            between()
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        found = [p.grad.clone() for p in parameters if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return found

    expected = gradients(FusedDecoder(lm), False)
    with torch.no_grad():
        states = FusedDecoder(lm).run(ids, at, attention.causal)
    shard(policy, device)
    records: list[dict[str, Any]] = []
    for functions in (PLAIN, compiled()):
        for checkpointing in (False, True):
            decoder: Any = FusedDecoder(lm)
            decoder._functions = functions
            decoder._layers = watched = Watched(lm.get_decoder().layers)
            after_forward: list[int] = []
            # Twice: what is kept of the first pass must not be what the second one computes with.
            for _ in range(2):
                found = gradients(decoder, checkpointing, lambda: after_forward.append(watched.whole()))  # noqa: B023
            with torch.no_grad():
                alone = decoder.run(ids, at, attention.causal)
            records.append(
                {
                    "compiled": functions is not PLAIN,
                    "checkpointing": checkpointing,
                    "gradients": len(found),
                    "expected": len(expected),
                    "difference": max(
                        float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)
                    ),
                    "largest": max(float(g.abs().max()) for g in expected),
                    "states": float((alone - states).abs().max()),
                    "most": watched.most,
                    "after_forward": max(after_forward),
                    "after_backward": watched.whole(),
                    "order": watched.order,
                }
            )
    (Path(scratch) / f"{rank}").write_text(json.dumps(records))
    leave()

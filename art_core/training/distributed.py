"""A process group of ranks, and a model that is sharded over it.

Invariant: gradients are sums over ranks, never averages: each token's weight is that of the whole step,
so the sum is one process's gradient, however unevenly the pieces were dealt.

`join` forms the group through accelerate, which picks backend and device. With ``ddp`` every rank holds the
model, and one sum of the accumulated gradients is all that they exchange; torch's own wrapper would average,
and would wait for every pass of every rank. With ``fsdp2`` each decoder layer's frozen weights are spread
over the ranks (`shard`) and gathered while the layer runs.

accelerate's own FSDP2 preparation is not used: it shards embedding and head too, which here run apart from
the decoder and a different number of times on each rank, so that their gathering would never meet.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from art_core.config import Strategy
from art_core.errors import ConfigError
from art_core.training.policy import Policy
from art_core.training.rank import Place
from art_core.training.ranks import Alone, Ranks
from art_core.training.unsloth_policy import UnslothPolicy

BUCKET = 1 << 26
"""Most gradient values that are summed at a time: 256 MiB of float32."""


def join(place: Place, strategy: Strategy) -> tuple[Ranks, torch.device]:
    """Form the process group; returns the ranks and this one's device. One rank alone needs none."""
    if place.size == 1:
        return Alone(), torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    os.environ |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_WORLD_SIZE": str(place.size),
    }
    cpu = not torch.cuda.is_available()
    state = PartialState(
        cpu=cpu,
        backend="gloo" if cpu else "nccl",
        init_method=f"file://{place.rendezvous}",
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=place.timeout),
    )
    device = torch.device(state.device or "cpu")
    return Group(device, sharded=strategy == "fsdp2"), device


def leave() -> None:
    """Take the process group down."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Group:
    """The ranks of the default process group.

    Args:
        device: where tensors must lie to be exchanged.
        sharded: whether the model is spread over the ranks.
    """

    def __init__(self, device: torch.device, *, sharded: bool) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.sharded = sharded
        self._device = device

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, on all of them; booleans are added as such: true where one is."""
        exchanged = values.to(self._device, torch.int32 if values.dtype == torch.bool else values.dtype)
        dist.all_reduce(exchanged)
        return exchanged.to(values.device, values.dtype)

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank."""
        return bool(self.sum(torch.tensor([int(flag)])).item())

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace gradients by their sums over ranks; a parameter has one when it has one on some rank."""
        having = self.sum(torch.tensor([p.grad is not None for p in parameters])).tolist()
        bucket: list[torch.nn.Parameter] = []
        for parameter, some in zip(parameters, having, strict=True):
            if not some:
                continue
            if bucket and sum(p.numel() for p in bucket) + parameter.numel() > BUCKET:
                self._sum_bucket(bucket)
                bucket = []
            bucket.append(parameter)
        if bucket:
            self._sum_bucket(bucket)

    def _sum_bucket(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float() for p in parameters]
        )
        summed = self.sum(flat).split([p.numel() for p in parameters])
        for parameter, gradient in zip(parameters, summed, strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)


def shard(policy: Policy, device: torch.device) -> None:
    """Spread the frozen weights of a policy's decoder layers over the ranks.

    Adapter weights stay whole on every rank, in their own type, and their gradients are summed like
    without sharding: they are small, and a shard of mixed types would have to be kept in the wider one.
    Embedding, last norm and head stay whole too.

    Args:
        policy: loaded on the CPU, so that no GPU ever holds the whole model.
        device: of this rank.

    Raises:
        ConfigError: the policy's model has no list of decoder layers to shard, or is Unsloth's.
    """
    if isinstance(policy, UnslothPolicy):
        raise ConfigError(
            "strategy='fsdp2' gathers weights for transformers' modules and for our own kernels; Unsloth's "
            "read them past both: use strategy='ddp', or TrainConfig(policy='peft')"
        )
    if policy.lora is None:
        raise ConfigError(
            "strategy='fsdp2' with lora=None: weights that are trained stay whole on every rank, so there is "
            "nothing to shard; use strategy='ddp', or train an adapter"
        )
    model: Any = getattr(policy, "model", None)
    decoder: Any = None if model is None else model.get_base_model().get_decoder()
    layers: Any = getattr(decoder, "layers", None)
    if model is None or layers is None:
        raise ConfigError(
            f"strategy='fsdp2' cannot shard a {type(policy).__name__} of {policy.base_model!r}: it has no "
            "list of decoder layers; use strategy='ddp'"
        )
    trainable = set(policy.trainable_parameters())
    sharded = {p for layer in layers for p in layer.parameters()} - trainable
    whole = {p for p in model.parameters() if p not in sharded}
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=whole)
    # The root holds no weights of its own; it is what runs the layers' gathering ahead of their use.
    fully_shard(decoder, mesh=mesh, ignored_params=whole)
    for buffer_name, buffer in model.named_buffers():
        if buffer.device != device:
            owner = model.get_submodule(buffer_name.rpartition(".")[0])
            setattr(owner, buffer_name.rpartition(".")[2], buffer.to(device))
    with torch.no_grad():  # In the root's first pass FSDP2 makes what all layers share: its streams.
        decoder(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)


def held_parameters(policy: Policy) -> int:
    """How many of the model's parameters lie on this rank; shared weights count once."""
    model: Any = getattr(policy, "model", None)
    if model is None:
        return 0
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(p.numel() for p in local)

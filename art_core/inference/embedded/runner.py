"""The forward pass over tree nodes: which tokens go in, what each may see, where the results are kept.

Invariant: after `Runner.run` every node of the batch is ready, and its result depends only on the
tokens above it.

A batch has one of two layouts. *Packed*: all nodes in one row, with a mask that lets each see its
ancestors; contexts that nodes share are read once. *Rows*: one node per row, each with its own padded
context; right when long contexts have little in common. Either way the new keys and values go to the
nodes' slots, and attention reads the slots that it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from art_core.inference.embedded.tree import Node
from art_core.training.policy import Policy

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass.

    Attributes:
        nodes: what is computed, parents before children  [nodes].
        slots: where attention reads  [rows, context].
        mask: which of them each query may see  [rows, queries, context]; rows * queries = nodes.
    """

    nodes: Sequence[Node]
    slots: Slots
    mask: npt.NDArray[np.bool_]


def packed(nodes: Sequence[Node], paths: Sequence[Slots]) -> Batch:
    """All nodes in one row.

    Args:
        nodes: parents before children.
        paths: for each node, the slots of its ready ancestors; empty where its parent is in ``nodes``.
    """
    roots = [path for path in paths if len(path)]
    past: Slots = np.unique(np.concatenate(roots)) if roots else np.empty(0, dtype=np.int64)
    mask = np.zeros((len(nodes), len(past) + len(nodes)), dtype=np.bool_)
    row_of: dict[int, int] = {}
    for row, (node, path) in enumerate(zip(nodes, paths, strict=True)):
        above = row_of.get(id(node.parent))
        if above is None:
            mask[row, np.searchsorted(past, path)] = True
        else:
            mask[row] = mask[above]
        mask[row, len(past) + row] = True
        row_of[id(node)] = row
    own = np.fromiter((node.slot for node in nodes), dtype=np.int64, count=len(nodes))
    return Batch(nodes, np.concatenate([past, own])[None], mask[None])


def rows(nodes: Sequence[Node], paths: Sequence[Slots]) -> Batch:
    """One node per row; ``paths`` are the slots of all its ancestors."""
    width = max(len(path) for path in paths) + 1
    slots: Slots = np.zeros((len(nodes), width), dtype=np.int64)
    lengths = np.fromiter((len(path) + 1 for path in paths), dtype=np.int64, count=len(nodes))
    for row, (node, path) in enumerate(zip(nodes, paths, strict=True)):
        slots[row, : len(path)] = path
        slots[row, len(path)] = node.slot
    mask = np.arange(width)[None, :] < lengths[:, None]
    return Batch(nodes, slots, mask[:, None])


class _PoolLayer(CacheLayerMixin):
    """One layer's keys and values for every slot, behind transformers' cache interface."""

    def __init__(self) -> None:
        super().__init__()
        self.write: torch.Tensor = torch.empty(0)
        self.read: torch.Tensor = torch.empty(0)
        self.shape: tuple[int, int] = (0, 0)
        self.capacity = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # Zeros, not empty: padding reads slots that were never written, and 0 * NaN would be NaN.
        self.keys = key_states.new_zeros(self.capacity, key_states.shape[1] * key_states.shape[3])
        self.values = value_states.new_zeros(self.capacity, value_states.shape[1] * value_states.shape[3])
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        self.capacity = capacity
        if self.keys is not None and self.values is not None:
            more = capacity - self.keys.shape[0]
            self.keys = torch.cat([self.keys, self.keys.new_zeros(more, self.keys.shape[1])])
            self.values = torch.cat([self.values, self.values.new_zeros(more, self.values.shape[1])])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self._exchange(self.keys, key_states), self._exchange(self.values, value_states)

    def _exchange(self, pool: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write ``new`` [rows, heads, queries, width]; read [rows, heads, context, width]."""
        heads, width = new.shape[1], new.shape[3]
        pool.index_copy_(0, self.write, new.transpose(1, 2).reshape(-1, heads * width))
        read = pool.index_select(0, self.read)
        return read.view(*self.shape, heads, width).transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.shape[1], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class Runner:
    """Runs batches on the policy and keeps what they give.

    Args:
        policy: whoever calls `run` is inside ``policy.using(version)``.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._cache = _PoolCache()
        self._hidden: torch.Tensor | None = None
        self._capacity = 0

    def reserve(self, slots: int) -> None:
        """Make room for this many slots."""
        if slots <= self._capacity:
            return
        self._capacity = max(slots, 2 * self._capacity, 1024)
        self._cache.grow(self._capacity)
        if self._hidden is not None:
            more = self._capacity - self._hidden.shape[0]
            self._hidden = torch.cat([self._hidden, self._hidden.new_zeros(more, self._hidden.shape[1])])

    def run(self, batch: Batch) -> None:
        """Compute a batch; its nodes are ready afterwards."""
        device = self._policy.device
        shape = batch.mask.shape[:2]
        write = torch.tensor([node.slot for node in batch.nodes], device=device)
        tokens = torch.tensor([node.token for node in batch.nodes], device=device).view(shape)
        positions = torch.tensor([node.depth - 1 for node in batch.nodes], device=device).view(shape)
        read = torch.from_numpy(batch.slots).to(device)
        self._cache.point(write, read)
        output = self._policy.hidden_states(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=torch.from_numpy(batch.mask).to(device)[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: torch.Tensor = output.last_hidden_state.flatten(0, 1)
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self._capacity, hidden.shape[1])
        self._hidden.index_copy_(0, write, hidden)
        for node in batch.nodes:
            node.ready = True

    def logits(self, nodes: Sequence[Node]) -> torch.Tensor:
        """Next-token logits in float32 after each ready node  [nodes, vocabulary]."""
        assert self._hidden is not None
        slots = torch.tensor([node.slot for node in nodes], device=self._hidden.device)
        return self._policy.head(self._hidden.index_select(0, slots)).float()


class _PoolCache(Cache):
    """All layers; models see transformers' cache, the runner says what they read and write."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._pools: list[_PoolLayer] = []
        self._capacity = 0
        self._write = torch.empty(0)
        self._read = torch.empty(0)

    def grow(self, capacity: int) -> None:
        self._capacity = capacity
        for pool in self._pools:
            pool.grow(capacity)

    def point(self, write: torch.Tensor, read: torch.Tensor) -> None:
        self._write, self._read = write, read
        for pool in self._pools:
            self._aim(pool)

    def _aim(self, pool: _PoolLayer) -> None:
        pool.write = self._write
        pool.read = self._read.flatten()
        pool.shape = (self._read.shape[0], self._read.shape[1])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self._pools) <= layer_idx:
            pool = _PoolLayer()
            pool.grow(self._capacity)
            self._aim(pool)
            self._pools.append(pool)
            self.layers.append(pool)
        return self._pools[layer_idx].update(key_states, value_states)

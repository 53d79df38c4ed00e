"""The forward pass over tree nodes: which tokens go in, what each may see, where the results are kept.

Invariant: after `Runner.run` every node of the batch is ready, and its result depends only on the
tokens above it.

A batch has one of two layouts. *Rows*: one sequence's new tokens per row, each row with its own context.
*Packed*: the next tokens of many sequences in one row, with a mask that lets each see its ancestors, so
that a context which they share is read once. Either way the new keys and values go to the nodes' slots,
and attention reads the slots that it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from art_core.errors import EngineError
from art_core.inference.embedded.tree import Node
from art_core.training.policy import Policy

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chain:
    """New tokens of one sequence.

    Attributes:
        path: slots of what lies above them, all ready  [context].
        nodes: the new nodes, each the parent of the next.
    """

    path: Slots
    nodes: Sequence[Node]


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass.

    Attributes:
        nodes: what is computed.
        cells: where each node stands in the flattened [rows, queries]; the other cells are padding.
        slots: where attention reads  [rows, context].
        mask: what each query may see  [rows, queries, context].
    """

    nodes: Sequence[Node]
    cells: Slots
    slots: Slots
    mask: npt.NDArray[np.bool_]


def packed(chains: Sequence[Chain]) -> Batch:
    """Chains of one node each in a single row, which reads every shared slot once."""
    nodes = [chain.nodes[0] for chain in chains]
    past: Slots = np.unique(np.concatenate([chain.path for chain in chains]))
    mask = np.zeros((1, len(nodes), len(past) + len(nodes)), dtype=np.bool_)
    for row, chain in enumerate(chains):
        mask[0, row, np.searchsorted(past, chain.path)] = True
        mask[0, row, len(past) + row] = True
    own = np.fromiter((node.slot for node in nodes), dtype=np.int64, count=len(nodes))
    return Batch(nodes, np.arange(len(nodes)), np.concatenate([past, own])[None], mask)


def rows(chains: Sequence[Chain]) -> Batch:
    """One chain per row, padded on the right."""
    above = np.array([len(chain.path) for chain in chains])
    queries = max(len(chain.nodes) for chain in chains)
    context = max(len(chain.path) + len(chain.nodes) for chain in chains)
    slots: Slots = np.zeros((len(chains), context), dtype=np.int64)
    cells: list[int] = []
    for row, chain in enumerate(chains):
        end = len(chain.path) + len(chain.nodes)
        slots[row, : len(chain.path)] = chain.path
        slots[row, len(chain.path) : end] = [node.slot for node in chain.nodes]
        cells.extend(range(row * queries, row * queries + len(chain.nodes)))
    sees = above[:, None] + np.arange(1, queries + 1)
    mask = np.arange(context) < sees[:, :, None]
    return Batch([node for chain in chains for node in chain.nodes], np.array(cells), slots, mask)


COLUMN_COST = 32
"""What reading one context slot costs, in query-slot products; measured on a CPU with bfloat16."""


def cheapest(chains: Sequence[Chain]) -> Batch:
    """Chains of one node each, packed or in rows, whichever reads and multiplies less."""
    longest = max(len(chain.path) for chain in chains) + 1
    in_rows = len(chains) * longest * (1 + COLUMN_COST)
    if len(chains) > 1:
        shared = len(np.unique(np.concatenate([chain.path for chain in chains]))) + len(chains)
        if shared * (len(chains) + COLUMN_COST) < in_rows:
            return packed(chains)
    return rows(chains)


class _PoolLayer(CacheLayerMixin):
    """One layer's keys and values for every slot, behind transformers' cache interface."""

    def __init__(self) -> None:
        super().__init__()
        self.write: torch.Tensor = torch.empty(0)
        self.cells: torch.Tensor | None = None
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
            self.keys = _longer(self.keys, capacity)
            self.values = _longer(self.values, capacity)

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
        flat = new.transpose(1, 2).reshape(-1, heads * width)
        pool.index_copy_(0, self.write, flat if self.cells is None else flat.index_select(0, self.cells))
        read = pool.index_select(0, self.read)
        return read.view(*self.shape, heads, width).transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.shape[1], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def _longer(pool: torch.Tensor, capacity: int) -> torch.Tensor:
    more = capacity - pool.shape[0]
    return torch.cat([pool, pool.new_zeros(more, pool.shape[1])]) if more > 0 else pool


class Runner:
    """Runs batches on the policy and keeps what they give.

    Args:
        policy: whoever calls `run` is inside ``policy.using(version)``.
        limit: slots that are made ahead of need, at most.
    """

    def __init__(self, policy: Policy, limit: int) -> None:
        self._policy = policy
        self._limit = limit
        self._cache = _PoolCache()
        self._hidden: torch.Tensor | None = None
        self._capacity = 0

    def reserve(self, slots: int) -> None:
        """Make room for this many slots.

        Raises:
            EngineError: there is no memory for them.
        """
        if slots <= self._capacity:
            return
        capacity = max(slots, min(max(2 * self._capacity, 1024), self._limit))
        try:
            self._cache.grow(capacity)
            if self._hidden is not None and capacity > self._hidden.shape[0]:
                more = capacity - self._hidden.shape[0]
                self._hidden = torch.cat([self._hidden, self._hidden.new_zeros(more, self._hidden.shape[1])])
        except RuntimeError as full:  # torch's own error where memory ends, on a CPU and on a GPU
            raise EngineError(
                f"no memory for the keys and values of {capacity} tokens: lower "
                f"EngineConfig.prefix_cache_tokens={self._limit} or max_model_len ({full})"
            ) from full
        self._capacity = capacity

    def run(self, batch: Batch) -> None:
        """Compute a batch; its nodes are ready afterwards."""
        device = self._policy.device
        shape = batch.mask.shape[:2]
        tokens = np.zeros(shape, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        tokens.flat[batch.cells] = [node.token for node in batch.nodes]
        positions.flat[batch.cells] = [node.depth - 1 for node in batch.nodes]
        write = torch.tensor([node.slot for node in batch.nodes], device=device)
        padded = tokens.size > len(batch.nodes)
        cells = torch.from_numpy(batch.cells).to(device) if padded else None
        self._cache.point(write, cells, torch.from_numpy(batch.slots).to(device))
        output = self._policy.hidden_states(
            input_ids=torch.from_numpy(tokens).to(device),
            position_ids=torch.from_numpy(positions).to(device),
            attention_mask=torch.from_numpy(batch.mask).to(device)[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: torch.Tensor = output.last_hidden_state.flatten(0, 1)
        if cells is not None:
            hidden = hidden.index_select(0, cells)
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
        self._cells: torch.Tensor | None = None
        self._read = torch.empty(0)

    def grow(self, capacity: int) -> None:
        self._capacity = capacity
        for pool in self._pools:
            pool.grow(capacity)

    def point(self, write: torch.Tensor, cells: torch.Tensor | None, read: torch.Tensor) -> None:
        self._write, self._cells, self._read = write, cells, read
        for pool in self._pools:
            self._aim(pool)

    def _aim(self, pool: _PoolLayer) -> None:
        pool.write, pool.cells = self._write, self._cells
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

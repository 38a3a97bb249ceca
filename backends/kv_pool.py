"""The tensors that hold keys and values, indexed by slot. Which slot belongs to whom is the allocator's business."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one token's cache entry in each attention layer. `v_head_dim` is 0 where values are part of keys."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def is_latent(self) -> bool:
        """Whether an entry is MLA's compressed one, of which keys and values are both made."""
        return self.v_head_dim == 0

    @property
    def bytes_per_slot(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize


class KVPool:
    """Key and value tensors of one worker.

    `key` is [num_layers, num_slots, num_kv_heads, head_dim], `value` likewise with v_head_dim; both contiguous,
    so that native kernels can address them by pointer and stride.
    """

    def __init__(self, layout: KVLayout, num_slots: int, device: torch.device) -> None:
        self.layout = layout
        self.num_slots = num_slots
        shape = (layout.num_layers, num_slots, layout.num_kv_heads)
        # Zeros, not empty: a masked slot still enters a product, and NaN times zero is NaN.
        self.key = torch.zeros(*shape, layout.head_dim, dtype=layout.dtype, device=device)
        self.value = torch.zeros(*shape, layout.v_head_dim, dtype=layout.dtype, device=device)

    def write(self, layer_id: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value, [T, num_kv_heads, dim] each, at `slots` ([T] int64) of one layer."""
        self.key[layer_id].index_copy_(0, slots, key.to(self.layout.dtype))
        self.value[layer_id].index_copy_(0, slots, value.to(self.layout.dtype))

    def gather(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value of `slots`, any integer shape; returns slots.shape + [num_kv_heads, dim] each."""
        # index_select copies whole rows; indexing with a tensor goes element by element.
        flat = slots.flatten()
        key = self.key[layer_id].index_select(0, flat)
        value = self.value[layer_id].index_select(0, flat)
        return key.unflatten(0, slots.shape), value.unflatten(0, slots.shape)

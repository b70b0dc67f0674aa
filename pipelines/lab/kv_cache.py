"""A KV cache that is written in place: transformers' own copies all it holds at every step."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SPARE = 256
"""Positions reserved beyond the prompt, so that short answers never reallocate."""


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values (1, kv_heads, capacity, head_dim) of one layer; ``length`` are in use."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        capacity = key_states.shape[-2] + SPARE
        self.keys = _with_capacity(key_states[..., :0, :], capacity)
        self.values = _with_capacity(value_states[..., :0, :], capacity)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self.keys = _with_capacity(self.keys, 2 * end)
            self.values = _with_capacity(self.values, 2 * end)
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        self.length = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def _with_capacity(states: Tensor, capacity: int) -> Tensor:
    """A larger tensor that begins with ``states``."""
    grown = states.new_empty((*states.shape[:-2], capacity, states.shape[-1]))
    grown[..., : states.shape[-2], :] = states
    return grown


class KVCache(Cache):  # type: ignore[misc]
    """``past_key_values`` of a transformers model, batch 1."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_Layer)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, of which there are ``-tokens_to_remove``. Mutates."""
        for layer in self.layers:
            layer.length += tokens_to_remove

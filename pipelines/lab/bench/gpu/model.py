"""A decoder of a given shape with random weights: the forward pass that is timed.

Batched, over a KV cache of fixed size, without any decision on the host: a step can be captured as
one CUDA graph. The arithmetic and the parameter names are those of ``transformers``'
``LlamaForCausalLM`` and ``Qwen3ForCausalLM``; the tests load the weights of these and compare.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from pipelines.lab.bench.gpu.shapes import Shape


class KV(NamedTuple):
    """Keys and values of one layer, each (batch, kv_heads, capacity, head_dim)."""

    keys: Tensor
    values: Tensor


class View(NamedTuple):
    """Where ``tokens`` new ones go in the cache and what they see.

    ``cos`` and ``sin`` are (tokens, head_dim). ``bias`` is what :func:`tree_bias` returns; None is
    a chain, in which each token sees all before it.
    """

    start: int
    cos: Tensor
    sin: Tensor
    bias: Tensor | None = None


def rotation(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding: (tokens, head_dim) each, float32."""
    steps = torch.arange(0, shape.head_dim, 2, device=positions.device).float() / shape.head_dim
    angles = positions[:, None].float() * shape.rope_theta**-steps
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def tree_bias(seen: Tensor, start: int, groups: int, dtype: torch.dtype) -> Tensor:
    """What to add to attention scores so that each node sees the context and its ancestors.

    Args:
        seen: bool (tokens, slots): which of the last ``slots`` cached positions each token sees.
        start: cached positions before these, seen by all.
        groups: query heads to each key head.

    Returns:
        (groups * tokens, start + slots), rows padded in memory as the kernels want them.
    """
    tokens, slots = seen.shape
    length = start + slots
    bias = torch.zeros(groups, tokens, -(-length // 8) * 8, device=seen.device, dtype=dtype)
    bias[:, :, start:length].masked_fill_(~seen, float("-inf"))
    return bias.flatten(0, 1)[:, :length]


class Attention(nn.Module):
    """Grouped-query attention over a fixed cache; ``width`` is that of its input."""

    def __init__(self, s: Shape, width: int) -> None:
        super().__init__()
        self.shape = s
        self.q_proj = nn.Linear(width, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(width, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(width, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        if s.qk_norm:
            self.q_norm = nn.RMSNorm(s.head_dim, eps=s.eps)
            self.k_norm = nn.RMSNorm(s.head_dim, eps=s.eps)

    def forward(self, x: Tensor, view: View, cache: KV) -> Tensor:
        """(batch, tokens, width) -> (batch, tokens, hidden); writes the cache."""
        s = self.shape
        queries = self.q_proj(x).unflatten(-1, (s.heads, s.head_dim))
        keys = self.k_proj(x).unflatten(-1, (s.kv_heads, s.head_dim))
        if s.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = (_rotated(t.transpose(1, 2), view) for t in (queries, keys))
        end = view.start + x.shape[1]
        cache.keys[:, :, view.start : end] = keys
        values = self.v_proj(x).unflatten(-1, (s.kv_heads, s.head_dim))
        cache.values[:, :, view.start : end] = values.transpose(1, 2)
        attended = _attend(queries, cache.keys[:, :, :end], cache.values[:, :, :end], view.bias)
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


def _rotated(x: Tensor, view: View) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * view.cos.to(x.dtype) + torch.cat((-b, a), -1) * view.sin.to(x.dtype)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """(batch, heads, tokens, head_dim) over (batch, kv_heads, length, head_dim)."""
    tokens, length = queries.shape[2], keys.shape[2]
    if bias is None:
        mask = None if tokens == 1 else causal_lower_right(tokens, length)
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=True
        )
    # The kernels that take a mask know no groups: a group's heads become further query rows, so
    # that keys and values need not be repeated.
    groups = queries.shape[1] // keys.shape[1]
    folded = queries.unflatten(1, (keys.shape[1], groups)).flatten(2, 3)
    out = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=bias)
    return torch.flatten(out.unflatten(2, (groups, tokens)), 1, 2)


class Mlp(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer of the target."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(s.hidden, eps=s.eps)
        self.self_attn = Attention(s, s.hidden)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden, eps=s.eps)
        self.mlp = Mlp(s)

    def forward(self, x: Tensor, view: View, cache: KV) -> Tensor:
        """(batch, tokens, hidden) -> the same; writes the cache."""
        x = x + self.self_attn(self.input_layernorm(x), view, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocabulary, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden, eps=s.eps)


class Target(nn.Module):
    """The model whose verification is timed."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.model = Body(s)
        self.lm_head = nn.Linear(s.hidden, s.vocabulary, bias=False)
        if s.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor, view: View, caches: list[KV]) -> Tensor:
        """Verify: int64 (batch, tokens) -> logits (batch, tokens, vocabulary); writes caches."""
        x = self.model.embed_tokens(ids)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x = layer(x, view, cache)
        out: Tensor = self.lm_head(self.model.norm(x))
        return out


class Head(nn.Module):
    """An EAGLE3 head: ``fc``, one layer that reads embedding and state side by side, and logits."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.fc = nn.Linear(s.aux_layers * s.hidden, s.hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(s.hidden, eps=s.eps)
        self.hidden_norm = nn.RMSNorm(s.hidden, eps=s.eps)
        self.self_attn = Attention(s, 2 * s.hidden)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden, eps=s.eps)
        self.mlp = Mlp(s)
        self.norm = nn.RMSNorm(s.hidden, eps=s.eps)
        self.lm_head = nn.Linear(s.hidden, s.draft_vocabulary, bias=False)

    def forward(self, embeds: Tensor, hidden: Tensor, view: View, cache: KV) -> Tensor:
        """Two of (batch, tokens, hidden) -> the next states, same shape; writes the cache."""
        mixed = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        x = hidden + self.self_attn(mixed, view, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden) -> (..., draft vocabulary)."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Target, Head]:
    """A target and a head made on ``device``, weights drawn so that states stay near unit size."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            target, head = Target(shape), Head(replace(shape, qk_norm=False))
    finally:
        torch.set_default_dtype(before)
    for module in (target, head):
        module.to_empty(device=device)
        for parameter in module.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            else:
                torch.nn.init.ones_(parameter)
    if shape.tied:
        target.lm_head.weight = target.model.embed_tokens.weight
    return target.eval(), head.eval()


def random_cache(
    shape: Shape, batch: int, capacity: int, device: torch.device, dtype: torch.dtype
) -> KV:
    """A cache that holds something everywhere: hardware can be faster on zeros."""
    size = (batch, shape.kv_heads, capacity, shape.head_dim)
    return KV(*(torch.randn(size, device=device, dtype=dtype) for _ in range(2)))

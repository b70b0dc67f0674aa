"""The target as plain matrix products, for many conversations at once on a CPU.

A Llama checkpoint with tied embeddings. Its products and its attention run in the number format of
its matrices, norms and the residual stream in float32. Each conversation has a slot of one
preallocated KV cache. A prompt is read in one pass; from then on every conversation advances by one
token a step, whatever its length, so that a step is a few large products. The states that a drafter
learns from are results of the same pass.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional


class LayerWeights(NamedTuple):
    """One decoder layer; products that read the same input are stored as one matrix."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Llama:
    """Weights of a Llama model: norms in float32, matrices in the format they were asked for in."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    epsilon: float

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype = torch.float32) -> Llama:
        """Read a checkpoint directory of one safetensors file; matrices in ``dtype``."""
        c = json.loads((path / "config.json").read_text())
        w = {k.removeprefix("model."): v for k, v in load_file(path / "model.safetensors").items()}

        def norm(layer: int, name: str) -> Tensor:
            return w[f"layers.{layer}.{name}.weight"].float()

        def matrix(layer: int, *names: str) -> Tensor:
            return torch.cat([w[f"layers.{layer}.{n}.weight"].to(dtype) for n in names])

        layers = tuple(
            LayerWeights(
                norm(i, "input_layernorm"),
                matrix(i, *(f"self_attn.{n}_proj" for n in "qkv")),
                matrix(i, "self_attn.o_proj"),
                norm(i, "post_attention_layernorm"),
                matrix(i, "mlp.gate_proj", "mlp.up_proj"),
                matrix(i, "mlp.down_proj"),
            )
            for i in range(c["num_hidden_layers"])
        )
        heads = c["num_attention_heads"]
        return cls(
            w["embed_tokens.weight"].to(dtype),
            layers,
            w["norm.weight"].float(),
            heads,
            c["num_key_value_heads"],
            c.get("head_dim") or c["hidden_size"] // heads,
            float((c.get("rope_parameters") or c)["rope_theta"]),
            c["rms_norm_eps"],
        )

    def logits(self, final: Tensor) -> Tensor:
        """(n, hidden) after the final norm -> float32 (n, vocabulary)."""
        return functional.linear(final.to(self.embedding.dtype), self.embedding).float()


class States(NamedTuple):
    """What the target knew at ``n`` tokens."""

    aux: Tensor
    """bf16 (n, aux layers, hidden): the residual stream that enters each aux layer."""
    final: Tensor
    """float32 (n, hidden): after the final norm, for :meth:`Llama.logits`."""


class Slots:
    """A KV cache of ``count`` conversations of up to ``length`` tokens, and the way through it."""

    def __init__(self, model: Llama, count: int, length: int, aux_layers: Sequence[int]) -> None:
        self._model, self._aux_layers = model, sorted(aux_layers)
        shape = len(model.layers), count, model.kv_heads, length, model.head_dim
        dtype = model.embedding.dtype
        self._keys, self._values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        half = torch.arange(0, model.head_dim, 2).float() / model.head_dim
        angles = torch.arange(length)[:, None] * model.rope_theta**-half
        self._cos, self._sin = angles.cos()[:, None], angles.sin()[:, None]

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` (n, heads, head_dim), its two halves rotated as Llama does."""
        a, b = x.float().chunk(2, dim=-1)
        cos, sin = self._cos[positions], self._sin[positions]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def read(self, slot: int, tokens: Sequence[int]) -> States:
        """Start a conversation in ``slot`` with ``tokens``, in one pass."""
        positions = torch.arange(len(tokens))
        return self._pass(torch.tensor(tokens), positions, slot)

    def step(self, slots: Tensor, tokens: Tensor, positions: Tensor) -> States:
        """Add one token to each of ``slots`` (int64, one after the other) at ``positions``."""
        return self._pass(tokens, positions, slots)

    def move(self, source: int, slot: int) -> None:
        """Let ``slot`` hold the conversation of ``source``."""
        self._keys[:, slot] = self._keys[:, source]
        self._values[:, slot] = self._values[:, source]

    @torch.inference_mode()
    def _pass(self, tokens: Tensor, positions: Tensor, where: int | Tensor) -> States:
        m, aux = self._model, []
        x, dtype = m.embedding[tokens].float(), m.embedding.dtype
        seen = None
        if isinstance(where, Tensor):
            longest = int(positions.max()) + 1
            seen = torch.arange(longest) <= positions[:, None]
        for i, layer in enumerate(m.layers):
            if i in self._aux_layers:
                aux.append(x.bfloat16())
            normed = functional.rms_norm(x, x.shape[-1:], layer.attention_norm, m.epsilon).to(dtype)
            qkv = functional.linear(normed, layer.qkv).unflatten(-1, (-1, m.head_dim))
            q, k, v = qkv.split((m.heads, m.kv_heads, m.kv_heads), 1)
            q, k = self._rotated(q, positions), self._rotated(k, positions)
            if seen is None:
                attended = self._reading(i, int(where), q, k, v)
            else:
                attended = self._stepping(i, torch.as_tensor(where), positions, q, k, v, seen)
            x = x + functional.linear(attended, layer.out)
            normed = functional.rms_norm(x, x.shape[-1:], layer.mlp_norm, m.epsilon).to(dtype)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        if len(m.layers) in self._aux_layers:
            aux.append(x.bfloat16())
        final = functional.rms_norm(x, x.shape[-1:], m.norm, m.epsilon)
        return States(torch.stack(aux, 1), final)

    def _reading(self, layer: int, slot: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        self._keys[layer, slot, :, : len(k)] = keys
        self._values[layer, slot, :, : len(k)] = values
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)

    def _stepping(
        self, layer: int, slots: Tensor, at: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor
    ) -> Tensor:
        count, longest = seen.shape
        self._keys[layer, slots, :, at] = k
        self._values[layer, slots, :, at] = v
        # the queries that share a key stand in the place of query positions: one product for each
        # key head, and the cache is read where it lies
        grouped = q.unflatten(1, (k.shape[1], -1))
        out = functional.scaled_dot_product_attention(
            grouped,
            self._keys[layer, :count, :, :longest],
            self._values[layer, :count, :, :longest],
            attn_mask=seen[:, None, None],
        )
        return out.flatten(1)

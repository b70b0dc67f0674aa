"""A Llama decoder with random weights and its EAGLE3 head, run for a ragged batch in CUDA graphs.

The time of dense layers depends on shapes alone, so random weights measure it. Needs torch 2.13. On
a CPU steps run without graphs and attend through torch's masked attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

MAX_STEP_TOKENS: Final = 1024
MAX_DRAFT_TOKENS: Final = 64
STEP_SIZES: Final = (
    *(1, 2, 4), *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32),
    *range(320, 513, 64), *range(640, 1025, 128),
)  # fmt: skip
"""Step tokens are padded to one of these; each has a graph."""
QUERY_SIZES: Final = (1, 8, 32, 1 + MAX_DRAFT_TOKENS)
"""Upper bounds of one request's tokens; each has a graph, since the attention's grid depends on
it."""
DRAFTER_TOKENS: Final = 4
"""Tokens that the drafter reads before it drafts: about what a cycle commits."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama decoder and of its head's vocabulary."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    draft_vocabulary: int
    head_dim: int = 128
    theta: float = 5e5
    eps: float = 1e-5


SHAPES: Final = {
    s.name: s
    for s in (
        Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128_256, 32_000),
        Shape("Llama-3.1-70B/TP8", 80, 8192, 3584, 8, 1, 16_032, 4_000),
        Shape("tiny", 2, 64, 128, 4, 2, 256, 64, 16, 1e4),
    )
}


class Ragged(NamedTuple):
    """Positions of a step's tokens. All tensors are on the device.

    ``starts`` int32 [batch + 1] are the cumulative query tokens, ``length`` int32 [batch] the
    cached tokens of each request with those of this step, ``max_query`` a bound of one request's
    tokens. ``slots`` int64 [tokens] are cache slots, ``cos`` and ``sin`` [tokens, 1, head_dim].
    """

    capacity: int
    max_query: int
    starts: Tensor
    length: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor


def attend(q: Tensor, cache: Tensor, at: Ragged) -> Tensor:
    """Causal attention of ``q`` [tokens, heads, dim] over ``cache`` [slots, 2 kv_heads, dim].
    Returns [tokens, heads * dim]; rows of padding tokens are undefined."""
    kv, batch = cache.shape[1] // 2, len(at.length)
    if cache.device.type != "cpu":
        key_starts = at.capacity * torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        out = varlen_attn(
            q.contiguous(), cache[:-1, :kv], cache[:-1, kv:], at.starts, key_starts, at.max_query,
            at.capacity, window_size=(-1, 0), enable_gqa=True, seqused_k=at.length,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out.flatten(1)
    owner = (at.slots // at.capacity).clamp(max=batch - 1)
    context = cache[:-1].unflatten(0, (batch, at.capacity))[owner].transpose(1, 2)
    seen = torch.arange(at.capacity, device=q.device) <= (at.slots - owner * at.capacity)[:, None]
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
    out = functional.scaled_dot_product_attention(
        q[:, :, None], context[:, :kv], context[:, kv:], bias[:, None, None], enable_gqa=True
    )
    return out.flatten(1)


class Layer(NamedTuple):
    """Weights of a decoder layer. Queries, keys and values share a matrix; so do gate and up."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor

    def run(self, s: Shape, x: Tensor, h: Tensor, cache: Tensor, at: Ragged) -> Tensor:
        """Add the layer's output for normed ``h`` to ``x`` [tokens, hidden]. Mutates ``x`` and
        ``cache``."""
        qkv = functional.linear(h, self.qkv).unflatten(-1, (-1, s.head_dim))
        qk = qkv[:, : s.heads + s.kv_heads]
        torch.addcmul(qk * at.cos, qk.roll(s.head_dim // 2, -1), at.sin, out=qk)
        cache.index_copy_(0, at.slots, qkv[:, s.heads :])
        x.addmm_(attend(qkv[:, : s.heads], cache, at), self.out.t())
        h = functional.rms_norm(x, (s.hidden,), self.norm2, s.eps)
        gate, up = functional.linear(h, self.gate_up).chunk(2, -1)
        return x.addmm_(functional.silu(gate) * up, self.down.t())


class Model(NamedTuple):
    """A target and its EAGLE3 head. ``fc`` mixes three hidden states; the head's layer reads
    embedding and state side by side, each normed."""

    embed: Tensor
    layers: list[Layer]
    norm: Tensor
    lm_head: Tensor
    fc: Tensor
    embed_norm: Tensor
    head: Layer
    head_norm: Tensor
    head_lm: Tensor

    @classmethod
    def random(cls, s: Shape, device: torch.device, dtype: torch.dtype) -> Model:
        """A model whose hidden states stay near unit size."""

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, device=device, dtype=dtype).normal_(std=columns**-0.5)

        def layer(width: int) -> Layer:
            qkv = matrix((s.heads + 2 * s.kv_heads) * s.head_dim, width)
            out, gate_up = (
                matrix(s.hidden, s.heads * s.head_dim),
                matrix(2 * s.intermediate, s.hidden),
            )
            return Layer(ones(), qkv, out, ones(), gate_up, matrix(s.hidden, s.intermediate))

        ones = partial(torch.ones, s.hidden, device=device, dtype=dtype)
        layers, head = [layer(s.hidden) for _ in range(s.layers)], layer(2 * s.hidden)
        embed, lm_head = matrix(s.vocabulary, s.hidden), matrix(s.vocabulary, s.hidden)
        fc, head_lm = matrix(s.hidden, 3 * s.hidden), matrix(s.draft_vocabulary, s.hidden)
        return cls(embed, layers, ones(), lm_head, fc, ones(), head, ones(), head_lm)


Key = tuple[Any, ...]  # a step: ``("verify", tokens, max_query)`` or ``("draft", k)``


class Engine:
    """A model with KV caches for ``batch`` requests. Each kind of step is captured as a CUDA graph
    at its first use; ``capture_s`` is the time spent on that."""

    def __init__(self, s: Shape, model: Model, batch: int, capacity: int, k: int) -> None:
        self.s, self.model, self.batch, self.capacity, self.k = s, model, batch, capacity, k
        self.device, dtype = model.norm.device, model.norm.dtype
        self.cuda = self.device.type == "cuda"
        size = batch * capacity + 1, 2 * s.kv_heads, s.head_dim  # the last slot is for padding
        random = partial(torch.randn, device=self.device, dtype=dtype)
        self.caches = [random(size) for _ in range(s.layers + 1)]
        angles = torch.arange(capacity, device=self.device)[:, None] * s.theta ** -(
            torch.arange(0, s.head_dim, 2, device=self.device) / s.head_dim
        )
        self.cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
        self.rows = torch.arange(batch + 1, device=self.device)
        self.inputs, self.host_inputs = self._buffers(2 * batch + 1 + 3 * MAX_STEP_TOKENS)
        self.lengths, self.host_lengths = self._buffers(batch)
        self.out, self.host_out = self._buffers(MAX_STEP_TOKENS)
        tokens = batch * DRAFTER_TOKENS
        self.new_ids = torch.randint(s.draft_vocabulary, (tokens,), device=self.device)
        self.aux = random(tokens, 3 * s.hidden)
        self.drafts = torch.zeros(batch, k, device=self.device, dtype=torch.int64)
        self.graphs: dict[Key, Any] = {}
        self.capture_s, self.began = 0.0, 0.0
        if self.cuda:
            self.pool, self.side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def _buffers(self, size: int) -> tuple[Tensor, Tensor]:
        host = torch.zeros(size, dtype=torch.int64, pin_memory=self.cuda)
        return torch.zeros(size, dtype=torch.int64, device=self.device), host

    def _ragged(
        self, starts: Tensor, length: Tensor, positions: Tensor, slots: Tensor, max_query: int
    ) -> Ragged:
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        return Ragged(self.capacity, max_query, starts.int(), length.int(), slots, cos, sin)

    def verify(self, tokens: int, max_query: int) -> Tensor:
        """Run the step that :meth:`put` sent, and leave each token's argmax in ``out``. Returns the
        hidden states [tokens, hidden]."""
        b, s, m = self.batch, self.s, self.model
        starts, length, ids, positions, slots = self.inputs[: 2 * b + 1 + 3 * tokens].split(
            [b + 1, b, tokens, tokens, tokens]
        )
        at = self._ragged(starts, length, positions, slots, max_query)
        x = functional.embedding(ids, m.embed)
        for layer, cache in zip(m.layers, self.caches, strict=False):
            h = functional.rms_norm(x, (s.hidden,), layer.norm, s.eps)
            x = layer.run(s, x, h, cache, at)
        x = functional.rms_norm(x, (s.hidden,), m.norm, s.eps)
        self.out[:tokens].copy_(functional.linear(x, m.lm_head).argmax(-1))
        return x

    def draft(self, k: int) -> None:
        """Read ``DRAFTER_TOKENS`` of each request that end at its ``lengths``, then draft ``k``."""
        m, ids, hidden = self.model, self.new_ids, functional.linear(self.aux, self.model.fc)
        norm = partial(functional.rms_norm, normalized_shape=(self.s.hidden,), eps=self.s.eps)
        for step in range(max(k, 1)):
            new = DRAFTER_TOKENS if step == 0 else 1
            length = self.lengths + step
            positions = (length[:, None] - new + torch.arange(new, device=self.device)).flatten()
            slots = (self.rows[:-1, None] * self.capacity).expand(-1, new).flatten() + positions
            at = self._ragged(self.rows * new, length, positions, slots, new)
            embedded = norm(functional.embedding(ids, m.embed), weight=m.embed_norm)
            mixed = torch.cat((embedded, norm(hidden, weight=m.head.norm)), -1)
            x = m.head.run(self.s, hidden, mixed, self.caches[-1], at)
            hidden = x.unflatten(0, (self.batch, new))[:, -1].clone()
            if step < k:
                ids = functional.linear(norm(hidden, weight=m.head_norm), m.head_lm).argmax(-1)
                self.drafts[:, step].copy_(ids)

    def put(self, counts: NDArray[np.int64], before: NDArray[np.int64], ids: Sequence[int]) -> Key:
        """Send a step's inputs to the device.

        Args:
            counts, before: [batch] tokens of each request in this step, and those in its cache.
            ids: the tokens of all requests, concatenated.

        Returns:
            the step's key for :meth:`run`.
        """
        b, t, starts = self.batch, len(ids), np.cumsum([0, *counts])
        tokens = next(size for size in STEP_SIZES if size >= t)
        max_query = next(size for size in QUERY_SIZES if size >= counts.max())
        host, used = self.host_inputs.numpy(), 2 * b + 1 + 3 * tokens
        host[: 2 * b + 1] = np.concatenate((starts, before + counts))
        rows = host[2 * b + 1 : used].reshape(3, tokens)
        rows[:2, t:], rows[2, t:] = 0, b * self.capacity
        rows[0, :t] = np.asarray(ids) % self.s.vocabulary
        rows[1, :t] = np.arange(t) + np.repeat(before - starts[:-1], counts)
        rows[2, :t] = rows[1, :t] + np.repeat(np.arange(b) * self.capacity, counts)
        self.inputs[:used].copy_(self.host_inputs[:used], non_blocking=True)
        return "verify", tokens, max_query

    def put_lengths(self, lengths: Sequence[int] | NDArray[np.int64]) -> None:
        """Send the requests' lengths, which the drafter reads."""
        self.host_lengths.numpy()[:] = lengths
        self.lengths.copy_(self.host_lengths, non_blocking=True)

    def run(self, key: Key) -> None:
        """Run a step; capture its graph if it has none."""
        step = partial(getattr(self, key[0]), *key[1:])
        if not self.cuda:
            step()
            return
        if key not in self.graphs:
            began = time.perf_counter()
            torch.cuda.synchronize()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                step()  # lazy initialisation cannot be captured
            torch.cuda.current_stream().wait_stream(self.side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
                step()
            self.graphs[key] = graph
            self.capture_s += time.perf_counter() - began
        self.graphs[key].replay()

    def begin(self) -> None:
        """Start timing the device's part of a step."""
        self.began = time.perf_counter()
        if self.cuda:
            self.start.record()

    def fetch(self, tokens: int) -> None:
        """Copy the sampled tokens to the host; the device's part ends here."""
        self.host_out[:tokens].copy_(self.out[:tokens], non_blocking=True)
        if self.cuda:
            self.end.record()

    def wait(self) -> float:
        """Wait for the device. Returns milliseconds from :meth:`begin` to :meth:`fetch`."""
        if not self.cuda:
            return 1e3 * (time.perf_counter() - self.began)
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end))

    def busy(self) -> bool:
        """Whether the device is still working."""
        return self.cuda and not self.end.query()

    def timed(self, key: Key, runs: int) -> float:
        """Median milliseconds of a step on the device."""
        self.run(key)
        times = []
        for _ in range(runs):
            self.begin()
            self.run(key)
            self.fetch(0)
            times.append(self.wait())
        return statistics.median(times)

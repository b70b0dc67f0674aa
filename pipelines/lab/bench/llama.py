"""A Llama of random weights and its EAGLE3 head, for ragged steps of a batch in CUDA graphs.

What a step of dense layers takes depends on shapes alone. On a CPU it runs without graphs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

try:
    import triton
    import triton.language as tl

    # or each alignment and size would be compiled anew
    jit: Callable[[Any], Any] = triton.jit(
        do_not_specialize=["first", "count", "length", "tokens", "splits", "size"]
    )
except ImportError:  # torch for a CPU alone
    triton, jit = None, lambda function: function

MOST: Final = 1024
"""Tokens of a step at most."""
LONGEST: Final = 64
"""Tokens of a draft at most."""
SIZES: Final = (
    *(1, 2, 4), *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32),
    *range(320, 513, 64), *range(640, 1025, 128),
)  # fmt: skip
"""Tokens that a step is padded to, a graph each."""
ROWS: Final = (1, 8, 32, 1 + LONGEST)
"""Tokens of one request at most, a graph each: only the grid of the attention hangs on it."""
NEW: Final = 4
"""Positions the drafter reads before it drafts: about what a cycle commits."""


@dataclass(frozen=True)
class Shape:
    """What a pass costs depends on: sizes of a Llama decoder. ``draft_vocabulary``: the head's."""

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


@jit
def _attend_kernel(  # type: ignore[no-untyped-def]
    q, cache, out, part, stats, first, count, length, scale, capacity, tokens, q_stride, splits,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    # A program: M query rows (a request's tokens, each with the query heads of one key head) over
    # one of ``splits`` parts of what the request has cached.
    row, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    split, begin = block % splits, block // splits * M
    n = tl.load(count + row).to(tl.int32)
    if begin < n * GROUP:
        end, at = tl.load(length + row).to(tl.int32), tl.load(first + row).to(tl.int32)
        rows, d = begin + tl.arange(0, M), tl.arange(0, D)
        token, mine = rows // GROUP, head * GROUP + rows % GROUP
        real, seen = token < n, end - n + token
        query = tl.load(
            q + ((at + token) * q_stride + mine * D)[:, None] + d[None, :],
            mask=real[:, None], other=0.0,
        )  # fmt: skip
        chunk = tl.cdiv(tl.cdiv(end, splits), N) * N
        low = split * chunk
        high = tl.minimum(low + chunk, end)
        base = cache + row * capacity * (2 * KV * D) + head * D
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        for start in range(low, high, N):
            cols = start + tl.arange(0, N)
            inside = cols < high
            where = base + cols * (2 * KV * D)
            keys = tl.load(where[None, :] + d[:, None], mask=inside[None, :], other=0.0)
            sees = (cols[None, :] <= seen[:, None]) & inside[None, :]
            scores = tl.where(sees, tl.dot(query, keys) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            p, shrink = tl.exp(scores - safe[:, None]), tl.exp(top - safe)
            values = tl.load(where[:, None] + KV * D + d[None, :], mask=inside[:, None], other=0.0)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values)
            top = higher
        to = (at + token) * (KV * GROUP) + mine
        if WHOLE:
            found = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + to[:, None] * D + d[None, :], found, mask=real[:, None])
        else:
            to += split * tokens * (KV * GROUP)
            tl.store(part + to[:, None] * D + d[None, :], acc, mask=real[:, None])
            tl.store(stats + to * 2, top, mask=real)
            tl.store(stats + to * 2 + 1, total, mask=real)


@jit
def _merge_kernel(part, stats, out, size, D: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    at, d, s = tl.program_id(0).to(tl.int64), tl.arange(0, D), tl.arange(0, SPLITS)
    each = s * size + at
    top, total = tl.load(stats + each * 2), tl.load(stats + each * 2 + 1)
    weight = tl.exp(top - tl.max(top, 0))
    parts = tl.load(part + each[:, None] * D + d[None, :])
    found = tl.sum(parts * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + at * D + d, found.to(out.dtype.element_ty))


class Ragged(NamedTuple):
    """Where the tokens of a ragged step belong; tensors are int64 and stay on the device.

    ``first, counts, length`` [batch]: each request's first token, tokens, and cached positions with
    them; ``longest`` bounds ``counts``. ``slots`` [tokens]: where each goes in the cache. ``cos,
    sin`` [tokens, 1, head_dim].
    """

    capacity: int
    longest: int
    first: Tensor
    counts: Tensor
    length: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor


def by_kernel(q: Tensor, cache: Tensor, at: Ragged) -> Tensor:
    """Attention of (tokens, heads, dim) over (slots, 2 kv_heads, dim); rows of nobody are junk."""
    (tokens, heads, dim), batch, kv = q.shape, len(at.first), cache.shape[1] // 2
    group = heads // kv
    m = 16 if at.longest * group <= 16 else 32 if at.longest * group <= 32 else 64
    blocks, splits = -(-at.longest * group // m), 1
    while splits < 32 and batch * kv * blocks * splits < 132 and splits * 64 < at.capacity:
        splits *= 2
    out = q.new_empty(tokens, heads, dim)
    part = q.new_empty((splits, tokens, heads, dim) if splits > 1 else 1, dtype=torch.float32)
    stats = q.new_empty((splits, tokens, heads, 2) if splits > 1 else 1, dtype=torch.float32)
    _attend_kernel[(batch, kv, blocks * splits)](
        q, cache, out, part, stats, at.first, at.counts, at.length, dim**-0.5, at.capacity,
        tokens, q.stride(0), splits, KV=kv, GROUP=group, D=dim, M=m, N=64, WHOLE=splits == 1,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(tokens * heads,)](part, stats, out, tokens * heads, D=dim, SPLITS=splits)
    return out.flatten(1)


def by_torch(q: Tensor, cache: Tensor, at: Ragged) -> Tensor:
    """The same by torch alone: each token over a copy of all that its request has cached."""
    kv, batch = cache.shape[1] // 2, len(at.first)
    owner = (at.slots // at.capacity).clamp(max=batch - 1)
    held = cache[:-1].unflatten(0, (batch, at.capacity))[owner].transpose(1, 2)
    seen = torch.arange(at.capacity, device=q.device) <= (at.slots - owner * at.capacity)[:, None]
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
    found: Tensor = functional.scaled_dot_product_attention(
        q[:, :, None], held[:, :kv], held[:, kv:], bias[:, None, None], enable_gqa=True
    )
    return found.flatten(1)


class Layer(NamedTuple):
    """Weights of a decoder layer: queries, keys and values are one matrix, gate and up another."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor

    def run(self, s: Shape, x: Tensor, h: Tensor, cache: Tensor, at: Ragged) -> Tensor:
        """Add the layer of normed ``h`` to ``x`` [tokens, hidden]; mutates ``x`` and the cache."""
        qkv = functional.linear(h, self.qkv).unflatten(-1, (-1, s.head_dim))
        qk = qkv[:, : s.heads + s.kv_heads]
        torch.addcmul(qk * at.cos, qk.roll(s.head_dim // 2, -1), at.sin, out=qk)
        cache.index_copy_(0, at.slots, qkv[:, s.heads :])
        attend = by_torch if triton is None or not cache.is_cuda else by_kernel
        x.addmm_(attend(qkv[:, : s.heads], cache, at), self.out.t())
        h = functional.rms_norm(x, (s.hidden,), self.norm2, s.eps)
        gate, up = functional.linear(h, self.gate_up).chunk(2, -1)
        return x.addmm_(functional.silu(gate) * up, self.down.t())


class Model(NamedTuple):
    """A target and its EAGLE3 head: ``fc`` mixes three states, ``embed_norm`` and the head layer's
    own norm stand before its layer, which reads embedding and state side by side."""

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
        """Weights drawn so that states stay near unit size."""

        def of(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, device=device, dtype=dtype).normal_(std=columns**-0.5)

        def layer(width: int) -> Layer:
            qkv = of((s.heads + 2 * s.kv_heads) * s.head_dim, width)
            out, gate_up = of(s.hidden, s.heads * s.head_dim), of(2 * s.intermediate, s.hidden)
            return Layer(ones(), qkv, out, ones(), gate_up, of(s.hidden, s.intermediate))

        ones = partial(torch.ones, s.hidden, device=device, dtype=dtype)
        layers, head = [layer(s.hidden) for _ in range(s.layers)], layer(2 * s.hidden)
        embed, lm_head = of(s.vocabulary, s.hidden), of(s.vocabulary, s.hidden)
        fc, head_lm = of(s.hidden, 3 * s.hidden), of(s.draft_vocabulary, s.hidden)
        return cls(embed, layers, ones(), lm_head, fc, ones(), head, ones(), head_lm)


class Engine:
    """A model with caches for ``batch`` requests; steps are graphs, captured when first needed:
    ``capture_s`` and ``graphs`` count that."""

    def __init__(self, s: Shape, model: Model, batch: int, capacity: int, k: int) -> None:
        self.s, self.model, self.batch, self.capacity, self.k = s, model, batch, capacity, k
        self.device, dtype = model.norm.device, model.norm.dtype
        self.cuda = self.device.type == "cuda"
        size = batch * capacity + 1, 2 * s.kv_heads, s.head_dim  # the last slot is for padding
        of = partial(torch.randn, device=self.device, dtype=dtype)
        self.caches = [of(size) for _ in range(s.layers + 1)]
        angles = torch.arange(capacity, device=self.device)[:, None] * s.theta ** -(
            torch.arange(0, s.head_dim, 2, device=self.device) / s.head_dim
        )
        self.cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
        self.rows = torch.arange(batch, device=self.device)
        self.inputs, self.host = self._pair(3 * batch + 3 * MOST)
        self.lengths, self.host_lengths = self._pair(batch)
        self.out, self.host_out = self._pair(MOST)
        self.new_ids = torch.randint(s.draft_vocabulary, (batch * NEW,), device=self.device)
        self.aux = of(batch * NEW, 3 * s.hidden)
        self.drafts = torch.zeros(batch, k, device=self.device, dtype=torch.int64)
        self.graphs: dict[tuple[Any, ...], Any] = {}
        self.capture_s, self.began = 0.0, 0.0
        if self.cuda:
            self.pool, self.side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def _pair(self, size: int) -> tuple[Tensor, Tensor]:
        host = torch.zeros(size, dtype=torch.int64, pin_memory=self.cuda)
        return torch.zeros(size, dtype=torch.int64, device=self.device), host

    def verify(self, tokens: int, longest: int) -> Tensor:
        """Run what :meth:`put` left; the state of each token. Its argmax is in ``out``."""
        b, s, m = self.batch, self.s, self.model
        first, count, length, ids, place, slots = self.inputs[: 3 * (b + tokens)].split(
            [b, b, b, tokens, tokens, tokens]
        )
        cos, sin = self.cos[place][:, None], self.sin[place][:, None]
        at = Ragged(self.capacity, longest, first, count, length, slots, cos, sin)
        x = functional.embedding(ids, m.embed)
        for layer, cache in zip(m.layers, self.caches, strict=False):
            h = functional.rms_norm(x, (s.hidden,), layer.norm, s.eps)
            x = layer.run(s, x, h, cache, at)
        x = functional.rms_norm(x, (s.hidden,), m.norm, s.eps)
        self.out[:tokens].copy_(functional.linear(x, m.lm_head).argmax(-1))
        return x

    def draft(self, k: int) -> None:
        """Read ``NEW`` tokens of each request that end at its ``lengths``, and draft ``k``."""
        m, ids, hidden = self.model, self.new_ids, functional.linear(self.aux, self.model.fc)
        norm = partial(functional.rms_norm, normalized_shape=(self.s.hidden,), eps=self.s.eps)
        for step in range(max(k, 1)):
            new = NEW if step == 0 else 1
            length = self.lengths + step
            place = (length[:, None] - new + torch.arange(new, device=self.device)).flatten()
            slots = (self.rows[:, None] * self.capacity).expand(-1, new).flatten() + place
            at = Ragged(
                self.capacity, new, self.rows * new, torch.full_like(self.rows, new), length, slots,
                self.cos[place][:, None], self.sin[place][:, None],
            )  # fmt: skip
            embedded = norm(functional.embedding(ids, m.embed), weight=m.embed_norm)
            mixed = torch.cat((embedded, norm(hidden, weight=m.head.norm)), -1)
            x = m.head.run(self.s, hidden, mixed, self.caches[-1], at)
            hidden = x.unflatten(0, (self.batch, new))[:, -1].clone()
            if step < k:
                ids = functional.linear(norm(hidden, weight=m.head_norm), m.head_lm).argmax(-1)
                self.drafts[:, step].copy_(ids)

    def put(
        self, counts: NDArray[np.int64], before: NDArray[np.int64], ids: Sequence[int]
    ) -> tuple[str, int, int]:
        """Send a step: tokens of each request, those it has cached, and all tokens in a row.

        Returns:
            the key of its graph.
        """
        b, t, first = self.batch, len(ids), np.cumsum(counts) - counts
        tokens = next(size for size in SIZES if size >= t)
        longest = next(size for size in ROWS if size >= counts.max())
        held, used = self.host.numpy(), 3 * (b + tokens)
        held[: 3 * b] = np.concatenate((first, counts, before + counts))
        inside, place = held[3 * b : used].reshape(3, tokens), np.arange(t)
        inside[:2, t:], inside[2, t:] = 0, b * self.capacity
        inside[0, :t] = np.asarray(ids) % self.s.vocabulary
        inside[1, :t] = place + np.repeat(before - first, counts)
        inside[2, :t] = inside[1, :t] + np.repeat(np.arange(b) * self.capacity, counts)
        self.inputs[:used].copy_(self.host[:used], non_blocking=True)
        return "verify", tokens, longest

    def put_lengths(self, lengths: Sequence[int] | NDArray[np.int64]) -> None:
        """Send what the drafter goes by."""
        self.host_lengths.numpy()[:] = lengths
        self.lengths.copy_(self.host_lengths, non_blocking=True)

    def run(self, key: tuple[Any, ...]) -> None:
        """Run ``("verify", tokens, longest)`` or ``("draft", k)``."""
        step = partial(getattr(self, key[0]), *key[1:])
        if not self.cuda:
            step()
            return
        if key not in self.graphs:
            began = time.perf_counter()
            torch.cuda.synchronize()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                step()  # capture must not meet the first use of anything
            torch.cuda.current_stream().wait_stream(self.side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
                step()
            self.graphs[key] = graph
            self.capture_s += time.perf_counter() - began
        self.graphs[key].replay()

    def begin(self) -> None:
        """The device's part of a step begins."""
        self.began = time.perf_counter()
        if self.cuda:
            self.start.record()

    def fetch(self, tokens: int) -> None:
        """Have the choices copied to the host; the device's part ends there."""
        self.host_out[:tokens].copy_(self.out[:tokens], non_blocking=True)
        if self.cuda:
            self.end.record()

    def wait(self) -> float:
        """Until it ended: its milliseconds."""
        if not self.cuda:
            return 1e3 * (time.perf_counter() - self.began)
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end))

    def busy(self) -> bool:
        """Whether the device still works."""
        return self.cuda and not self.end.query()

    def uniform(self, tokens: int, context: int) -> tuple[str, int, int]:
        """Send a step of so many tokens, spread over the requests."""
        counts = np.full(self.batch, tokens // self.batch)
        counts[: tokens % self.batch] += 1
        return self.put(counts, np.full(self.batch, context), [1] * tokens)

    def timed(self, key: tuple[Any, ...], runs: int) -> float:
        """Median milliseconds of a step, without what comes to the host."""
        self.run(key)
        found = []
        for _ in range(runs):
            self.begin()
            self.run(key)
            self.fetch(0)
            found.append(self.wait())
        return statistics.median(found)

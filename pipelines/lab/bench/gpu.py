"""``hvd bench gpu``: what steps cost on an accelerator, and methods there, by the wall clock.

The target has random weights of a real shape: what these dense layers take depends on shapes alone.
It is *text-forced*: a step runs as it would be served (drafter, verification, argmax, all in CUDA
graphs), and the tokens it commits are those of a recorded session. The router is the worker's own.
Needs torch, numpy, numba, pydantic and msgspec; ``python -m pipelines.lab.bench.gpu`` starts it.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from decoder.contracts.errors import HvdError, SettingsError
from pipelines.lab.bench.commas import numbers, words

try:
    import triton
    import triton.language as tl

    # or each alignment and size would be compiled anew
    jit: Callable[[Any], Any] = triton.jit(
        do_not_specialize=["first", "count", "length", "tokens", "splits", "size"]
    )
except ImportError:  # torch for a CPU alone
    triton, jit = None, lambda function: function

NOTES: Final = (
    "Random weights, bfloat16; KV caches hold random numbers; no prompt is read (decode only).",
    "Tokens committed are the recorded text's. A model draft's accepted length is drawn by request "
    "and position, the same for every method, each token right with one chance: its mean over a "
    "draft of K tokens is the paper's for trees of 32 tokens and depth 8, at less cost.",
    "70B/TP8 is one rank's eighth of target and head (fc whole); no all-reduce is timed.",
    "The drafter runs for the whole batch, and reads a fixed number of new tokens each time.",
    "Wall clock with all Python in it, without capturing graphs. none and eagle3 have no router.",
    "Steps run no more than MOST tokens; above it the last drafts are cut.",
)
MOST: Final = 1024
SIZES: Final = (
    *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),
)
"""Tokens that a step is padded to, a graph each."""
LONGEST: Final = 64
"""Tokens of a draft at most."""
ROWS: Final = (1, 8, 32, 1 + LONGEST)
"""Tokens of one request at most, a graph each: only the grid of the attention hangs on it."""
NEW: Final = 4
"""Positions the drafter reads before it drafts: about what a cycle commits."""
PER_REQUEST: Final = (1, 2, 3, 5, 9, 17, 33)
WARM: Final = 12
"""Tokens of each request, before what is counted."""
SESSIONS, TURNS, PROMPT, ANSWER = 48, 3, 3000, 256
"""What is recorded: sessions of a set, requests of a session, tokens of each."""
METHODS: Final = ("none", "suffix", "eagle3", "frequency", "hybrid")
CHAT: Final = ("alpacaeval_chat", "mtbench_vicuna")
Say = Callable[[str], None]
Step = Callable[[], None]


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

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer, norms left out."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def read_parameters(self) -> int:
        """What every pass reads: all but the embedding table."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    @property
    def kv_values(self) -> int:
        """Cached numbers of one token, without the head's layer."""
        return self.layers * 2 * self.kv_heads * self.head_dim


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


class Plan(NamedTuple):
    """Where the tokens of a ragged step belong; tensors are int64 and stay on the device.

    ``first, counts, length`` [batch]: each request's first token, tokens, and cached positions with
    them; ``longest`` bounds ``counts``. ``slots`` [tokens]: where each goes in the cache. ``cos,
    sin`` [tokens, 1, head_dim]. ``bias`` is that of :func:`masked`; None takes the kernel.
    """

    capacity: int
    longest: int
    first: Tensor
    counts: Tensor
    length: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    bias: Tensor | None


def by_kernel(q: Tensor, cache: Tensor, plan: Plan) -> Tensor:
    """Attention of (tokens, heads, dim) over (slots, 2 kv_heads, dim); rows of nobody are junk."""
    (tokens, heads, dim), batch, kv = q.shape, len(plan.first), cache.shape[1] // 2
    group = heads // kv
    m = 16 if plan.longest * group <= 16 else 32 if plan.longest * group <= 32 else 64
    blocks, splits = -(-plan.longest * group // m), 1
    while splits < 32 and batch * kv * blocks * splits < 132 and splits * 64 < plan.capacity:
        splits *= 2
    out = q.new_empty(tokens, heads, dim)
    part = q.new_empty((splits, tokens, heads, dim) if splits > 1 else 1, dtype=torch.float32)
    stats = q.new_empty((splits, tokens, heads, 2) if splits > 1 else 1, dtype=torch.float32)
    _attend_kernel[(batch, kv, blocks * splits)](
        q, cache, out, part, stats, plan.first, plan.counts, plan.length, dim**-0.5, plan.capacity,
        tokens, q.stride(0), splits, KV=kv, GROUP=group, D=dim, M=m, N=64, WHOLE=splits == 1,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(tokens * heads,)](part, stats, out, tokens * heads, D=dim, SPLITS=splits)
    return out.flatten(1)


def bias_of(plan: Plan, group: int, dtype: torch.dtype) -> Tensor:
    """What :func:`masked` adds to scores: (batch, 1, group * longest, capacity)."""
    device = plan.first.device
    last = (plan.length - plan.counts)[:, None] + torch.arange(plan.longest, device=device)
    hidden = torch.arange(plan.capacity, device=device) > last[..., None]
    bias = torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return bias.repeat(1, group, 1)[:, None]


def masked(q: Tensor, cache: Tensor, plan: Plan) -> Tensor:
    """The same by torch's own kernels, which see all of the cache: a group's heads are further
    query rows, so that keys need not be repeated."""
    (tokens, heads, _), batch, kv = q.shape, len(plan.first), cache.shape[1] // 2
    steps = torch.arange(plan.longest, device=q.device)
    rows = q[(plan.first[:, None] + steps).clamp(max=tokens - 1)]
    folded = rows.unflatten(2, (kv, heads // kv)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    held = cache[:-1].unflatten(0, (batch, plan.capacity)).transpose(1, 2)
    out = functional.scaled_dot_product_attention(
        folded, held[:, :kv], held[:, kv:], attn_mask=plan.bias
    )
    out = out.unflatten(2, (heads // kv, plan.longest)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    owner = (plan.slots // plan.capacity).clamp(max=batch - 1)
    place = torch.arange(tokens, device=q.device) - plan.first[owner]
    found: Tensor = out[owner, place.clamp(0, plan.longest - 1)]
    return found.flatten(1)


class Layer(NamedTuple):
    """Weights of a decoder layer: queries, keys and values are one matrix, gate and up another."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor

    def run(self, s: Shape, x: Tensor, h: Tensor, cache: Tensor, plan: Plan) -> Tensor:
        """Add the layer of normed ``h`` to ``x`` [tokens, hidden]; mutates ``x`` and the cache."""
        qkv = functional.linear(h, self.qkv).unflatten(-1, (-1, s.head_dim))
        qk = qkv[:, : s.heads + s.kv_heads]
        torch.addcmul(qk * plan.cos, qk.roll(s.head_dim // 2, -1), plan.sin, out=qk)
        cache.index_copy_(0, plan.slots, qkv[:, s.heads :])
        attend = by_kernel if plan.bias is None else masked
        x.addmm_(attend(qkv[:, : s.heads], cache, plan), self.out.t())
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

        def ones() -> Tensor:
            return torch.ones(s.hidden, device=device, dtype=dtype)

        def layer(width: int) -> Layer:
            d, h = s.head_dim, s.hidden
            return Layer(
                ones(), of((s.heads + 2 * s.kv_heads) * d, width), of(h, s.heads * d), ones(),
                of(2 * s.intermediate, h), of(h, s.intermediate),
            )  # fmt: skip

        return cls(
            of(s.vocabulary, s.hidden), [layer(s.hidden) for _ in range(s.layers)], ones(),
            of(s.vocabulary, s.hidden), of(s.hidden, 3 * s.hidden), ones(), layer(2 * s.hidden),
            ones(), of(s.draft_vocabulary, s.hidden),
        )  # fmt: skip


class Engine:
    """A model with caches for ``batch`` requests; steps are graphs, captured when first needed.

    ``capture_s`` and ``graphs`` count that. ``kernel`` False takes torch's own attention.
    """

    def __init__(
        self, s: Shape, model: Model, batch: int, capacity: int, k: int, kernel: bool
    ) -> None:
        self.s, self.model, self.batch, self.capacity, self.k = s, model, batch, capacity, k
        self.kernel, like = kernel, model.norm
        self.device, self.dtype, self.cuda = like.device, like.dtype, like.device.type == "cuda"
        size = batch * capacity + 1, 2 * s.kv_heads, s.head_dim  # the last slot is for padding
        self.caches = [
            torch.randn(size, device=self.device, dtype=self.dtype) for _ in range(s.layers + 1)
        ]
        angles = torch.arange(capacity, device=self.device)[:, None] * s.theta ** -(
            torch.arange(0, s.head_dim, 2, device=self.device) / s.head_dim
        )
        self.cos = torch.cat((angles.cos(), angles.cos()), -1).to(self.dtype)
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1).to(self.dtype)
        self.rows = torch.arange(batch, device=self.device)
        self.inputs, self.host = self._pair(3 * batch + 3 * MOST)
        self.lengths, self.host_lengths = self._pair(batch)
        self.out, self.host_out = self._pair(MOST)
        self.new_ids = torch.randint(s.draft_vocabulary, (batch * NEW,), device=self.device)
        self.aux = torch.randn(batch * NEW, 3 * s.hidden, device=self.device, dtype=self.dtype)
        self.drafts = torch.zeros(batch, k, device=self.device, dtype=torch.int64)
        self.graphs: dict[tuple[Any, ...], Any] = {}
        self.capture_s, self.began = 0.0, 0.0
        if self.cuda:
            self.pool, self.side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def _pair(self, size: int) -> tuple[Tensor, Tensor]:
        host = torch.zeros(size, dtype=torch.int64, pin_memory=self.cuda)
        return torch.zeros(size, dtype=torch.int64, device=self.device), host

    def _plan(
        self, longest: int, first: Tensor, count: Tensor, length: Tensor, slots: Tensor, at: Tensor
    ) -> Plan:
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        plan = Plan(self.capacity, longest, first, count, length, slots, cos, sin, None)
        if self.kernel:
            return plan
        return plan._replace(bias=bias_of(plan, self.s.heads // self.s.kv_heads, self.dtype))

    def verify(self, tokens: int, longest: int) -> Tensor:
        """Run what :meth:`put` left; the state of each token. Its argmax is in ``out``."""
        b, s, m = self.batch, self.s, self.model
        first, count, length, ids, at, slots = self.inputs[: 3 * (b + tokens)].split(
            [b, b, b, tokens, tokens, tokens]
        )
        plan = self._plan(longest, first, count, length, slots, at)
        x = functional.embedding(ids, m.embed)
        for layer, cache in zip(m.layers, self.caches, strict=False):
            h = functional.rms_norm(x, (s.hidden,), layer.norm, s.eps)
            x = layer.run(s, x, h, cache, plan)
        x = functional.rms_norm(x, (s.hidden,), m.norm, s.eps)
        self.out[:tokens].copy_(functional.linear(x, m.lm_head).argmax(-1))
        return x

    def draft(self, k: int) -> None:
        """Read ``NEW`` tokens of each request that end at its ``lengths``, and draft ``k``."""
        m, ids, hidden = self.model, self.new_ids, functional.linear(self.aux, self.model.fc)
        for step in range(max(k, 1)):
            new = NEW if step == 0 else 1
            length = self.lengths + step
            at = (length[:, None] - new + torch.arange(new, device=self.device)).flatten()
            slots = (self.rows[:, None] * self.capacity).expand(-1, new).flatten() + at
            count = torch.full_like(self.rows, new)
            plan = self._plan(new, self.rows * new, count, length, slots, at)
            norm = partial(functional.rms_norm, normalized_shape=(self.s.hidden,), eps=self.s.eps)
            embedded = norm(functional.embedding(ids, m.embed), weight=m.embed_norm)
            mixed = torch.cat((embedded, norm(hidden, weight=m.head.norm)), -1)
            x = m.head.run(self.s, hidden, mixed, self.caches[-1], plan)
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
        held = self.host.numpy()
        held[: 3 * b] = np.concatenate((first, counts, before + counts))
        inside, at = held[3 * b : 3 * (b + tokens)].reshape(3, tokens), np.arange(t)
        inside[:2, t:], inside[2, t:] = 0, b * self.capacity
        inside[0, :t] = np.asarray(ids) % self.s.vocabulary
        inside[1, :t] = at + np.repeat(before - first, counts)
        inside[2, :t] = inside[1, :t] + np.repeat(np.arange(b) * self.capacity, counts)
        used = 3 * (b + tokens)
        self.inputs[:used].copy_(self.host[:used], non_blocking=True)
        return "verify", tokens, longest

    def put_lengths(self, lengths: Sequence[int] | NDArray[np.int64]) -> None:
        """Send what the drafter goes by."""
        self.host_lengths.numpy()[:] = lengths
        self.lengths.copy_(self.host_lengths, non_blocking=True)

    def run(self, key: tuple[Any, ...]) -> bool:
        """Run ``("verify", tokens, longest)`` or ``("draft", k)``; whether it was new."""
        step: Step = partial(getattr(self, key[0]), *key[1:])
        if not self.cuda:
            step()
            return False
        if is_new := key not in self.graphs:
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
        return is_new

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
        """Median milliseconds of a step."""
        self.run(key)
        found = []
        for _ in range(runs):
            self.begin()
            self.run(key)
            if self.cuda:
                self.end.record()
            found.append(self.wait())
        return statistics.median(found)


def kernel_fault(s: Shape, device: torch.device, dtype: torch.dtype) -> str:
    """Why the attention kernel cannot be used; "" if it agrees with torch's on ragged steps."""
    if triton is None:
        return "no triton"
    try:
        for count in ([1, 1, 1], [3, 1, 0], [40, 1, 9], [1] * 36, [5, 4, 3] * 48):
            counts, n, t = torch.tensor(count, device=device), len(count), sum(count)
            places, dim = torch.arange(n, device=device), s.head_dim
            length, first = counts + (7 + 97 * places) % 300, counts.cumsum(0)
            slots = torch.repeat_interleave(places * 384, counts, output_size=t)
            q = torch.randn(t, s.heads, dim, device=device, dtype=dtype)
            cache = torch.randn(n * 384 + 1, 2 * s.kv_heads, dim, device=device, dtype=dtype)
            longest = next(size for size in ROWS if size >= max(count))
            plan = Plan(384, longest, first - counts, counts, length, slots, q, q, None)
            exact = plan._replace(bias=bias_of(plan, s.heads // s.kv_heads, torch.float32))
            mine, theirs = (
                by_kernel(q, cache, plan).float(),
                masked(q.float(), cache.float(), exact),
            )
            if not (off := float((mine - theirs).norm() / theirs.norm())) < 0.02:
                return f"it is off by {off:.3f}"
    except Exception as error:  # noqa: BLE001 - whatever a compiler says
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


@dataclass(frozen=True)
class Request:
    """A recorded one: prompt int32 [n], and the answer that its target gives."""

    prompt: NDArray[np.int32]
    answer: list[int]
    session: str
    workload: str
    number: int

    def accepts(self, mean: float, k: int) -> list[int]:
        """Accepted length of a model draft of ``k`` tokens at each place of the answer."""
        from pipelines.lab.replay.model_arm import drawn_acceptance

        rng = np.random.default_rng([self.number, round(100 * mean)])
        drawn: list[int] = drawn_acceptance(mean, k, len(self.answer), rng).tolist()
        return drawn


def read_sessions(path: Path, longest: int, skip: Sequence[str]) -> tuple[list[list[Request]], Any]:
    """Sessions, each a list of requests whose prompts are cut to their last ``longest`` tokens,
    without the sets in ``skip``, set by set in turn; and the token classes of their vocabulary.

    Raises:
        SettingsError: there are none.
    """
    try:
        with np.load(path) as held:
            tokens, offsets, names, classes = (
                held[n] for n in ("tokens", "offsets", "names", "classes")
            )
    except (OSError, KeyError, ValueError) as error:
        raise SettingsError(
            f"no sessions in {path} ({error}): make them, --make-sessions."
        ) from error
    sessions: dict[str, list[Request]] = {}
    for number, (name, (low, middle, high)) in enumerate(zip(names, offsets, strict=True)):
        workload, session = str(name).split("\t")
        if workload not in skip:
            prompt = np.ascontiguousarray(tokens[max(low, middle - longest) : middle])
            answer = tokens[middle:high].tolist()
            made = Request(prompt, answer, session, workload, number)
            sessions.setdefault(str(name), []).append(made)
    if not sessions:
        raise SettingsError(f"no sessions in {path}.")
    seen = Counter[str]()
    turn = {}
    for name in sessions:
        workload = name.split("\t")[0]
        turn[name], seen[workload] = seen[workload], seen[workload] + 1
    return [sessions[name] for name in sorted(sessions, key=turn.__getitem__)], classes


class Slot:
    """A client at work: one recorded request after the other, of one session after the other."""

    def __init__(self, place: int, lane: Sequence[Request]) -> None:
        self._place, self._lane, self._next = place, lane, 0
        self.repeats = 0
        self.begin()

    def begin(self) -> None:
        """Its next request, whose first token came with the prompt."""
        self.request = self._lane[self._next % len(self._lane)]
        self.repeats += self._next >= len(self._lane)
        self.name = f"{self._place}-{self._next}"
        self.text, self._next = self.request.answer[:1], self._next + 1
        self.luck: list[int] | None = None

    def modelled(self, room: int, mean: float, k: int) -> list[int]:
        """A model draft of ``room`` tokens: right as far as it is lucky, then wrong."""
        if self.luck is None:
            self.luck = self.request.accepts(mean, k)
        done = len(self.text)
        right = self.request.answer[done : done + min(self.luck[done], room)]
        return right + [-1] * (room - len(right))

    def commit(self, draft: Sequence[int]) -> list[int]:
        """What the target makes of ``draft``. Mutates."""
        from decoder.drafting.drafts import common_prefix

        answer, done = self.request.answer, len(self.text)
        accepted = common_prefix(draft, answer[done : done + len(draft)])
        made = [*draft[:accepted], *answer[done + accepted : done + accepted + 1]]
        self.text += made
        return made


class Player:
    """One method in one cell, with slots, router and cache of its own, over a shared engine."""

    def __init__(
        self, name: str, mean: float, engine: Engine, lanes: Sequence[Sequence[Request]],
        classes: Any, table: Any,
    ) -> None:  # fmt: skip
        from decoder.core.requests import Decision

        self.name, self.mean, self.engine = name, mean, engine
        self.router = (
            None if name in ("none", "eagle3") else router_of(name, engine.k, classes, table)
        )
        fixed = Decision("model", (), engine.k) if name == "eagle3" else Decision("none")
        self._fixed = [fixed] * engine.batch
        self.slots = [Slot(place, lane) for place, lane in enumerate(lanes)]
        self.forget()
        self._enter(self.slots)

    def forget(self) -> None:
        """Counts begin anew."""
        self.tokens = self.steps = self.cycles = 0
        self.exposed_s = self.own_s = self.gpu_ms = 0.0
        self.rounds: list[tuple[int, float]] = []
        self.arms: Counter[str] = Counter()

    def _enter(self, slots: Sequence[Slot]) -> None:
        from decoder.core.router import Committed, RequestOptions

        if self.router is None:
            return
        for slot in slots:
            r = slot.request
            options = RequestOptions(1024, 1 << 20, session=r.session, workload=r.workload)
            self.router.start(slot.name, r.prompt, options)
        self.router.observe([Committed(slot.name, slot.text, 0) for slot in slots], 0)

    def step(self) -> None:
        """Choose, draft, verify, accept, observe."""
        from decoder.core.router import Committed

        e, router, slots, exposed = self.engine, self.router, self.slots, 0.0
        clock, captured, names = time.perf_counter, e.capture_s, [slot.name for slot in self.slots]
        began, decisions = clock(), self._fixed
        if router is not None:
            decisions = router.choose(names, MOST - e.batch)
            exposed = clock() - began
        drafts = [
            list(d.tokens) if d.arm == "cache"
            else slot.modelled(d.room, self.mean, e.k) if d.arm == "model" else []
            for slot, d in zip(slots, decisions, strict=True)
        ]  # fmt: skip
        pairs = list(zip(decisions, drafts, strict=True))
        k = max((len(draft) for d, draft in pairs if d.arm == "model"), default=0)
        counts = np.array([1 + len(draft) for draft in drafts])
        lengths = np.array([len(slot.request.prompt) + len(slot.text) for slot in slots])
        if k:
            e.put_lengths(lengths)
            e.begin()
            e.run(("draft", k))
        ids = [t for s, draft in zip(slots, drafts, strict=True) for t in (s.text[-1], *draft)]
        key = e.put(counts, lengths - 1, ids)
        if not k:
            e.begin()
        e.run(key)
        e.fetch(len(ids))
        if router is not None:
            began = clock()
            router.drafted(names, (counts - 1).tolist(), k)
            exposed += (told := clock()) - began
            router.settle(exposed=not e.cuda)
            took = clock() - told
            exposed, self.own_s = exposed + took * (not e.busy()), self.own_s + took * e.busy()
        gpu_ms = e.wait()
        e.host_out[: len(ids)].tolist()  # a server would read them
        committed = [slot.commit(draft) for slot, draft in zip(slots, drafts, strict=True)]
        began = clock()
        if router is not None:
            told_of = zip(names, committed, drafts, strict=True)
            outcomes = [Committed(name, made, len(draft)) for name, made, draft in told_of]
            router.observe(outcomes, len(ids), usual=e.capture_s == captured)
        self._go_on()
        if router is not None:
            exposed += clock() - began
        self.steps, self.cycles = self.steps + 1, self.cycles + len(slots)
        self.tokens += sum(map(len, committed))
        self.exposed_s, self.own_s = self.exposed_s + exposed, self.own_s + exposed
        self.gpu_ms += gpu_ms if e.capture_s == captured else self.gpu_ms / max(self.steps - 1, 1)
        self.arms.update(d.arm if draft else "none" for d, draft in pairs)

    def _go_on(self) -> None:
        """Let other requests follow those that ended."""
        ended = [slot for slot in self.slots if len(slot.text) >= len(slot.request.answer)]
        for slot in ended:
            if slot.text != slot.request.answer:
                raise RuntimeError(f"{self.name} wrote another text than was recorded.")
            if self.router is not None:
                self.router.stop(slot.name, "stop")
            slot.begin()
        if ended:
            self._enter(ended)

    def play(self, tokens: int, until: float) -> bool:
        """Decode until there are so many since counts began; False where the time was over."""
        e, before = self.engine, self.tokens
        began, captured = time.perf_counter(), e.capture_s
        while self.tokens < tokens and time.monotonic() < until:
            self.step()
        seconds = time.perf_counter() - began - (e.capture_s - captured)
        self.rounds.append((self.tokens - before, seconds))
        return self.tokens >= tokens

    def told(self) -> dict[str, Any]:
        """What came of it; seconds and rates are of whole rounds."""
        tokens, seconds = (sum(each) for each in zip(*self.rounds, strict=True))
        return {
            "method": self.name,
            "model_accepts": self.mean or None,
            "tok_per_s": tokens / seconds,
            "tok_per_s_decision_free": tokens / max(seconds - self.exposed_s, 1e-9),
            "gpu_ms": self.gpu_ms / self.steps,
            "step_ms": 1e3 * seconds / self.steps,
            "router_us": 1e6 * self.own_s / self.cycles,
            "router_exposed_us": 1e6 * self.exposed_s / self.cycles,
            "tokens_a_cycle": self.tokens / self.cycles,
            "arms": {arm: n / self.cycles for arm, n in sorted(self.arms.items())},
            "tokens": tokens, "seconds": seconds, "steps": self.steps, "rounds": self.rounds,
            "repeated_requests": sum(slot.repeats for slot in self.slots),
            "asleep_steps": self.router.counters.asleep if self.router else 0,
            "floor": self.router.floor.in_force if self.router and self.router.floor else None,
        }  # fmt: skip


def router_of(name: str, k: int, classes: Any, table: Any) -> Any:
    """The router of ``suffix``, ``frequency`` or ``hybrid``, with a worker's defaults."""
    from decoder.contracts.bundle import ANY_SCOPE
    from decoder.core.costs import LiveCosts
    from decoder.core.events import Sink
    from decoder.core.guards.floor import Floor
    from decoder.core.router import DraftRouter
    from decoder.drafting.suffix import SuffixCache
    from decoder.engines.reference.method import method
    from decoder.policy.first import first_policy
    from decoder.settings import WorkerSettings
    from decoder.telemetry.ring import Ring

    settings, learned = WorkerSettings.load(), name == "hybrid"
    by = method(name, policy=first_policy(ANY_SCOPE) if learned else None)
    return DraftRouter(
        SuffixCache(by.drafting(settings)), by.policy, classes,
        Sink(Ring(settings.queue_size)), by.model != "none", model_draft_tokens=k,
        longest=LONGEST, costs=LiveCosts(table, live=learned),
        floor=Floor(True) if learned else None,
    )  # fmt: skip


def costs_of(e: Engine, until: float) -> list[dict[str, Any]]:
    """Milliseconds of verifying, by tokens a request and context, and of drafting."""
    found, most = [], e.capacity - 1 - LONGEST
    for context in sorted({min(1024, most), min(3072, most)}):
        where = {"shape": e.s.name, "batch": e.batch, "context": context}
        e.put_lengths([context] * e.batch)
        sizes = [n for n in PER_REQUEST if n * e.batch <= MOST]
        keys = [("verify", n, e.uniform(n * e.batch, context)) for n in sizes]
        for step, n, key in [*keys, *(("draft", k, ("draft", k)) for k in range(e.k + 1))]:
            if time.monotonic() < until:
                if step == "verify":
                    e.uniform(n * e.batch, context)
                ms = e.timed(key, 15 if e.cuda else 2)
                found.append({**where, "step": step, "tokens": n, "ms": ms})
                if (step, n) == ("verify", 1):
                    read = e.s.read_parameters + e.batch * context * e.s.kv_values
                    found[-1]["read_gb"] = read * e.caches[0].element_size() / 1e9
    return found


def profile_of(e: Engine, seconds: float) -> Any:
    """The cost table that a worker makes at its start: steps of short contexts, and drafts."""
    from decoder.core.profiling import levels, profile

    most = max(size for size in SIZES if size <= e.batch * (1 + LONGEST))
    graphs = tuple(size for size in SIZES if size <= most)
    e.put_lengths([NEW + 16] * e.batch)

    def step(tokens: int) -> None:
        e.begin()
        e.run(e.uniform(tokens, 16))
        e.fetch(tokens)
        e.wait()

    def draft(_: int) -> None:
        e.begin()
        e.run(("draft", e.k))
        e.fetch(1)
        e.wait()

    for size in (n for level in levels(most, graphs) for n in level):
        step(size)  # captures its graph
    draft(1)
    return profile(
        f"{e.s.name}/{e.batch}", step, draft, drafted=e.k, rows=(e.batch,), most=most,
        graphs=graphs, seconds=seconds,
    )  # fmt: skip


def players_of(
    asked: Options, e: Engine, lanes: Sequence[Sequence[Request]], classes: Any, table: Any
) -> Iterator[Player]:
    """Each method, once for each drafter where it drafts with one."""
    for name in asked.methods:
        for mean in (0.0,) if name in ("none", "suffix") else asked.accepts:
            yield Player(name, mean, e, lanes, classes, table)


def compare(players: Sequence[Player]) -> list[dict[str, Any]]:
    """What each came to, with ratios over ``none`` and, of the hybrid, over the best other one that
    has the same drafter; intervals are over rounds."""
    from pipelines.stats import columns, interval

    found = [p.told() | {"over": {}} for p in players]
    for mine, p in zip(found, players, strict=True):
        rivals = [
            q for q in players if q.mean in (0.0, p.mean) and q.name not in (p.name, "hybrid")
        ]
        picked = [q for q in rivals if q.name == "none"]
        if p.name == "hybrid" and rivals:
            picked.append(max(rivals, key=lambda q: found[players.index(q)]["tok_per_s"]))
        for q in picked:
            ratio = mine["tok_per_s"] / found[players.index(q)]["tok_per_s"]
            sure = interval(columns(p.rounds), columns(q.rounds))
            mine["over"][q.name] = [ratio, *(sure or (None, None))]
    return found


def cell(
    asked: Options, e: Engine, sessions: Sequence[Sequence[Request]], classes: Any, until: float,
    told: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """One shape and batch, until about ``until``; ``told`` is given the record as it grows."""
    began = time.monotonic()
    record: dict[str, Any] = {"shape": e.s.name, "batch": e.batch, "capacity": e.capacity}
    gc.collect()
    gc.freeze()  # as a server does after its start; and each capture collects what is not frozen
    record |= {"costs": costs_of(e, began + 0.3 * (until - began)), "methods": [], "errors": []}
    told(record)
    table = profile_of(e, min(2.0, 0.1 * (until - began)))
    lanes = [[r for s in sessions[lane :: e.batch] for r in s] for lane in range(e.batch)]
    if not all(lanes):
        lanes = [lane or [r for s in sessions for r in s] for lane in lanes]
    players = list(players_of(asked, e, lanes, classes, table))
    gc.freeze()

    def tried(p: Player, play: Callable[[], bool]) -> bool:
        try:
            return play()
        except Exception as error:  # noqa: BLE001 - one method's fault is no other's
            players.remove(p)
            record["errors"].append(f"{p.name}: {type(error).__name__}: {str(error)[:500]}")
            traceback.print_exc()
            return True

    for p in list(players):
        for _ in range(2):  # by the second time most graphs are there
            if p in players:
                p.forget()
                tried(p, partial(p.play, WARM * e.batch, until))
    paces = [p.rounds[-1][1] / max(p.rounds[-1][0], 1) for p in players]
    left = until - time.monotonic()
    quota = max(min(int(left / asked.rounds / max(sum(paces), 1e-9)), asked.tokens), e.batch)
    for p in players:
        p.forget()
    target, took, turn = 0, 0.0, 0
    while (
        players and turn < 2 * asked.rounds and (not took or time.monotonic() + 0.9 * took < until)
    ):
        start, target = time.monotonic(), target + quota
        first = turn % len(players)
        order = [*players[first:], *players[:first]]
        whole = [tried(p, partial(p.play, target, asked.deadline)) for p in order]
        took, turn = time.monotonic() - start, turn + 1
        if not all(whole):
            record["errors"].append("the time was over within a round")
            break
    record["methods"] = compare([p for p in players if p.tokens])
    record |= {"rounds": turn, "graphs": len(e.graphs), "capture_s": e.capture_s}
    record["seconds"] = time.monotonic() - began
    told(record)


@dataclass
class Options:
    """What a person chooses. ``deadline`` is of :func:`time.monotonic`."""

    sessions: Path
    json: Path
    device: str
    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    methods: tuple[str, ...]
    accepts: tuple[float, ...]
    k: int
    minutes: float
    rounds: int
    tokens: int
    context: int
    skip: tuple[str, ...]
    no_kernel: str = ""
    """Why torch's own attention is to be used."""
    deadline: float = 0.0


def run(asked: Options, say: Say) -> dict[str, Any]:
    """Measure; the report is written after each part of it, and returned."""
    from pipelines.reports import write_json

    began = time.monotonic()
    import_module("decoder.core.router")  # compiles its loops
    compiled_s = time.monotonic() - began
    say(f"the router's loops were compiled in {compiled_s:.1f} s")
    device = torch.device(asked.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    sessions, classes = read_sessions(asked.sessions, asked.context, asked.skip)
    requests = [r for s in sessions for r in s]
    capacity = -(-max(len(r.prompt) + len(r.answer) for r in requests) // 128) * 128 + 128
    report: dict[str, Any] = {
        "benchmark": "gpu", "device": device_of(device), "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "notes": NOTES, "k": asked.k,
        "dtype": str(dtype), "compiled_s": compiled_s, "minutes": asked.minutes,
        "sessions": len(sessions), "requests": len(requests), "capacity": capacity,
        "sets": dict(Counter(r.workload for r in requests)), "shapes": {}, "cells": [],
        "errors": [],
    }  # fmt: skip
    asked.deadline = time.monotonic() + 60 * asked.minutes
    plan = [(s, asked.batches[i : i + 2]) for i in range(0, len(asked.batches), 2)
            for s in asked.shapes]  # fmt: skip
    weights = [2.0 if b == 1 else 1.0 for _, some in plan for b in some]

    def told(record: dict[str, Any]) -> None:
        if record not in report["cells"]:
            report["cells"].append(record)
        write_json(report, asked.json)
        say("\n".join(table(record)))

    for name, batches in plan:
        s = SHAPES[name]
        try:
            model = Model.random(s, device, dtype)
            fault = asked.no_kernel or kernel_fault(s, device, dtype)
            report["shapes"][name] = asdict(s) | {
                "read_gb": s.read_parameters * model.norm.element_size() / 1e9,
                "attention": f"torch's, masked: {fault}" if fault else "kernel",
            }
            say(f"{name}: attention by {report['shapes'][name]['attention']}")
        except Exception as error:  # noqa: BLE001 - told, and the rest goes on
            report["errors"].append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
            weights = weights[len(batches) :]
            continue
        for batch in batches:
            now = time.monotonic()
            until = now + (asked.deadline - now) * weights[0] / sum(weights)
            weights = weights[1:]
            say(f"{name}, batch {batch}: {until - now:.0f} s")
            try:
                cell(asked, Engine(s, model, batch, capacity, asked.k, not fault), sessions,
                     classes, until, told)  # fmt: skip
            except Exception as error:  # noqa: BLE001 - told, and the rest goes on
                text = f"{name}, batch {batch}: {type(error).__name__}: {str(error)[:500]}"
                report["errors"].append(text)
                say(f"{text}\n{traceback.format_exc()}")
            gc.unfreeze()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        del model
    report["seconds"] = time.monotonic() - began
    write_json(report, asked.json)
    say("\n".join([f"{report['device']}, {report['date']}", *NOTES, *report["errors"]]))
    for record in report["cells"]:
        say("\n".join(table(record)))
    return report


def table(record: dict[str, Any]) -> list[str]:
    """What is known of a cell, in lines."""
    lines = [f"== {record['shape']}, batch {record['batch']}"]
    for context in dict.fromkeys(r["context"] for r in record["costs"]):
        for step in ("verify", "draft"):
            of = [r for r in record["costs"] if (r["step"], r["context"]) == (step, context)]
            cells = "".join(f"  {r['tokens']}: {r['ms']:.2f}" for r in of)
            lines.append(f"{step} ms at {context}, by tokens a request:{cells}")
        for r in (r for r in record["costs"] if r["context"] == context and "read_gb" in r):
            rate = 1e3 * r["read_gb"] / r["ms"]
            lines.append(f"one token each reads {r['read_gb']:.2f} GB at least: {rate:.0f} GB/s")
    if record["methods"]:
        lines.append(f"{'method':<10}accepts   tok/s    free  ms/step  gpu ms  us/req exposed  "
                     "tok/cycle  cache model  over none, best")  # fmt: skip
    for m in record["methods"]:
        over = "  ".join(
            f"{name} {ratio:.3f}" + (f" ({low:.3f}-{high:.3f})" if low else "")
            for name, (ratio, low, high) in m["over"].items()
        )
        lines.append(
            f"{m['method']:<10}{m['model_accepts'] or 0:7.2f}{m['tok_per_s']:8.0f}"
            f"{m['tok_per_s_decision_free']:8.0f}{m['step_ms']:9.2f}{m['gpu_ms']:8.2f}"
            f"{m['router_us']:8.1f}{m['router_exposed_us']:8.1f}{m['tokens_a_cycle']:11.2f}"
            f"{m['arms'].get('cache', 0):7.2f}{m['arms'].get('model', 0):6.2f}  {over}"
        )
    return [*lines, *record["errors"]]


def device_of(device: torch.device) -> str:
    """What is measured, in words."""
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB"


def versions() -> dict[str, str]:
    """Of what decides over time."""
    numba = import_module("decoder.compiled").numba

    return {
        "python": platform.python_version(), "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda), "numpy": np.__version__,
        "numba": numba.__version__ if numba else "none",
        "triton": triton.__version__ if triton else "none",
    }  # fmt: skip


def make_sessions(folder: Path, path: Path, say: Say) -> None:
    """Tokenise trace files of ``folder`` into what :func:`read_sessions` takes: of each set some
    sessions, of each session consecutive requests from its middle."""
    from decoder.core.payoff.token_classes import token_classes_of
    from pipelines.embedded import load_tokenizer
    from pipelines.lab.replay.traces import files_of, read

    tokenizer, made = load_tokenizer(None), []
    for file in files_of([folder]):
        sessions: dict[str, list[Any]] = {}
        for trace in read(file, tokenizer).traces:
            if len(trace.prompt) >= 2 * NEW and len(trace.output) >= 16:
                sessions.setdefault(trace.session, []).append(trace)
        for session, traces in list(sessions.items())[:SESSIONS]:
            middle = max((len(traces) - TURNS) // 2, 0)
            made += [(file.stem, session, t) for t in traces[middle : middle + TURNS]]
        say(f"{file.stem}: {len(sessions)} sessions, {len(made)} requests in all")
    parts, offsets, at = [], [], 0
    for _, _, t in made:
        prompt, answer = np.asarray(t.prompt[-PROMPT:]), np.asarray(t.output[:ANSWER])
        offsets.append((at, at + len(prompt), at + len(prompt) + len(answer)))
        parts += [prompt, answer]
        at = offsets[-1][2]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path, tokens=np.concatenate(parts).astype(np.int32), offsets=np.array(offsets),
        names=np.array([f"{name}\t{session}" for name, session, _ in made]),
        classes=token_classes_of(tokenizer),
    )  # fmt: skip
    say(f"{path}: {len(made)} requests, {path.stat().st_size / 2**20:.1f} MiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; exit status 2 after one sentence."""

    def say(text: str) -> None:
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        sys.stdout.flush()

    parser = argparse.ArgumentParser(prog="hvd bench gpu", description=__doc__)
    parser.add_argument("--sessions", type=Path, default=Path("sessions.npz"))
    parser.add_argument("--make-sessions", type=Path, metavar="FOLDER",
                        help="make --sessions of the trace files in FOLDER, and end")  # fmt: skip
    parser.add_argument("--json", type=Path, default=Path("reports/bench/gpu.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default="Llama-3.1-8B,Llama-3.1-70B/TP8")
    parser.add_argument("--batches", default="1,64,8,32", help="two at a time for each shape")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--accepts", default="3.16,2.23", help="means of model drafts")
    parser.add_argument("--k", type=int, default=5, help="tokens of a model draft at most")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=12, help="of each cell, about")
    parser.add_argument("--tokens", type=int, default=1 << 30, help="of a round at most")
    parser.add_argument("--context", type=int, default=PROMPT, help="last tokens of a prompt")
    parser.add_argument("--skip", default=",".join(CHAT), help="sets of the sessions left out")
    parser.add_argument("--no-kernel", action="store_true", help="attention of torch's own")
    a = parser.parse_args(arguments)
    try:
        if a.make_sessions:
            make_sessions(a.make_sessions, a.sessions, say)
            return 0
        if unknown := [*{*words(a.shapes)} - {*SHAPES}, *{*words(a.methods)} - {*METHODS}]:
            raise SettingsError(f"no {unknown[0]!r}: there are {', '.join((*SHAPES, *METHODS))}.")
        accepts = tuple(map(float, words(a.accepts)))
        asked = Options(
            a.sessions, a.json, a.device, words(a.shapes), numbers(a.batches, "--batches"),
            words(a.methods), accepts, a.k, a.minutes, a.rounds, a.tokens, a.context, words(a.skip),
            "a CPU" if a.device == "cpu" else "asked for" if a.no_kernel else "",
        )  # fmt: skip
        with torch.inference_mode():
            run(asked, say)
    except HvdError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

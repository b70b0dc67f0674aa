"""The steps of a decoding cycle that cost device time, each ready to be run again and again.

Inputs are made once and stay where they are; nothing is decided on the host. Which tokens come out
does not matter: a step costs the same whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pipelines.lab.bench.gpu.model import KV, Head, Target, View, random_cache, rotation, tree_bias
from pipelines.lab.bench.gpu.shapes import Shape

Step = Callable[[], Tensor]
NEW: Final = 3
"""Positions the drafter has to read before it drafts: about what a cycle commits."""
TREE_TOKENS, TREE_DEPTH, TREE_TOP_K = 32, 8, 4
"""The paper's tree (Table 7)."""


@dataclass(frozen=True)
class Bench:
    """A target, its head and caches that hold ``context`` tokens of ``batch`` requests."""

    target: Target
    head: Head
    caches: list[KV]
    head_cache: KV
    batch: int
    context: int

    @property
    def shape(self) -> Shape:
        """Of the target."""
        return self.target.shape

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.head_cache.keys.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and caches."""
        return self.head_cache.keys.dtype

    def _view(self, start: int, positions: Tensor, bias: Tensor | None = None) -> View:
        cos, sin = rotation(self.shape, positions)
        return View(start, cos.to(self.dtype), sin.to(self.dtype), bias)

    def _positions(self, start: int, count: int) -> Tensor:
        return torch.arange(start, start + count, device=self.device)

    def _ids(self, tokens: int, vocabulary: int) -> Tensor:
        return torch.randint(vocabulary, (self.batch, tokens), device=self.device)

    def _bias(self, seen: Tensor, start: int) -> Tensor:
        groups = self.shape.heads // self.shape.kv_heads
        return tree_bias(seen.to(self.device), start, groups, self.dtype)

    def verify(self, tokens: int) -> Step:
        """Read ``tokens`` in a row and take the likeliest token after each."""
        ids = self._ids(tokens, self.shape.vocabulary)
        view = self._view(self.context, self._positions(self.context, tokens))
        return lambda: self.target(ids, view, self.caches).argmax(-1)

    def verify_tree(self) -> Step:
        """Read the last committed token and a tree of ``TREE_TOKENS`` behind it."""
        parents = [-1, *((node - 1) // TREE_TOP_K for node in range(1, TREE_TOKENS + 1))]
        seen = torch.eye(TREE_TOKENS + 1, dtype=torch.bool)
        depths = [0] * (TREE_TOKENS + 1)
        for node in range(1, TREE_TOKENS + 1):
            seen[node] |= seen[parents[node]]
            depths[node] = depths[parents[node]] + 1
        ids = self._ids(TREE_TOKENS + 1, self.shape.vocabulary)
        positions = self.context + torch.tensor(depths, device=self.device)
        view = self._view(self.context, positions, self._bias(seen, self.context))
        return lambda: self.target(ids, view, self.caches).argmax(-1)

    def _extend(self) -> Step:
        """The head reads what the last cycle committed; gives the state it drafts from."""
        ids = self._ids(NEW, self.shape.vocabulary)
        width = self.shape.aux_layers * self.shape.hidden
        aux = torch.randn(self.batch, NEW, width, device=self.device, dtype=self.dtype)
        view = self._view(self.context, self._positions(self.context, NEW))
        embed = self.target.model.embed_tokens

        def run() -> Tensor:
            out: Tensor = self.head(embed(ids), self.head.fc(aux), view, self.head_cache)
            return out[:, -1:]

        return run

    def draft(self, k: int) -> Step:
        """Draft a chain of ``k`` tokens; 0 only reads what was committed.

        A draft id stands for the target id of the same number: the table that maps one to the other
        is one gather and left out.
        """
        extend, embed = self._extend(), self.target.model.embed_tokens
        start = self.context + NEW
        views = [self._view(start + i, self._positions(start + i, 1)) for i in range(k - 1)]

        def run() -> Tensor:
            hidden = extend()
            drafted = [hidden]
            for step in range(k):
                token = self.head.logits(hidden).argmax(-1)
                drafted.append(token)
                if step < k - 1:
                    hidden = self.head(embed(token), hidden, views[step], self.head_cache)
            return drafted[-1]

        return run

    def draft_tree(self) -> Step:
        """Grow the paper's tree: four nodes a level, eight levels, the best 32 of all kept."""
        k, extend, embed = TREE_TOP_K, self._extend(), self.target.model.embed_tokens
        start = self.context + NEW
        views = []
        for level in range(TREE_DEPTH - 1):
            seen = torch.eye(k, dtype=torch.bool).repeat(1, level + 1)
            positions = torch.full((k,), start + level, device=self.device)
            views.append(self._view(start + level * k, positions, self._bias(seen, start)))

        def run() -> Tensor:
            root = extend()
            best = self.head.logits(root).float().log_softmax(-1).topk(k)
            tokens, scores = best.indices[:, 0], best.values[:, 0]
            hidden, all_scores = root.expand(-1, k, -1), [scores]
            for view in views:
                out = self.head(embed(tokens), hidden, view, self.head_cache)
                best = self.head.logits(out).float().log_softmax(-1).topk(k)
                grown = (scores[..., None] + best.values).flatten(1)
                all_scores.append(grown)
                kept = grown.topk(k)
                scores = kept.values
                tokens = best.indices.flatten(1).gather(1, kept.indices)
                parents = (kept.indices // k)[..., None].expand(-1, -1, out.shape[-1])
                hidden = out.gather(1, parents)
            return torch.cat(all_scores, 1).topk(TREE_TOKENS).indices

        return run


def room(most_tokens: int) -> int:
    """Cache positions needed beyond the context for any step of up to ``most_tokens``."""
    return max(most_tokens, 1 + TREE_TOKENS, NEW + TREE_DEPTH * TREE_TOP_K)


def prepared(target: Target, head: Head, batch: int, context: int, most_tokens: int) -> Bench:
    """Caches for ``batch`` requests of ``context`` tokens, filled at random."""
    weight = target.lm_head.weight
    capacity = context + room(most_tokens)

    def cache() -> KV:
        return random_cache(target.shape, batch, capacity, weight.device, weight.dtype)

    caches = [cache() for _ in range(target.shape.layers)]
    return Bench(target, head, caches, cache(), batch, context)


def bytes_needed(shape: Shape, batch: int, context: int, most_tokens: int, itemsize: int) -> int:
    """Device memory of :func:`prepared` and the largest step, weights left out."""
    one_more = shape.layers + 1
    caches = shape.kv_values * one_more // shape.layers * batch * (context + room(most_tokens))
    rows = batch * most_tokens
    states = rows * (2 * shape.vocabulary + 4 * shape.intermediate + 8 * shape.hidden)
    return (caches + states) * itemsize

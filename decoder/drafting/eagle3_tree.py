"""The drafter's tree (EAGLE-2, arXiv 2406.16858, section 4): grow by confidence, keep the best.

Each level expands the ``top_k`` nodes with the highest cumulative log-probability into ``top_k``
children each; of all nodes ever drafted, the ``tokens`` with the highest are verified. A child is
never more probable than its parent, so what is kept is a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from decoder.drafting.eagle3 import KV, Eagle3Head
from decoder.drafting.tree import ROOT, DraftTree


@dataclass(frozen=True)
class TreeShape:
    """``tokens`` verified at most, in at most ``depth`` levels, ``top_k`` nodes expanded a level.

    The root, which is committed already, counts in neither number.
    """

    tokens: int
    depth: int
    top_k: int


PAPER_TREE: Final = TreeShape(tokens=32, depth=8, top_k=4)
"""Table 7 of the paper."""


@torch.inference_mode()
def grow(
    head: Eagle3Head, embedding: nn.Module, hidden: Tensor, committed: KV, shape: TreeShape
) -> DraftTree:
    """Draft a tree from what :meth:`Eagle3Head.extend` returned.

    Args:
        embedding: the target's, ids -> (tokens, hidden).
        hidden: (1, hidden) at the last committed position.
        committed: cache of all committed positions; not modified.
    """
    start, device = committed.keys.shape[1], hidden.device
    tokens, scores = _children(head, hidden, torch.zeros(1, device=device), shape.top_k)
    level = _Level(tokens.flatten(), torch.full_like(tokens.flatten(), ROOT), scores.flatten())
    levels, first = [level], 0
    hidden, cache = hidden.expand(len(level.tokens), -1), committed
    slots: dict[int, int] = {}  # expanded node -> its place in the cache behind the committed ones
    seen = torch.zeros(0, 0, dtype=torch.bool, device=device)  # slots seeing slots
    for depth in range(1, shape.depth):
        best = level.scores.topk(min(shape.top_k, len(level.scores)))
        chosen, nodes = best.indices, best.indices + first
        seen = _seen(seen, [slots.get(p, ROOT) for p in level.parents[chosen].tolist()])
        slots |= {node: len(slots) + i for i, node in enumerate(nodes.tolist())}
        visible = torch.cat((seen.new_ones(len(chosen), start), seen[-len(chosen) :]), 1)
        positions = torch.full((len(chosen),), start - 1 + depth, device=device)
        out, cache = head.advance(
            embedding(level.tokens[chosen]), hidden[chosen], positions, cache, visible
        )
        tokens, scores = _children(head, out, best.values, shape.top_k)
        first += len(level.tokens)
        each = tokens.shape[1]
        level = _Level(tokens.flatten(), nodes.repeat_interleave(each), scores.flatten())
        levels.append(level)
        hidden = out.repeat_interleave(each, 0)
    return _best(levels, shape.tokens)


class _Level(NamedTuple):
    """Nodes drafted at one depth, numbered through all levels; each tensor is (nodes,)."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor


def _children(head: Eagle3Head, hidden: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest tokens after each state and their cumulative scores, each (n, k)."""
    logs = head.logits(hidden).float().log_softmax(-1)
    best = logs.topk(min(k, logs.shape[-1]), -1)
    return best.indices + head.d2t[best.indices], scores[:, None] + best.values


def _seen(inside: Tensor, parents: list[int]) -> Tensor:
    """``inside`` (n, n) with one more row and column for each of ``parents``, slots or ``ROOT``."""
    n, more = len(inside), len(parents)
    out = inside.new_zeros(n + more, n + more)
    out[:n, :n] = inside
    for row, parent in enumerate(parents, n):
        if parent != ROOT:
            out[row, :n] = inside[parent]
        out[row, row] = True
    return out


def _best(levels: list[_Level], count: int) -> DraftTree:
    """The ``count`` nodes of highest score, renumbered in the order they were drafted."""
    tokens, parents, scores = (torch.cat(part) for part in zip(*levels, strict=True))
    # stable: at equal scores the parent, drafted earlier, comes first
    kept = scores.sort(descending=True, stable=True).indices[:count].sort().values.tolist()
    place = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
    names, above = tokens.tolist(), parents.tolist()
    return DraftTree([names[n] for n in kept], [place[above[n]] for n in kept])

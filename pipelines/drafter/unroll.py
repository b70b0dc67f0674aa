"""Training-time test: the head drafts from its own output while it learns (EAGLE-3, section 3.2).

Sequences are packed end to end. A *chain* starts at a row ``p``: step 0 reads the target's states
at ``p``, step ``j`` the head's own output of step ``j - 1``, with the true token ``p + 1 + j``
beside it. Its attention sees what serving would have in the cache: the step-0 keys of positions up
to ``p``, then the chain's own keys. So chains are independent of each other, and any subset of
rows can be unrolled for the price of that subset; only the step-0 keys need every position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decoder.drafting.eagle3 import KV, Eagle3Head


@dataclass(frozen=True)
class Pack:
    """Whole sequences end to end; ``spans`` holds the (begin, end) of each."""

    tokens: Tensor
    """int64 (tokens,)"""
    embeds: Tensor
    """float32 (tokens, hidden): the target's embeddings of ``tokens``."""
    aux: Tensor
    """float32 (tokens, layers * hidden)"""
    final: Tensor
    """float32 (tokens, hidden): the target's normed last state."""
    spans: tuple[tuple[int, int], ...]

    @property
    def positions(self) -> Tensor:
        """int64 (tokens,): place within the own sequence."""
        return torch.cat([torch.arange(end - begin) for begin, end in self.spans])

    @property
    def ends(self) -> Tensor:
        """int64 (tokens,): end of the own sequence."""
        return torch.cat([torch.full((end - begin,), end) for begin, end in self.spans])


class Step(NamedTuple):
    """What the chains starting at ``rows`` predict; the target's view of it is at ``labels``."""

    rows: Tensor
    """int64 (n,) ascending"""
    labels: Tensor
    """int64 (n,): rows of ``Pack.final`` that predict the same token"""
    logits: Tensor
    """(n, draft vocabulary)"""


def _attend(
    queries: Tensor, rows: Tensor, base: KV, own: list[KV], spans: tuple[tuple[int, int], ...]
) -> Tensor:
    """Attention of chains over their sequence's step-0 keys up to ``rows`` and their own keys.

    ``queries`` and the result are (heads, n, head_dim), each of ``own`` (kv_heads, n, head_dim).
    """
    kv_heads = base.keys.shape[0]
    grouped = queries.unflatten(0, (kv_heads, -1)) * queries.shape[-1] ** -0.5
    bounds = torch.searchsorted(rows, torch.tensor(spans)).tolist()
    out = []
    for (begin, end), (first, last) in zip(spans, bounds, strict=True):
        if first == last:
            continue
        q = grouped[:, :, first:last]
        seen = torch.arange(begin, end) <= rows[first:last, None]
        scores = q @ base.keys[:, None, begin:end].transpose(-1, -2)
        scores = [scores.masked_fill(~seen, float("-inf"))]
        scores += [(q * kv.keys[:, None, first:last]).sum(-1, keepdim=True) for kv in own]
        weights = torch.cat(scores, -1).float().softmax(-1)
        attended = weights[..., : end - begin] @ base.values[:, None, begin:end]
        for i, kv in enumerate(own):
            at = end - begin + i
            attended = attended + weights[..., at : at + 1] * kv.values[:, None, first:last]
        out.append(attended)
    return torch.cat(out, 2).flatten(0, 1)


def unroll(
    head: Eagle3Head,
    pack: Pack,
    rows: Tensor,
    steps: int,
    thin: Callable[[int, Tensor], Tensor] = lambda _, rows: torch.ones_like(rows, dtype=torch.bool),
) -> Iterator[Step]:
    """Unroll the chains that start at ``rows`` (int64, ascending) for up to ``steps`` steps.

    A chain stops where its sequence does; ``thin(step, rows)`` says which of the others go on.
    """
    attention, layer = head.midlayer.self_attn, head.midlayer
    positions, ends = pack.positions, pack.ends
    following = pack.embeds.roll(-1, 0)  # the last row of a sequence starts no chain
    mixed_hidden = head.fc(pack.aux).float()  # the residual stream, whatever the products are in
    mixed = layer.mixed(following, mixed_hidden)
    base = attention.keys_values(mixed, positions)
    hidden, own = mixed_hidden[rows], list[KV]()
    for step in range(steps):
        go_on = (rows + 1 + step < ends[rows]) & thin(step, rows)
        if not bool(go_on.all()):
            rows, hidden = rows[go_on], hidden[go_on]
            own = [KV(kv.keys[:, go_on], kv.values[:, go_on]) for kv in own]
        if not len(rows):
            return
        at = positions[rows] + step
        if step == 0:
            x = mixed[rows]
        else:
            x = layer.mixed(pack.embeds[rows + 1 + step], hidden)
            own.append(attention.keys_values(x, at))
        attended = _attend(attention.queries(x, at), rows, base, own, pack.spans)
        hidden = layer.after_attention(hidden, attended)
        yield Step(rows, rows + 1 + step, head.lm_head(head.norm(hidden)))

"""What a head would have had accepted at every position of a known text, in one batched pass.

A drafted token counts only while all before it were right, and then it is the text's own: so every
chain can be fed the text. Each attends to the head's cache of the positions committed when it
started, and to its own drafted steps, as in serving.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from decoder.drafting.eagle3 import KV, Eagle3Head

ROWS: Final = 512
"""Chains run together: their attention scores over 16k positions stay below a gigabyte."""


@torch.inference_mode()
def accepted_lengths(
    head: Eagle3Head, embedding: nn.Module, tokens: Tensor, aux: Tensor, rows: Tensor, k: int
) -> list[int]:
    """Accepted tokens of the greedy chain of ``k`` that starts at each of ``rows``.

    Args:
        embedding: the target's, ids -> (tokens, hidden).
        tokens: int64 (n,) the text.
        aux: (n - 1 or more, layers * hidden) the target's states at its positions.
        rows: int64, ascending; a chain at row ``p`` knows ``tokens[: p + 2]`` and drafts what
            follows.
    """
    followers = embedding(tokens[1:])
    hidden = head.fc(aux[: len(followers)])
    x = head.midlayer.mixed(followers, hidden)
    positions = torch.arange(len(followers), device=tokens.device)
    base = head.midlayer.self_attn.keys_values(x, positions)
    accepted: list[int] = []
    for some in rows.split(ROWS):
        accepted += _unroll(head, followers, tokens, hidden, x, base, some, k).tolist()
    return accepted


def _unroll(
    head: Eagle3Head,
    followers: Tensor,
    tokens: Tensor,
    hidden: Tensor,
    x: Tensor,
    base: KV,
    rows: Tensor,
    k: int,
) -> Tensor:
    """Accepted length of the chains at ``rows``, int64; each step runs those still right."""
    layer, targets = head.midlayer, head.target_ids
    lengths = torch.zeros_like(rows)
    alive = torch.arange(len(rows), device=rows.device)
    hidden, x, own = hidden[rows], x[rows], list[KV]()
    for step in range(k):
        at = rows[alive] + step
        if step:
            x = layer.mixed(followers[at], hidden)
            own.append(layer.self_attn.keys_values(x, at))
        attended = _attend(layer.self_attn.queries(x, at), rows[alive], base, own)
        hidden = layer.after_attention(hidden, attended)
        drafted = targets[head.logits(hidden).argmax(-1)]
        wanted = at + 2
        right = wanted < len(tokens)
        right &= drafted == tokens[wanted.clamp(max=len(tokens) - 1)]
        alive, hidden = alive[right], hidden[right]
        own = [KV(kv.keys[:, right], kv.values[:, right]) for kv in own]
        lengths[alive] += 1
        if not len(alive):
            break
    return lengths


def _attend(queries: Tensor, rows: Tensor, base: KV, own: list[KV]) -> Tensor:
    """Attention over the base up to each row and the chain's own steps.

    ``queries`` and the result are (heads, n, head_dim), each of ``own`` (kv_heads, n, head_dim).
    """
    kv_heads, reach = base.keys.shape[0], int(rows.max()) + 1
    grouped = queries.unflatten(0, (kv_heads, -1)) * queries.shape[-1] ** -0.5
    seen = torch.arange(reach, device=rows.device) <= rows[:, None]
    scores = grouped @ base.keys[:, None, :reach].transpose(-1, -2)
    columns = [scores.masked_fill(~seen, float("-inf"))]
    columns += [(grouped * kv.keys[:, None]).sum(-1, keepdim=True) for kv in own]
    weights = torch.cat(columns, -1).softmax(-1)
    attended = weights[..., :reach] @ base.values[:, None, :reach]
    for i, kv in enumerate(own, reach):
        attended = attended + weights[..., i : i + 1] * kv.values[:, None]
    return attended.flatten(0, 1)

"""What a head drafts at every position of a known text, in one batched pass.

Each chain attends to the head's cache of the positions committed when it started, and to its own
drafted steps, as in serving.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from decoder.drafting.eagle3 import KV, Eagle3Head

ROWS: Final = 512
"""Chains run together: their attention scores over 16k positions stay below a gigabyte."""


@torch.inference_mode()
def chains(
    head: Eagle3Head, embedding: nn.Module, tokens: Tensor, aux: Tensor, rows: Tensor, k: int
) -> Tensor:
    """The greedy chains of ``k`` tokens that start at ``rows``: target ids, int64 (rows, k).

    Args:
        embedding: the target's, ids -> (tokens, hidden).
        tokens: int64 (n,) the text.
        aux: (n - 1 or more, layers * hidden) the target's states at its positions.
        rows: int64; a chain at row ``p`` knows ``tokens[: p + 2]`` and drafts what follows.
    """
    followers = embedding(tokens[1:])
    hidden = head.fc(aux[: len(followers)])
    x = head.midlayer.mixed(followers, hidden)
    positions = torch.arange(len(followers), device=tokens.device)
    base = head.midlayer.self_attn.keys_values(x, positions)
    parts = [_unroll(head, embedding, hidden[r], x[r], base, r, k) for r in rows.split(ROWS)]
    return torch.cat(parts)


def _unroll(
    head: Eagle3Head,
    embedding: nn.Module,
    hidden: Tensor,
    x: Tensor,
    base: KV,
    rows: Tensor,
    k: int,
) -> Tensor:
    layer, own, drafted = head.midlayer, list[KV](), list[Tensor]()
    for step in range(k):
        at = rows + step
        if step:
            x = layer.mixed(embedding(drafted[-1]), hidden)
            own.append(layer.self_attn.keys_values(x, at))
        attended = _attend(layer.self_attn.queries(x, at), rows, base, own)
        hidden = layer.after_attention(hidden, attended)
        best = head.logits(hidden).argmax(-1)
        drafted.append(best + head.d2t[best])
    return torch.stack(drafted, 1)


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

"""Teaching the head to copy: attention that finds where the newest token stood before.

At position ``p`` the head has read token ``p + 1`` and predicts token ``p + 2``. Where an earlier
position ``j`` holds the same token at ``j`` and the wanted one at ``j + 1``, attending to ``j``
gives the answer away: its key knows token ``j`` (from the first auxiliary layer) and its value
token ``j + 1`` (an "induction head", arXiv 2209.11895). A small run does not find this by itself:
a *copier*, one query head of each group, starts as a matcher of tokens and is supervised a while.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from decoder.drafting.eagle3 import Eagle3Head
from pipelines.lab.drafter.unroll import Pack, read

MATCH, SHARE = 12.0, 0.7
"""Attention logit of a match at the start; share of a key's size that is added to it."""


def copiers(head: Eagle3Head) -> list[int]:
    """The query heads that copy: one in the group of each key head, here and there."""
    c = head.config
    group = c.num_attention_heads // c.num_key_value_heads
    return [g * group + (1, 0, 2)[g % 3] % group for g in range(c.num_key_value_heads)]


def _slow_dims(head: Eagle3Head) -> Tensor:
    """Places in a key that rotate so slowly that they compare alike at any distance: int64."""
    half = head.config.head_dim // 2
    slow = torch.arange(half // 2, half)
    return torch.cat((slow, slow + half))


def _solve(x: Tensor, wanted: Tensor, ridge: float | Tensor) -> Tensor:
    gram = x.T @ x + ridge * len(x) * torch.eye(x.shape[1])
    out: Tensor = torch.linalg.solve(gram, x.T @ wanted)
    return out


@torch.no_grad()
def start_copiers(head: Eagle3Head, batch: Pack) -> None:
    """Let copiers match token identities, by linear regression on ``batch``; changes ``head``.

    The identity of a token is a random projection of its whitened embedding. Keys get it on top of
    what they hold; of the copiers' queries nothing else remains.
    """
    attention, hidden = head.midlayer.self_attn, head.config.hidden_size
    dims, size = _slow_dims(head), head.config.head_dim
    inner = torch.cat([torch.arange(begin + 1, end) for begin, end in batch.spans])
    asked, mixed = head.midlayer.input_layernorm(batch.embeds)[inner], read(head, batch)[1][inner]
    known, keys = mixed[:, hidden:], attention.k_proj(mixed)
    values, vectors = torch.linalg.eigh(asked.T @ asked / len(inner))
    white = (vectors * values.rsqrt())[:, -4 * len(dims) :]
    for g, copier in enumerate(copiers(head)):
        ask = white @ torch.linalg.qr(torch.randn(white.shape[1], len(dims))).Q
        wanted = asked @ ask
        answer = _solve(known, wanted, 1e-3)
        there = keys[:, g * size + dims].square().mean().sqrt()
        scale = SHARE * there / (known @ answer).square().mean().sqrt()
        match = ((known @ answer) * wanted).sum(-1).mean() * scale * size**-0.5
        query = torch.zeros(size, 2 * hidden)
        query[dims, :hidden] = (MATCH / match * ask).T
        attention.q_proj.weight[copier * size : (copier + 1) * size] = query
        attention.k_proj.weight[g * size + dims, hidden:] += (scale * answer).T


def copying_loss(head: Eagle3Head, batch: Pack) -> Tensor:
    """Cross-entropy of the copiers' attention, over all positions of ``batch``.

    Wanted: every earlier occurrence of token ``p + 1`` that token ``p + 2`` followed; where there
    is none, the first position of the conversation.
    """
    attention, mixed = head.midlayer.self_attn, read(head, batch)[1]
    queries = attention.queries(mixed, batch.positions)[copiers(head)] * head.config.head_dim**-0.5
    keys = attention.keys_values(mixed, batch.positions).keys
    total, count = torch.zeros(()), 0
    for begin, end in batch.spans:
        n = end - begin - 2
        t = batch.tokens[begin:end]
        scores = queries[:, begin : begin + n] @ keys[:, begin : begin + n].transpose(-1, -2)
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        scores = scores.float().masked_fill(~seen, float("-inf")).log_softmax(-1)
        wanted = (t[:n] == t[1 : n + 1, None]) & (t[1 : n + 1] == t[2 : n + 2, None]) & seen
        wanted[~wanted.any(-1), 0] = True
        mass = scores.masked_fill(~wanted, float("-inf")).logsumexp(-1)
        total, count = total - mass.mean(0).sum(), count + n
    return total / count


@torch.no_grad()
def connect_copiers(head: Eagle3Head, batch: Pack, strength: float) -> None:
    """Let what copiers attend to raise the logit of the token they copy; changes ``head``.

    Linear regression on ``batch``, from values to rows of ``lm_head``. ``strength`` is the size of
    what a certain copy adds, relative to the stream's own: 1 breaks the head.
    """
    attention, size = head.midlayer.self_attn, head.config.head_dim
    stream, mixed = read(head, batch)
    inner = torch.cat([torch.arange(begin + 1, end - 1) for begin, end in batch.spans])
    tokens = batch.tokens.roll(-1, 0)[inner]
    inner, tokens = inner[head.t2d[tokens]], tokens[head.t2d[tokens]]
    rows = head.lm_head.weight[torch.searchsorted(head.target_ids, tokens)] * head.norm.weight
    x = attention.v_proj(mixed[inner])
    out = _solve(x, rows - rows.mean(0), 1e-3 * x.square().mean())
    out *= strength * stream[inner].square().mean().sqrt() / (x @ out).square().mean().sqrt()
    for g, copier in enumerate(copiers(head)):
        columns = slice(copier * size, (copier + 1) * size)
        attention.o_proj.weight[:, columns] = out[g * size : (g + 1) * size].T


def learn_to_copy(head: Eagle3Head, batches: Iterator[Pack], strength: float = 0.1) -> None:
    """Start copiers and train their attention alone, one step a batch; changes ``head``.

    The first batch serves the regressions: some ten thousand tokens or more.
    """
    first = next(batches)
    start_copiers(head, first)
    attention, size, slow = head.midlayer.self_attn, head.config.head_dim, _slow_dims(head)
    weights = [attention.q_proj.weight, attention.k_proj.weight]
    learning = [torch.zeros_like(weight) for weight in weights]
    for g, copier in enumerate(copiers(head)):
        learning[0][copier * size : (copier + 1) * size] = 1
        learning[1][g * size + slow] = 1
    optimizer = torch.optim.Adam(weights, lr=1.5e-3, betas=(0.9, 0.95))
    for batch in batches:
        gradients = torch.autograd.grad(copying_loss(head, batch), weights)
        for weight, gradient, mask in zip(weights, gradients, learning, strict=True):
            weight.grad = gradient * mask
        optimizer.step()
    head.zero_grad()
    connect_copiers(head, first, strength)

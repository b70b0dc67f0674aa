"""Training-time test: the head drafts from its own output while it learns (EAGLE-3, section 3.2).

Conversations are packed end to end. A *chain* starts at a row ``p``: step 0 reads the target's
states at ``p``, step ``j`` the head's own output of step ``j - 1``, with the true token ``p + 1 +
j`` beside it. Its attention sees what serving would have in the cache: the step-0 keys of positions
up to ``p``, then the chain's own keys. So any rows can be unrolled for the price of these alone.

Before that the head is taught to copy: attention that finds where the newest token stood before. At
position ``p`` it has read token ``p + 1`` and predicts token ``p + 2``. Where an earlier position
``j`` holds the same token at ``j`` and the wanted one at ``j + 1``, attending to ``j`` gives the
answer away: its key knows token ``j`` (from the first auxiliary layer) and its value token ``j +
1`` (an "induction head", arXiv 2209.11895). A small run does not find this by itself: a *copier*,
one query head of each group, starts as a matcher of tokens and is supervised a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pipelines.lab.drafter.head import KV, Eagle3Head
from pipelines.reports import atomic_write

AUX_LAYERS = (2, 15, 28)
"""As vLLM counts: ``i`` is the residual stream entering layer ``i``."""


class Conversation(NamedTuple):
    """``tokens`` (int64), the first ``prompt`` of them before the answer, and the target's states:
    ``aux``, bf16 (tokens, layers * hidden), entered its :data:`AUX_LAYERS`; ``final``, bf16
    (tokens, hidden), left its final norm.
    """

    tokens: Tensor
    prompt: int
    greedy: bool
    aux: Tensor
    final: Tensor

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt


Conversations = list[Conversation]


def shards(folder: Path) -> list[Path]:
    """The shards of a folder, named by their number and the tokens of answers that they hold."""
    return sorted(folder.glob("[0-9]*-[0-9]*.pt"))


def write_shard(folder: Path, number: int, kept: Conversations) -> None:
    """Write one shard, whole or not at all."""
    name = f"{number:05d}-{sum(c.answer for c in kept)}.pt"
    atomic_write(folder / name, lambda part: torch.save([tuple(c) for c in kept], part))


def read_shards(folder: Path) -> Conversations:
    """All conversations of a folder, in the order in which they were written."""
    loaded = (torch.load(path, mmap=True, weights_only=True) for path in shards(folder))
    return [Conversation(*c) for some in loaded for c in some]


@dataclass(frozen=True)
class Pack:
    """Whole conversations end to end; ``spans`` holds the (begin, end) of each.

    ``tokens`` (int64), their embeddings and the target's normed last states (float32, hidden) and
    its aux states (float32, layers * hidden) have a row for each token.
    """

    tokens: Tensor
    embeds: Tensor
    aux: Tensor
    final: Tensor
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, some: Conversations, embedding: Tensor, scale: Tensor) -> Pack:
        """Put ``some`` end to end; ``scale`` (layers * hidden) divides their aux states."""
        ends = torch.tensor([len(c.tokens) for c in some]).cumsum(0).tolist()
        tokens = torch.cat([c.tokens for c in some])
        return cls(
            tokens,
            functional.embedding(tokens, embedding),
            torch.cat([c.aux for c in some]).float() / scale,
            torch.cat([c.final for c in some]).float(),
            tuple(zip([0, *ends[:-1]], ends, strict=True)),
        )

    @property
    def positions(self) -> Tensor:
        """int64 (tokens,): place within the own conversation."""
        return torch.cat([torch.arange(end - begin) for begin, end in self.spans])


def read(head: Eagle3Head, pack: Pack) -> tuple[Tensor, Tensor]:
    """Residual stream (tokens, hidden) and attention's input (tokens, 2 * hidden) at step 0."""
    stream = head.fc(pack.aux).float()  # whatever the products are in
    return stream, head.midlayer.mixed(pack.embeds.roll(-1, 0), stream)


def _attend(
    queries: Tensor, rows: Tensor, base: KV, own: list[KV], spans: tuple[tuple[int, int], ...]
) -> Tensor:
    """Attention (heads, n, head_dim) of chains over step-0 keys up to ``rows`` and their own."""
    grouped = queries.unflatten(0, (len(base.keys), -1)) * queries.shape[-1] ** -0.5
    bounds = torch.searchsorted(rows, torch.tensor(spans)).tolist()
    out = []
    for (begin, end), (first, last) in zip(spans, bounds, strict=True):
        q = grouped[:, :, first:last]
        seen = torch.arange(begin, end) <= rows[first:last, None]
        scores = q @ base.keys[:, None, begin:end].transpose(-1, -2)
        scores = [scores.masked_fill(~seen, float("-inf"))]
        scores += [(q * kv.keys[:, None, first:last]).sum(-1, keepdim=True) for kv in own]
        weights = torch.cat(scores, -1).float().softmax(-1)
        attended = weights[..., : end - begin] @ base.values[:, None, begin:end]
        for at, kv in enumerate(own, end - begin):
            attended = attended + weights[..., at : at + 1] * kv.values[:, None, first:last]
        out.append(attended)
    return torch.cat(out, 2).flatten(0, 1)


def unroll(
    head: Eagle3Head, pack: Pack, rows: Tensor, steps: int, later: float = 1.0
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Unroll the chains that start at ``rows`` (int64, ascending) for up to ``steps`` steps.

    Yields of each step the rows (n,) whose chains got there, the rows of ``Pack.final`` that
    predict the same token, and logits (n, draft vocabulary). A chain stops where its conversation
    does, and but for a random share ``later`` after step 0.
    """
    attention, layer = head.midlayer.self_attn, head.midlayer
    positions = pack.positions
    ends = torch.cat([torch.full((end - begin,), end) for begin, end in pack.spans])
    stream, mixed = read(head, pack)
    base = attention.keys_values(mixed, positions)
    hidden, own = stream[rows], list[KV]()
    for step in range(steps):
        drawn = torch.rand(len(rows)) < (later if step == 1 else 1.0)
        go_on = drawn & (rows + 1 + step < ends[rows])
        rows, hidden = rows[go_on], hidden[go_on]
        own = [KV(kv.keys[:, go_on], kv.values[:, go_on]) for kv in own]
        if not len(rows):
            return
        at, x = positions[rows] + step, mixed[rows]
        if step:
            x = layer.mixed(pack.embeds[rows + 1 + step], hidden)
            own.append(attention.keys_values(x, at))
        attended = _attend(attention.queries(x, at), rows, base, own, pack.spans)
        hidden = layer.after_attention(hidden, attended)
        yield rows, rows + 1 + step, head.lm_head(head.norm(hidden))


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

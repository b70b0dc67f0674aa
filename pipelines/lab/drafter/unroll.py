"""Training-time test: the head drafts from its own output while it learns (EAGLE-3, section 3.2).

Conversations are packed end to end. A *chain* starts at a row ``p``: step 0 reads the target's
states at ``p``, step ``j`` the head's own output of step ``j - 1``, with the true token ``p + 1 +
j`` beside it. Its attention sees what serving would have in the cache: the step-0 keys of positions
up to ``p``, then the chain's own keys. So any rows can be unrolled for the price of these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from decoder.drafting.eagle3 import KV, Eagle3Head
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

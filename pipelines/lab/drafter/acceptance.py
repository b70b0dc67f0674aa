"""How good a head is: greedy cycles simulated over held-out answers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from decoder.drafting.drafts import common_prefix
from decoder.drafting.eagle3 import Eagle3Head
from decoder.drafting.eagle3_teacher import chains
from pipelines.lab.drafter.shards import Conversations

DRAFTED = 4
"""Tokens drafted in a simulated cycle."""


class Acceptance(NamedTuple):
    """How greedy drafts fare on held-out greedy answers: accepted tokens a cycle, and by place."""

    by_step: tuple[float, ...]
    """Share of drafts at each place that match, given that all before them did."""
    accepted: float
    cycles: int


@torch.inference_mode()
def evaluate(head: Eagle3Head, some: Conversations, embedding: Tensor, scale: Tensor) -> Acceptance:
    """Simulate cycles of :data:`DRAFTED` greedy drafts over the greedy ones of ``some``."""
    reached, matched, cycles = [0] * DRAFTED, [0] * DRAFTED, 0
    words = nn.Embedding.from_pretrained(embedding)
    for c in (c for c in some if c.greedy):
        rows = torch.arange(c.prompt - 1, len(c.tokens) - 2)
        drafts = chains(head, words, c.tokens, c.aux.float() / scale, rows, DRAFTED).tolist()
        answer, at = c.tokens[c.prompt + 1 :].tolist(), 0
        while at < len(answer):
            wanted = answer[at : at + DRAFTED]
            n = common_prefix(drafts[at], wanted)
            for place in range(min(n + 1, len(wanted))):
                reached[place] += 1
                matched[place] += place < n
            cycles, at = cycles + 1, at + n + 1
    by_step = tuple(m / max(1, r) for m, r in zip(matched, reached, strict=True))
    return Acceptance(by_step, sum(matched) / max(1, cycles), cycles)

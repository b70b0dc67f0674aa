"""How good a head is: greedy cycles simulated over held-out answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoder.drafting.eagle3 import Eagle3Head
from pipelines.drafter.conversations import pack
from pipelines.drafter.shards import Sequence
from pipelines.drafter.unroll import unroll

DRAFTED = 4
"""Tokens drafted in a simulated cycle."""


@dataclass(frozen=True)
class Acceptance:
    """How greedy drafts fare on held-out greedy answers."""

    by_step: tuple[float, ...]
    """Share of drafts at each place that match, given that all before them did."""
    accepted: float
    """Mean accepted tokens of a cycle with :data:`DRAFTED` drafts, cycles simulated in order."""
    cycles: int

    @property
    def metrics(self) -> dict[str, float]:
        """As flat numbers for a log."""
        steps = {f"acceptance_{i + 1}": a for i, a in enumerate(self.by_step)}
        return steps | {"accepted_per_cycle": self.accepted}


@torch.inference_mode()
def evaluate(
    head: Eagle3Head, sequences: list[Sequence], embedding: Tensor, scale: Tensor
) -> Acceptance:
    """Simulate cycles of :data:`DRAFTED` greedy drafts over the greedy ones of ``sequences``."""
    reached, matched = [0] * DRAFTED, [0] * DRAFTED
    cycles = accepted = 0
    targets = head.target_ids
    for s in (s for s in sequences if s.greedy and len(s.tokens) > s.prompt + 1):
        batch = pack([s], embedding, scale)
        rows = torch.arange(s.prompt - 1, len(s.tokens) - 1)
        lengths = torch.zeros(len(s.tokens), dtype=torch.int64)
        for j, step in enumerate(unroll(head, batch, rows, DRAFTED)):
            known = step.labels + 1 < len(s.tokens)
            rows, drafts = step.rows[known], targets[step.logits.argmax(-1)[known]]
            right = (s.tokens[step.labels[known] + 1] == drafts) & (lengths[rows] == j)
            lengths[rows[right]] += 1
        at = s.prompt - 1
        while at + 2 < len(s.tokens):
            n = int(lengths[at])
            for j in range(min(n + 1, DRAFTED, len(s.tokens) - at - 2)):
                reached[j] += 1
                matched[j] += j < n
            cycles, accepted, at = cycles + 1, accepted + n, at + n + 1
    rates = tuple(m / max(1, r) for m, r in zip(matched, reached, strict=True))
    return Acceptance(rates, accepted / max(1, cycles), cycles)

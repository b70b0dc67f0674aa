"""Acceptance by rejection sampling: how much of a draft is committed, and the bonus token.

Drafts are deterministic given the prefix, so this is speculative sampling (arXiv 2211.17192) with a
one-point draft distribution. A drafted token ``x`` is accepted with probability ``p(x)``. Else
``x`` is removed from ``p``, which is renormalised, and the bonus is sampled from it. Committed
tokens have distribution ``p``, whatever was drafted.

*Bonus*: the target's own token after the accepted ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accept_greedy(draft: Sequence[int], choices: Sequence[int]) -> tuple[int, int]:
    """Tokens accepted, and the bonus, by the target's most probable token after the prefix, then
    after each drafted one."""
    accepted = next((i for i, token in enumerate(draft) if token != choices[i]), len(draft))
    return accepted, choices[accepted]


def accept_sampled(
    draft: Sequence[int], probabilities: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    """Tokens accepted, and the bonus, by ``probabilities``, float64 (1 + drafted, vocabulary) on
    the CPU: the target's distribution after the prefix, then after each drafted token. Mutates the
    row of a rejected token, and ``generator``."""
    accepted = len(draft)
    for at, token in enumerate(draft):
        chance = torch.rand((), generator=generator, dtype=torch.float64)
        if chance * probabilities[at].sum() >= probabilities[at, token]:
            probabilities[at, token] = 0.0
            accepted = at
            break
    return accepted, int(torch.multinomial(probabilities[accepted], 1, generator=generator))


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Softmax of (n, vocabulary) logits at ``temperature`` > 0, as float64 on the CPU."""
    return (logits.double().cpu() / temperature).softmax(-1)

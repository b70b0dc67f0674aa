"""Acceptance: how much of a draft the target commits, and the token it adds itself.

Drafts here are deterministic given the prefix, which makes rejection sampling short (speculative
sampling, arXiv 2211.17192, with a one-point draft distribution). A drafted token ``x`` is accepted
with probability ``p(x)``; if not, ``x`` leaves ``p``, which is renormalised, and the token the
target adds comes from what is left. What is committed has distribution ``p`` whatever was drafted.

*Bonus*: the target's own token after what was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.drafting.drafts import common_prefix


def accept_greedy(draft: Sequence[int], choices: Sequence[int]) -> tuple[int, int]:
    """Accept as long as the draft is what the target would choose.

    Args:
        choices: the target's most probable token after the prefix, then after each drafted one.

    Returns:
        tokens accepted, and the bonus.
    """
    accepted = common_prefix(draft, choices)
    return accepted, choices[accepted]


def accept_sampled(
    draft: Sequence[int], probabilities: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    """Rejection sampling along the draft.

    Args:
        probabilities: float64 (1 + drafted, vocabulary) on the CPU, the target's distribution after
            the prefix, then after each drafted token; the row of one that is rejected is mutated.
        generator: of the CPU; advanced.

    Returns:
        tokens accepted, and the bonus.
    """
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

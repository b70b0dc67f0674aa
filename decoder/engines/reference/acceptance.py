"""Acceptance: how much of a draft the target commits, and the token it adds itself.

Drafts here are deterministic given the prefix, which makes rejection sampling short (speculative
sampling, arXiv 2211.17192, with a one-point draft distribution; siblings of a tree hand the
residual from one to the next, as in SpecInfer, arXiv 2305.09781). A drafted token ``x`` is accepted
with probability ``p(x)``; if not, ``x`` leaves ``p``, which is renormalised, and the next sibling
is tried; the token the target adds comes from what is left. What is committed has distribution
``p`` whatever was drafted.

*Path*: the accepted nodes, from the first level down. *Bonus*: the target's own token after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.drafting.tree import ROOT, DraftTree


def accept_greedy(tree: DraftTree, choices: Sequence[int]) -> tuple[list[int], int]:
    """Follow the target's own choices down the tree.

    Args:
        choices: the target's most probable token after the prefix, then after each node.

    Returns:
        path and bonus.
    """
    path: list[int] = []
    at = ROOT
    while True:
        wanted = choices[at + 1]
        below = tree.children.get(at, [])
        at = next((node for node in below if tree.tokens[node] == wanted), ROOT)
        if at == ROOT:
            return path, wanted
        path.append(at)


def accept_sampled(
    tree: DraftTree, probabilities: Tensor, generator: torch.Generator
) -> tuple[list[int], int]:
    """Rejection sampling down the tree.

    Args:
        probabilities: float64 (1 + nodes, vocabulary) on the CPU, the target's distribution after
            the prefix, then after each node; not modified.
        generator: of the CPU; advanced.

    Returns:
        path and bonus.
    """
    path: list[int] = []
    at = ROOT
    while True:
        left = probabilities[at + 1].clone()
        for node in tree.children.get(at, []):
            token = tree.tokens[node]
            chance = torch.rand((), generator=generator, dtype=torch.float64)
            if chance * left.sum() < left[token]:
                path.append(node)
                at = node
                break
            left[token] = 0.0
        else:
            return path, int(torch.multinomial(left, 1, generator=generator))


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Softmax of (n, vocabulary) logits at ``temperature`` > 0, as float64 on the CPU."""
    return (logits.double().cpu() / temperature).softmax(-1)

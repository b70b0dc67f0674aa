"""Draft trees: several continuations verified in one forward pass of the target.

Node ``i`` holds a token; its parent is an earlier node, or the prefix itself. A linear draft is the
tree in which every node has one child, so verification and acceptance know trees only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ROOT = -1
"""Parent of the first tokens: the last committed one."""


@dataclass(frozen=True)
class DraftTree:
    """``parents[i]`` is smaller than ``i``, or ``ROOT``; siblings hold different tokens."""

    tokens: list[int]
    parents: list[int]

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Nodes below each node and below ``ROOT``, in the order they were drafted."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(node)
        return below

    @cached_property
    def depths(self) -> list[int]:
        """1 for the children of ``ROOT``."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    @property
    def linear(self) -> bool:
        """Whether every node has one child, so that causal attention is tree attention."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def ancestry(self) -> Tensor:
        """bool (nodes, nodes): row ``i`` marks node ``i`` and the nodes above it."""
        seen = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                seen[node] |= seen[parent]
        return seen

    def path(self, node: int) -> list[int]:
        """Tokens from the first level down to ``node``."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


def chain(tokens: Sequence[int]) -> DraftTree:
    """A linear draft as a tree."""
    return DraftTree(list(tokens), list(range(-1, len(tokens) - 1)))

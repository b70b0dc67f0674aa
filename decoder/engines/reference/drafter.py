"""What drafts for one request: an EAGLE3 head that follows what is committed, and drafts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from decoder.drafting.eagle3 import KV, Eagle3Head
from decoder.drafting.eagle3_tree import TreeShape, grow
from decoder.drafting.tree import DraftTree, chain


class Drafter:
    """Drafts a chain of ``shape`` tokens, or a tree of that shape.

    What is committed while other arms are chosen is taken into the head's cache when it is next
    asked to draft, in one pass: the same cache as in a pass each cycle (vLLM's drafting of zero
    tokens), for less.
    """

    def __init__(self, head: Eagle3Head, embedding: nn.Module, shape: int | TreeShape) -> None:
        self._head, self._embedding, self._shape = head, embedding, shape
        self._past: KV | None = None
        self._hidden: Tensor | None = None
        self._tokens: list[int] = []
        self._aux: list[Tensor] = []

    def follow(self, tokens: list[int], aux: Tensor) -> None:
        """New committed positions: the target's states there, and the token after each."""
        self._tokens += tokens
        self._aux.append(aux)

    def catch_up(self) -> tuple[Tensor, KV]:
        """Take in what was followed; returns the last state and the cache of all positions."""
        if self._tokens:
            tokens = torch.tensor(self._tokens, device=self._aux[0].device)
            self._hidden, self._past = self._head.extend(
                self._embedding, tokens, torch.cat(self._aux), self._past
            )
            self._tokens, self._aux = [], []
        assert self._hidden is not None and self._past is not None
        return self._hidden, self._past

    def draft(self, room: int) -> DraftTree:
        """A draft of which at most ``room`` > 0 tokens can be committed."""
        hidden, past = self.catch_up()
        if isinstance(self._shape, int):
            k = min(self._shape, room)
            return chain(self._head.chain(self._embedding, hidden, past, k))
        shape = TreeShape(self._shape.tokens, min(self._shape.depth, room), self._shape.top_k)
        return grow(self._head, self._embedding, hidden, past, shape)

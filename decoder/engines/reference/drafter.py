"""Model drafter of one request: an EAGLE3 head with deferred prefill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Drafter:
    """Drafts chains of at most ``length`` tokens.

    Tokens committed while other arms are chosen are prefilled in one pass before the next draft.
    The cache is the same as with one pass a cycle (vLLM's drafting of zero tokens), for less time.
    """

    def __init__(self, head: Any, embedding: nn.Module, length: int) -> None:
        """``head`` is an EAGLE3 head, with ``extend`` and ``chain`` (``pipelines.lab.drafter``)."""
        self._head, self._embedding, self._length = head, embedding, length
        self._past: Any = None  # the head's keys and values
        self._hidden: Tensor | None = None
        self._tokens: list[int] = []
        self._aux: list[Tensor] = []

    def follow(self, tokens: list[int], aux: Tensor) -> None:
        """Add committed positions: the target's states, and the token after each."""
        self._tokens += tokens
        self._aux.append(aux)

    def catch_up(self) -> tuple[Tensor, Any]:
        """Prefill the added positions; returns the last state and the cache of all positions."""
        if self._tokens:
            tokens = torch.tensor(self._tokens, device=self._aux[0].device)
            self._hidden, self._past = self._head.extend(
                self._embedding, tokens, torch.cat(self._aux), self._past
            )
            self._tokens, self._aux = [], []
        assert self._hidden is not None and self._past is not None
        return self._hidden, self._past

    def draft(self, room: int) -> list[int]:
        """A draft of at most ``room`` > 0 tokens."""
        hidden, past = self.catch_up()
        chain = self._head.chain(self._embedding, hidden, past, min(self._length, room))
        return list[int](chain)

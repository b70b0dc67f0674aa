"""Conversations with what the target knew at every token, some to a file (a *shard*)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.settled import settle

AUX_LAYERS = (2, 15, 28)
"""As vLLM counts: ``i`` is the residual stream entering layer ``i``."""


class Conversation(NamedTuple):
    """A prompt and its answer, with the target's states."""

    tokens: Tensor
    """int64 (tokens,)"""
    prompt: int
    """How many of them are prompt."""
    greedy: bool
    aux: Tensor
    """bf16 (tokens, layers * hidden): what enters :data:`AUX_LAYERS`."""
    final: Tensor
    """bf16 (tokens, hidden): after the final norm, what the logits are made of."""

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt


def shards(folder: Path) -> list[Path]:
    """The shards of a folder, named by their number and the tokens of answers that they hold."""
    return sorted(folder.glob("[0-9]*-[0-9]*.pt"))


def write_shard(folder: Path, number: int, kept: list[Conversation]) -> None:
    """Write one shard, whole or not at all."""
    path = folder / f"{number:05d}-{sum(c.answer for c in kept)}.pt"
    settle(path, lambda part: torch.save([tuple(c) for c in kept], part))


def read_shards(folder: Path) -> list[Conversation]:
    """All conversations of a folder, in the order in which they were written."""
    loaded = (torch.load(path, mmap=True, weights_only=True) for path in shards(folder))
    return [Conversation(*c) for some in loaded for c in some]

"""Conversations with what the target knew at every token, some to a file (a *shard*)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

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

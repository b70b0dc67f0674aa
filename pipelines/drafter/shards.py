"""Conversations with what the target knew at every token, stored as shards.

A shard holds conversations end to end::

    tokens   int32 (tokens,)                    prompt + output
    lengths  int32 (conversations,)             tokens of each
    prompts  int32 (conversations,)             of which prompt
    greedy   bool  (conversations,)             the output was decoded at temperature 0
    aux      bf16  (tokens, layers, hidden)     input of each of the layers
    final    bf16  (tokens, hidden)             after the final norm: what the logits are made of
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.settled import settle

AUX_LAYERS = (2, 15, 28)
"""As vLLM counts: ``i`` is the residual stream entering layer ``i``."""


@dataclass(frozen=True)
class Conversation:
    """A prompt and its answer, with the target's states; of several turns all before the last
    answer is prompt.
    """

    tokens: Tensor
    """int64 (tokens,)"""
    prompt: int
    greedy: bool
    aux: Tensor
    """bf16 (tokens, layers * hidden)"""
    final: Tensor
    """bf16 (tokens, hidden)"""


def write_shard(folder: Path, number: int, kept: list[Conversation]) -> None:
    """Write one shard, whole or not at all."""
    final = torch.cat([c.final for c in kept])
    shard = {
        "tokens": torch.cat([c.tokens for c in kept]).int(),
        "lengths": torch.tensor([len(c.tokens) for c in kept], dtype=torch.int32),
        "prompts": torch.tensor([c.prompt for c in kept], dtype=torch.int32),
        "greedy": torch.tensor([c.greedy for c in kept]),
        "aux": torch.cat([c.aux for c in kept]).unflatten(1, (-1, final.shape[1])),
        "final": final,
    }
    path = folder / f"{number:05d}-{len(kept)}.safetensors"
    settle(path, lambda part: save_file(shard, part))


def read_shards(folder: Path) -> list[Conversation]:
    """All conversations of a folder, in the order in which they were written."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        s = load_file(path)
        lengths = s["lengths"].tolist()
        parts = zip(
            s["tokens"].long().split(lengths),
            s["prompts"].tolist(),
            s["greedy"].tolist(),
            s["aux"].flatten(1).split(lengths),
            s["final"].split(lengths),
            strict=True,
        )
        found += [Conversation(*part) for part in parts]
    return found

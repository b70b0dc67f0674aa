"""What the target knew at every token: its hidden states, stored as shards.

A shard holds conversations end to end::

    tokens   int32 (tokens,)                    prompt + output
    lengths  int32 (sequences,)                 tokens of each sequence
    prompts  int32 (sequences,)                 of which prompt
    greedy   bool  (sequences,)                 the output was decoded at temperature 0
    aux      bf16  (tokens, layers, hidden)     input of each aux layer
    final    bf16  (tokens, hidden)             after the final norm: what the logits are made of
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.reports import atomic_write

AUX_LAYERS = (2, 15, 28)
"""As vLLM counts: ``i`` is the residual stream entering layer ``i`` (30: leaving the last one)."""
SEQUENCES = 64
"""Conversations of a shard."""

Conversation = tuple[list[int], int, bool, Tensor, Tensor]
"""Token ids, how many are prompt, greedy or not, aux (tokens, layers, hidden), final."""


def write_shard(out: Path, index: int, kept: list[Conversation], layers: Several[int]) -> None:
    """Write one shard, whole or not at all."""
    shard = {
        "tokens": torch.tensor([t for k in kept for t in k[0]], dtype=torch.int32),
        "lengths": torch.tensor([len(k[0]) for k in kept], dtype=torch.int32),
        "prompts": torch.tensor([k[1] for k in kept], dtype=torch.int32),
        "greedy": torch.tensor([k[2] for k in kept]),
        "aux": torch.cat([k[3] for k in kept]),
        "final": torch.cat([k[4] for k in kept]),
    }
    told = {"layers": json.dumps(sorted(layers))}
    path = out / f"{index:05d}-{len(kept)}.safetensors"
    atomic_write(path, lambda part: save_file(shard, part, told))


@dataclass(frozen=True)
class Sequence:
    """One prompt and its answer, with the target's states (bf16).

    Of several turns all before the last answer is prompt.
    """

    tokens: Tensor
    prompt: int
    greedy: bool
    aux: Tensor
    final: Tensor


@dataclass
class Shards:
    """The shards of a directory, read once each, split by place into training and held-out."""

    path: Path
    aux_layers: tuple[int, ...]
    heldout_every: int
    train: list[Sequence] = field(default_factory=list)
    heldout: list[Sequence] = field(default_factory=list)
    _read: set[str] = field(default_factory=set)

    def refresh(self) -> None:
        """Read the shards that appeared since."""
        for path in sorted(self.path.glob("*.safetensors")):
            if path.stem not in self._read:
                self._read.add(path.stem)
                self._add(path)

    def _add(self, path: Path) -> None:
        with safe_open(path, "pt") as shard:
            stored = json.loads(shard.metadata()["layers"])
        columns = [stored.index(layer) for layer in self.aux_layers]
        s = load_file(path)
        parts = zip(
            s["tokens"].long().split(s["lengths"].tolist()),
            (s["aux"] if columns == list(range(len(stored))) else s["aux"][:, columns])
            .flatten(1)
            .split(s["lengths"].tolist()),
            s["final"].split(s["lengths"].tolist()),
            s["prompts"].tolist(),
            s["greedy"].tolist(),
            strict=True,
        )
        for place, (tokens, aux, final, prompt, greedy) in enumerate(parts):
            sequence = Sequence(tokens, prompt, greedy, aux, final)
            kept = place % self.heldout_every == self.heldout_every // 2
            (self.heldout if kept else self.train).append(sequence)

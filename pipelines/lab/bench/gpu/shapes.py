"""Shapes of the paper's three targets and their EAGLE3 heads (Table 5), and small ones for tests.

Sources: the ``config.json`` of Qwen/Qwen3-8B, Qwen/Qwen3-4B and meta-llama/Llama-3.1-8B-Instruct;
heads are one Llama layer of the target's width over 32,000 draft tokens, as in
yuhuili/EAGLE3-LLaMA3.1-Instruct-8B and the Qwen3 heads made after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipelines.lab.bench.commas import words


@dataclass(frozen=True)
class Shape:
    """What a forward pass costs depends on: sizes of a Llama-like decoder.

    ``qk_norm``: Qwen3 normalises queries and keys of each head. ``aux_layers``: target layers whose
    states the drafter mixes.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int = 32_000
    qk_norm: bool = False
    tied: bool = False
    rope_theta: float = 1e6
    eps: float = 1e-6
    aux_layers: int = 3

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, norms left out."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Parameters of the target, norms left out."""
        tables = 1 if self.tied else 2
        return self.layers * self.layer_parameters + tables * self.vocabulary * self.hidden

    @property
    def read_parameters(self) -> int:
        """Parameters that every forward pass reads: all but the embedding table."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    @property
    def kv_values(self) -> int:
        """Cached numbers of one token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim


PAPER: Final = (
    Shape("Qwen3-8B", 36, 4096, 12288, 32, 8, 128, 151_936, qk_norm=True),
    Shape("Qwen3-4B", 36, 2560, 9728, 32, 8, 128, 151_936, qk_norm=True, tied=True),
    Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128_256, rope_theta=5e5, eps=1e-5),
)
EMBEDDED: Final = Shape(
    "SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49_152, 8_000, tied=True, rope_theta=1e5, eps=1e-5
)
TINY: Final = (
    Shape("tiny-qwen3", 2, 64, 128, 4, 2, 16, 256, 64, qk_norm=True),
    Shape("tiny-llama", 2, 64, 128, 4, 2, 16, 256, 64, rope_theta=1e4, tied=True),
)
GROUPS: Final = {"paper": PAPER, "embedded": (EMBEDDED,), "tiny": TINY}


def named(text: str) -> tuple[Shape, ...]:
    """Groups of :data:`GROUPS` and single shapes, with commas between their names, each once.

    Raises:
        ValueError: there is no such group or shape.
    """
    known = {s.name.lower(): (s,) for group in GROUPS.values() for s in group} | GROUPS
    asked = words(text.lower())
    if unknown := [word for word in asked if word not in known]:
        raise ValueError(f"no shape {', '.join(unknown)}: choose from {', '.join(known)}.")
    return tuple(dict.fromkeys(shape for word in asked for shape in known[word]))

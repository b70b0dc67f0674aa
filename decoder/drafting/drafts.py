"""A cache draft, and the limits of looking one up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class Limits(NamedTuple):
    """Of a look-up."""

    depth: int  # tokens of context and draft together
    most: int  # tokens of a draft
    factor: float  # tokens of a draft for each one matched
    offset: float  # tokens beside
    least: float  # probability of a draft's last token


STOCK: Final = Limits(24, 24, 1.0, 0.0, 0.1)
"""What vLLM's suffix decoding draws from its trees where nobody sets anything
(``SpeculativeConfig`` of vLLM 0.32: depth, factor and least probability; a draft is at most as long
as a tree is deep)."""


@dataclass(frozen=True, slots=True)
class CacheDraft:
    """A linear draft, deterministic given the prefix and what of it is indexed.

    ``probs[i]`` is the counted probability that the draft survives through token i (a running
    product, so it never rises); ``score`` is their sum, the accepted length that counting expects;
    ``match_len`` is the number of context tokens matched. ``local`` says that the request's own
    text proposed it, and not its key's outputs. ``rival`` is what the other had to say, if
    anything.
    """

    tokens: list[int]
    probs: list[float]
    score: float
    match_len: int
    local: bool = True
    rival: CacheDraft | None = None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens on which ``a`` and ``b`` begin alike."""
    shorter = min(len(a), len(b))
    if list(a[:shorter]) == list(b[:shorter]):
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])

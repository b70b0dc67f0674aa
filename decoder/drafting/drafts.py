"""A cache draft, and the limits of a look-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class Limits(NamedTuple):
    """Limits of a look-up. A draft has at most ``factor * matched tokens + offset`` tokens."""

    depth: int  # maximum tokens of matched context and draft together
    most: int  # maximum tokens of a draft
    factor: float
    offset: float
    least: float  # minimum probability of a draft's last token


STOCK: Final = Limits(24, 24, 1.0, 0.0, 0.1)
"""Defaults of vLLM's suffix decoding (``SpeculativeConfig`` of vLLM 0.32: depth, factor, minimum
probability); its drafts are at most as long as its trees are deep."""


@dataclass(frozen=True, slots=True)
class CacheDraft:
    """A linear draft, deterministic given the prefix and the indexed text.

    ``probs[i]`` is the probability, from counts, that the draft survives through token i (a running
    product, so it never rises). ``score`` is their sum, the expected accepted length. ``match_len``
    is the number of context tokens matched. ``local``: copied from the request's own text, not from
    its key's outputs. ``rival`` is the other source's draft, if any.
    """

    tokens: list[int]
    probs: list[float]
    score: float
    match_len: int
    local: bool = True
    rival: CacheDraft | None = None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of ``a`` and ``b``, tokens."""
    shorter = min(len(a), len(b))
    if list(a[:shorter]) == list(b[:shorter]):
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])

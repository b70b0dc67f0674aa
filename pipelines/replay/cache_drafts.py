"""Cache drafts one by one, for replays that decide by what a draft would bring, and for tests.

A worker looks up and describes the drafts of a whole step at once: ``decoder.core.proposer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from decoder.drafting.matches import BACK, Limits, Tokens, draft, scratch_for, written_for
from decoder.drafting.suffix import SuffixCache


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


def propose(
    cache: SuffixCache, row: int, context: Tokens, limit: int, limits: Limits | None = None
) -> CacheDraft | None:
    """The best continuation of ``context`` (int32 [n]) of at most ``limit`` tokens, or None.

    Args:
        row: the request's window, from :meth:`SuffixCache.start`.
        limits: replace those of ``cache``.
    """
    bounds, pool = limits or cache.limits, cache.pool
    bounds = bounds._replace(most=min(limit, bounds.most))
    suffix, drafts = np.ascontiguousarray(context[-BACK:], np.int32), list[CacheDraft]()
    size = max(bounds.most, 0)
    for number in filter(None, (row, int(pool.windows["shared"][row]))):
        out = written_for(size)
        result = draft(pool, number, suffix, bounds, out, scratch_for(size))
        if result.length:
            tokens, probs = (part[: result.length].tolist() for part in out)
            drafts.append(CacheDraft(tokens, probs, result.score, result.match, number == row))
    drafts.sort(key=lambda draft: -draft.score)  # on a tie its own text's is first
    return replace(drafts[0], rival=drafts[1] if drafts[1:] else None) if drafts else None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of ``a`` and ``b``, tokens."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))

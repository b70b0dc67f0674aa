"""A cache draft, and the better of those that two suffix trees propose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from decoder.drafting.trees import Tokens

MARGIN: Final = 8
"""Tokens of context that a lookup takes beyond what matched last time. The text under
way is in its own trees, so a lookup finds as much of itself as it is given, at a cost that grows
with the square; and from one token to the next a match grows by one. On five sets of recorded agent
text every draft was the one that 64 tokens of context give, at a third of the cost."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a lookup: tokens of context and of a draft at most, and ``of_draft`` as
    :func:`better_of` takes them."""

    depth: int
    most: int
    of_draft: tuple[float, float, float]


STOCK: Final = Limits(24, 24, (1.0, 0.0, 0.1))
"""What vLLM's suffix decoding draws from its trees where nobody sets anything
(``SpeculativeConfig`` of vLLM 0.32: depth, factor and least probability; a draft is at most as long
as a tree is deep)."""


@dataclass(frozen=True, slots=True)
class CacheDraft:
    """A linear draft, deterministic given the prefix and what of it is indexed.

    ``probs[i]`` is the counted probability that the draft survives through token i (a running
    product, so it never rises); ``score`` is their sum, the accepted length that counting expects;
    ``match_len`` is the number of context tokens matched. ``local`` says that the request's own
    tree proposed it, and not the tenant's. ``rival`` is what the other tree had to say, if
    anything, and ``agreement`` the number of tokens on which both begin alike.
    """

    tokens: list[int]
    probs: list[float]
    score: float
    match_len: int
    local: bool = True
    rival: CacheDraft | None = None
    agreement: int = 0


def better_of(
    local: Any, shared: Any, seen: Tokens, tokens: int, limits: tuple[float, float, float]
) -> tuple[CacheDraft | None, int]:
    """What the tree that expects more proposes after ``seen`` (int32 [n]), beside the other.

    The library's own ``speculate`` keeps the better of the two and drops the other, which says
    whether they agree.

    Args:
        local, shared: trees of the library, or None for one that has nothing to say.
        tokens: of a draft at most.
        limits: factor, offset and least probability.

    Returns:
        the draft, and the longest context that either tree's best was found behind.
    """
    own = None if local is None else local.speculate_ndarray(seen, tokens, *limits, False)
    theirs = None if shared is None else shared.speculate_ndarray(seen, tokens, *limits, False)
    if theirs is None or own is None:
        best, other = (own, None) if theirs is None else (theirs, None)
        is_local = theirs is None
    else:
        is_local = own.score >= theirs.score
        best, other = (own, theirs) if is_local else (theirs, own)
    if best is None:
        return None, 0
    drafted, matched = best.token_ids, best.match_len
    if other is not None:
        matched = max(matched, other.match_len)
    if not drafted:
        return None, matched
    rival, agreement = None, 0
    if other is not None and (against := other.token_ids):
        rival = CacheDraft(against, other.probs, other.score, other.match_len, not is_local)
        agreement = common_prefix(drafted, against)
    probs, score = best.probs, best.score
    return CacheDraft(drafted, probs, score, best.match_len, is_local, rival, agreement), matched


def reach_of(matched: int) -> int:
    """Tokens of context for the lookup after one that matched so many, new ones left out."""
    return matched + MARGIN


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens on which ``a`` and ``b`` begin alike."""
    shorter = min(len(a), len(b))
    if list(a[:shorter]) == list(b[:shorter]):
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])

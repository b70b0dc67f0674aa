"""From a draft and the tokens committed afterwards to its accepted length.

The accepted length of a draft is its longest common prefix with what the target commits from that
position on, whether or not the draft was verified. Under greedy decoding this is exact. Under
sampling, rejection sampling accepts a deterministic draft token x with the same probability p(x)
with which the target commits x, so the longest common prefix has the distribution of the accepted
length. A request that ends first leaves a lower bound: a censored label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Pending(Generic[T]):
    tokens: Sequence[int]
    matched: int
    subject: T


class Label(NamedTuple, Generic[T]):
    """Accepted length of ``subject``'s draft; a lower bound when ``censored``."""

    subject: T
    accepted: int
    censored: bool


class LabelTracker(Generic[T]):
    """Drafts of one request whose accepted length is not known yet.

    Each commit advances all of them; a draft leaves at its first mismatch or its last token, so
    at most as many wait as a draft is long.
    """

    def __init__(self) -> None:
        self._pending: list[_Pending[T]] = []

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def streak(self) -> int:
        """Tokens matched so far by the longest unresolved draft."""
        return max((p.matched for p in self._pending), default=0)

    def streak_behind(self, ahead: Sequence[int]) -> int:
        """What :attr:`streak` would be, were ``ahead`` (at least one token) committed now."""
        n, ahead = len(ahead), list(ahead)
        return max(
            (
                p.matched + n
                for p in self._pending
                if p.matched + n < len(p.tokens)
                and list(p.tokens[p.matched : p.matched + n]) == ahead
            ),
            default=0,
        )

    def propose(self, tokens: Sequence[int], subject: T) -> None:
        """Begin to follow a draft proposed at the current position. Mutates the tracker."""
        self._pending.append(_Pending(tokens, 0, subject))

    def commit(self, committed: Sequence[int]) -> list[Label[T]]:
        """Advance by ``committed`` tokens and return the labels now known. Mutates the tracker."""
        resolved: list[Label[T]] = []
        waiting: list[_Pending[T]] = []
        committed, n = list(committed), len(committed)
        for draft in self._pending:
            tokens, matched = draft.tokens, draft.matched
            ahead = list(tokens[matched : matched + n])
            if ahead == committed and matched + n < len(tokens):
                draft.matched = matched + n
                waiting.append(draft)
                continue
            for proposed, token in zip(ahead, committed, strict=False):
                if proposed != token:
                    break
                matched += 1
            resolved.append(Label(draft.subject, matched, censored=False))
        self._pending = waiting
        return resolved

    def close(self) -> list[Label[T]]:
        """The request ended: what was matched so far is a lower bound. Empties the tracker."""
        censored = [Label(p.subject, p.matched, censored=True) for p in self._pending]
        self._pending = []
        return censored


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens on which ``a`` and ``b`` begin alike."""
    if a == b:
        return len(a)
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)

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
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from decoder.drafting.drafts import common_prefix

T = TypeVar("T")


class Label(NamedTuple, Generic[T]):
    """Accepted length of ``subject``'s draft; a lower bound when ``censored``."""

    subject: T
    accepted: int
    censored: bool


@dataclass(slots=True)
class _Text:
    """What drafts that agree foresee: ``tokens`` from position ``begun`` on, those of the longest.

    ``ends`` is a heap: of each draft the position behind its last token, and its number.
    """

    tokens: Sequence[int]
    begun: int
    ends: list[tuple[int, int]]


class LabelTracker(Generic[T]):
    """Drafts of one request whose accepted length is not known yet.

    Each commit advances all of them; a draft leaves at its first mismatch or its last token, so
    at most as many wait as a draft is long. What waits has matched all that was committed since it
    was proposed, so drafts that agree on what comes next are compared with it once, together.
    """

    def __init__(self) -> None:
        self._at = 0  # tokens committed
        self._number = 0
        self._open: dict[int, tuple[int, T]] = {}  # position where it was proposed, in that order
        self._texts: list[_Text] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def streak(self) -> int:
        """Tokens matched so far by the longest unresolved draft."""
        return self._at - next(iter(self._open.values()))[0] if self._open else 0

    def propose(self, tokens: Sequence[int], subject: T) -> None:
        """Begin to follow a draft proposed at the current position. Mutates the tracker."""
        at, self._number = self._at, self._number + 1
        end = at + len(tokens), self._number
        self._open[self._number] = at, subject
        for text in self._texts:
            known = text.tokens[at - text.begun :]
            if common_prefix(known, tokens) == min(len(known), len(tokens)):
                if len(tokens) > len(known):
                    text.tokens, text.begun = tokens, at
                heappush(text.ends, end)
                return
        self._texts.append(_Text(tokens, at, [end]))

    def commit(self, committed: Sequence[int]) -> list[Label[T]]:
        """Advance by ``committed`` tokens and return the labels now known. Mutates the tracker."""
        known: list[tuple[int, int]] = []  # number of a draft, and where it ended
        n = len(committed)
        for text in self._texts:
            first = self._at - text.begun
            held = self._at + common_prefix(text.tokens[first : first + n], committed)
            if held < self._at + n:
                known += ((number, min(end, held)) for end, number in text.ends)
                text.ends.clear()
            while text.ends and text.ends[0][0] <= held:
                end, number = heappop(text.ends)
                known.append((number, end))
        self._at += n
        self._texts = [text for text in self._texts if text.ends]
        resolved = []
        for number, end in sorted(known):
            begun, subject = self._open.pop(number)
            resolved.append(Label(subject, end - begun, censored=False))
        return resolved

    def close(self) -> list[Label[T]]:
        """The request ended: what was matched so far is a lower bound. Empties the tracker."""
        censored = [Label(s, self._at - begun, censored=True) for begun, s in self._open.values()]
        self._open, self._texts = {}, []
        return censored

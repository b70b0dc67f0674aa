"""Which share of its requests a scope is learned from, where more come than there is time for.

What comes is counted by the reader's own clock, while it reads what is new: what the events say of
the time is of many clocks, and a backlog comes as fast as it is read; but where it grows, at least
as much comes. The learner that holds a scope decides and says so in its status; the others follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

WINDOW_SECONDS: Final = 10.0
"""Between two looks at how many come."""
SLACK: Final = 4.0
"""The share is doubled only where a quarter of what is wanted comes, or it would flutter."""
LEAST: Final = 2.0**-14
"""Of a million and a half drafts a second: a share that somebody made up is doubled back soon."""
MOST: Final = 10_000
"""Scopes whose share is remembered, the ones heard of last: whoever writes statuses may make more
up, and an intake follows all of them."""


class Shares(dict[str, float]):
    """Shares below one by scope: at most ``per_second`` drafts are learned from, about."""

    def __init__(self, per_second: float, shares: Mapping[str, float] = {}) -> None:
        super().__init__(shares)
        self._per_second = per_second
        self._came: Counter[str] = Counter()
        self._since: float | None = None
        self._live, self._behind = False, 0

    def count(self, scope: str, drafts: int) -> None:
        """So many have come that could be learned from. Mutates."""
        self._came[scope] += drafts

    def look(self, now: float, live: bool, holds: Callable[[str], bool], behind: int = 0) -> None:
        """Take stock, once a window is over in which all was new, or in which more came than was
        read. Mutates.

        Args:
            now: seconds by a clock that runs evenly.
            live: whether the end of the topic is near.
            holds: whether a scope is ours to decide.
            behind: records until that end, as far as it is known.
        """
        seconds = -1.0 if self._since is None else now - self._since
        if 0.0 <= seconds < WINDOW_SECONDS and live == self._live:
            return
        told = seconds >= 0.0 and live == self._live and (live or behind >= self._behind > 0)
        for scope in {*self._came, *self} if told else ():
            share = self.get(scope, 1.0)
            wanted = self._came[scope] / seconds * share
            if not holds(scope):
                continue
            if live and wanted * SLACK < self._per_second:
                share *= 2.0
            while wanted > self._per_second and share > LEAST:
                share, wanted = share / 2.0, wanted / 2.0
            self._set(scope, share)
        self._came.clear()
        self._since, self._live, self._behind = now, live, behind

    def follow(self, said: Mapping[str, float]) -> None:
        """Take over what the holders of scopes say. Mutates."""
        for scope, share in said.items():
            self._set(scope, max(share, LEAST))

    def _set(self, scope: str, share: float) -> None:
        self.pop(scope, None)
        if share < 1.0:
            self[scope] = share
        if len(self) > MOST:
            del self[next(iter(self))]

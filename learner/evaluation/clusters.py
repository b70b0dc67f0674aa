"""Drafts of one session taken together: what a gate and a detector may count as one number.

Drafts of a session share their luck. So the unit of evidence is a cluster: the drafts of a session
until it falls silent, or until they are ``CAP``, after which it begins another. A cluster is handed
out once, when it is final. Its session was **born** when it was first heard of: what was learned
before that cannot have been learned from it. Of a session that is held out nothing is ever learned,
so that it may also judge what was learned while it goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from learner.training.rows import is_held_out

Floats = NDArray[np.float64]

CAP: Final = 16
"""Drafts of a cluster, about those of a request: with one number for a whole agent's session of
hours, a challenger would wait for days for thirty of them."""
SILENCE: Final = 32
PATIENCE: Final = 8
"""A cluster is over when nothing of it came among the last SILENCE rows, and PATIENCE times as many
as usually lie between two of a session: the more requests at a time, the longer one of them waits
for its turn. Those that are open are no measure of that: where answers are short most are over."""
TURNS: Final = 128
"""Newest turns that say what is usual, by their median."""
MOST_OPEN: Final = 1_024
"""A session of which more rows than that came between was not waiting for its turn."""
SESSIONS: Final = 8_192
"""Sessions whose birth is remembered, the ones heard of last."""
LONG: Final = 4_096
"""Rows after which a session counts as born anew: a tenant that sends all its traffic as one
session would else have no vote on anything that was ever learned."""


@dataclass(frozen=True)
class Cluster:
    """A final cluster: the name of its session, the row from which on it is ``unseen`` by all that
    was learned until then, how many rows it has, their sums, and how many clusters of its session
    came ``before`` it: what is special about one is in all of them."""

    session: str
    unseen: int
    rows: int
    sums: Floats  # [columns]
    before: int = 0


@dataclass
class Clusters:
    """The clusters under way; ``columns`` numbers are added up in each.

    ``rows`` counts those taken in, ``turns`` how many lay between two of a session. By session,
    ``open`` has the numbers of the row before it and of its last, rows, and sums [columns];
    ``born`` the row of its birth, rows and clusters since, and the last row.
    """

    columns: int
    rows: int = 0
    open: OrderedDict[int, tuple[int, int, int, Floats]] = field(default_factory=OrderedDict)
    born: OrderedDict[int, tuple[int, int, int, int]] = field(default_factory=OrderedDict)
    turns: list[int] = field(default_factory=list)

    def add(self, sessions: NDArray[np.uint64], numbers: Floats) -> list[Cluster]:
        """Take in a block of rows in their order; the clusters that are final now. Mutates.

        Args:
            sessions: [n].
            numbers: float64 [n, columns].
        """
        names, at, owner = np.unique(sessions, return_index=True, return_inverse=True)
        sums = np.zeros((len(names), self.columns))
        np.add.at(sums, owner, numbers)
        counts = np.bincount(owner, minlength=len(names))
        last_of = np.zeros(len(names), np.int64)
        np.maximum.at(last_of, owner, self.rows + np.arange(len(sessions)))
        closed, turns = [], list[int]()  # one of each session, or the busiest would say for all
        for place in np.argsort(at).tolist():
            session, count, last = int(names[place]), int(counts[place]), int(last_of[place])
            first = self.rows + int(at[place])
            if (before := self._met(session, count, last)) is not None:
                turns.append(first - before)
            elif count > 1:
                turns.append((last - first) // (count - 1))
            began, _, rows, held = self.open.pop(session, (self.rows, 0, 0, 0.0))
            self.open[session] = began, last, rows + count, held + sums[place]
            if rows + count >= CAP:
                closed.append(self._close(session))
        self.rows += len(sessions)
        self.turns = [*self.turns, *(turn for turn in turns if turn <= MOST_OPEN)][-TURNS:]
        turn = median(self.turns) if self.turns else len(sessions)
        while self.open:
            session, (_, last, _, _) = next(iter(self.open.items()))
            silent = self.rows - last > SILENCE + PATIENCE * min(turn, len(self.open))
            if not (silent or len(self.open) > MOST_OPEN):
                break
            closed.append(self._close(session))
        return closed

    def _met(self, session: int, count: int, last: int) -> int | None:
        """The last row of ``session`` before those ``count``, if it is remembered."""
        born, rows, closed, before = self.born.pop(session, (self.rows, 0, 0, None))
        if rows >= LONG and session not in self.open:
            born, rows, closed = self.rows, 0, 0
        self.born[session] = born, rows + count, closed, last
        if len(self.born) > SESSIONS:
            self.born.popitem(last=False)
        return before

    def _close(self, session: int) -> Cluster:
        began, _, rows, sums = self.open.pop(session)
        born, all_rows, closed, last = self.born.get(session, (0, 0, 0, 0))
        if session in self.born:
            self.born[session] = born, all_rows, closed + 1, last
        unseen = began if is_held_out(session) else born
        return Cluster(f"{session:x}.{born}", unseen, rows, sums, closed)

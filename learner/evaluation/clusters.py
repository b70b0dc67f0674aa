"""Clusters of drafts: the independent observations of gate and drift detector.

Drafts of a session are correlated, so evidence is counted per cluster: drafts of a session until it
falls silent or has ``CAP`` of them. A cluster is returned once, when it is final. A session's
**birth** is its first row: nothing learned earlier has seen it. Held-out sessions are never learned
from, so they also judge what was learned since.
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
"""Drafts of a cluster, about those of a request. With one number for an agent's session of hours, a
challenger would wait for days for thirty numbers."""
SILENCE: Final = 32
PATIENCE: Final = 8
"""A cluster is final after SILENCE rows without it, and PATIENCE times the usual interval between
rows of a session, which grows with the number of concurrent requests. Open clusters do not measure
it: where answers are short, most are over."""
INTERVALS: Final = 128  # newest intervals, whose median is the usual one
MAX_OPEN: Final = 1_024  # longer intervals are no waiting for a turn
MAX_SESSIONS: Final = 8_192  # whose birth is remembered, the most recent ones
LONG: Final = 4_096
"""Rows after which a session is born anew: a tenant that sends all its traffic as one session would
otherwise judge nothing that was learned."""


@dataclass(frozen=True)
class Cluster:
    """A final cluster: its session's name, the row since when nothing ``unseen`` by it was learned,
    rows, sums, and the number of clusters ``before`` it in its session."""

    session: str
    unseen: int
    rows: int
    sums: Floats  # [columns]
    before: int = 0


@dataclass
class Clusters:
    """Open clusters, with sums of ``columns`` numbers.

    ``rows`` counts rows, ``turns`` holds intervals between rows of a session. By session, ``open``
    has the row before its first, its last row, number of rows, and sums [columns]; ``born`` has the
    row of its birth, rows and clusters since, and the last row.
    """

    columns: int
    rows: int = 0
    open: OrderedDict[int, tuple[int, int, int, Floats]] = field(default_factory=OrderedDict)
    born: OrderedDict[int, tuple[int, int, int, int]] = field(default_factory=OrderedDict)
    turns: list[int] = field(default_factory=list)

    def add(self, sessions: NDArray[np.uint64], numbers: Floats) -> list[Cluster]:
        """Add a block of rows in order; the clusters that become final. Mutates.

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
        closed, turns = [], list[int]()  # one of each session, or the busiest would dominate
        for index in np.argsort(at).tolist():
            session, count, last = int(names[index]), int(counts[index]), int(last_of[index])
            first = self.rows + int(at[index])
            if (before := self._update_birth(session, count, last)) is not None:
                turns.append(first - before)
            elif count > 1:
                turns.append((last - first) // (count - 1))
            began, _, rows, held = self.open.pop(session, (self.rows, 0, 0, 0.0))
            self.open[session] = began, last, rows + count, held + sums[index]
            if rows + count >= CAP:
                closed.append(self._close(session))
        self.rows += len(sessions)
        self.turns = [*self.turns, *(turn for turn in turns if turn <= MAX_OPEN)][-INTERVALS:]
        usual = median(self.turns) if self.turns else len(sessions)
        while self.open:
            session, (_, last, _, _) = next(iter(self.open.items()))
            silent = self.rows - last > SILENCE + PATIENCE * min(usual, len(self.open))
            if not (silent or len(self.open) > MAX_OPEN):
                break
            closed.append(self._close(session))
        return closed

    def _update_birth(self, session: int, count: int, last: int) -> int | None:
        """The last row of ``session`` before these ``count``, if remembered."""
        born, rows, closed, before = self.born.pop(session, (self.rows, 0, 0, None))
        if rows >= LONG and session not in self.open:
            born, rows, closed = self.rows, 0, 0
        self.born[session] = born, rows + count, closed, last
        if len(self.born) > MAX_SESSIONS:
            self.born.popitem(last=False)
        return before

    def _close(self, session: int) -> Cluster:
        began, _, rows, sums = self.open.pop(session)
        born, all_rows, closed, last = self.born.get(session, (0, 0, 0, 0))
        if session in self.born:
            self.born[session] = born, all_rows, closed + 1, last
        unseen = began if is_held_out(session) else born
        return Cluster(f"{session:x}.{born}", unseen, rows, sums, closed)

"""Drafts of one session taken together: what a gate and a detector may count as one number.

Drafts of a session share their luck. So the unit of evidence is a cluster: the drafts of a session
until it falls silent, or until they are ``CAP``, after which it begins another. A cluster is handed
out once, when it is final. It was **born** when its session was first heard of: what was learned
before that cannot have been learned from it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from learner.checkpoint import Tree

Floats = NDArray[np.float64]

CAP: Final = 16
"""Drafts of a cluster, about those of a request: with one number for a whole agent's session of
hours, a contestant would wait for days for thirty of them."""
SILENCE: Final = 32
PATIENCE: Final = 8
"""A cluster is over when nothing of it came among the last SILENCE rows, and PATIENCE more for each
that is open: the more requests at a time, the longer one of them waits for its turn."""
MOST_OPEN: Final = 1_024
SESSIONS: Final = 8_192
"""Sessions whose birth is remembered, the ones heard of last."""
LONG: Final = 4_096
"""Rows after which a session counts as born anew: a tenant that sends all its traffic as one
session would else have no vote on anything that was ever learned."""


@dataclass(frozen=True)
class Cluster:
    """A final cluster: the row at which it was ``born``, how many rows it has, their sums, and how
    many clusters of its session came ``before`` it: what is special about one is in all of them."""

    born: int
    rows: int
    sums: Floats  # [columns]
    before: int = 0


class Clusters:
    """The clusters under way; ``columns`` numbers are added up in each."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rows = 0
        self._open: OrderedDict[int, tuple[int, int, Floats]] = OrderedDict()  # last, rows, sums
        self._born: OrderedDict[int, tuple[int, int, int]] = OrderedDict()  # rows, clusters since

    def add(self, sessions: NDArray[np.uint64], numbers: Floats) -> list[Cluster]:
        """Take in a block of rows in their order; the clusters that are final now. Mutates.

        Args:
            sessions: [n].
            numbers: float64 [n, columns].
        """
        names, at, owner = np.unique(sessions, return_index=True, return_inverse=True)
        sums = np.zeros((len(names), self._columns))
        np.add.at(sums, owner, numbers)
        counts = np.bincount(owner, minlength=len(names))
        closed = []
        for place in np.argsort(at).tolist():
            session, count = int(names[place]), int(counts[place])
            self._met(session, count)
            _, rows, held = self._open.pop(session, (0, 0, 0.0))
            self._open[session] = self._rows, rows + count, held + sums[place]
            if rows + count >= CAP:
                closed.append(self._close(session))
        self._rows += len(sessions)
        while self._open:
            session, (last, _, _) = next(iter(self._open.items()))
            silent = self._rows - last > SILENCE + PATIENCE * len(self._open)
            if not (silent or len(self._open) > MOST_OPEN):
                break
            closed.append(self._close(session))
        return closed

    def _met(self, session: int, count: int) -> None:
        born, rows, closed = self._born.pop(session, (self._rows, 0, 0))
        if rows >= LONG and session not in self._open:
            born, rows, closed = self._rows, 0, 0
        self._born[session] = born, rows + count, closed
        if len(self._born) > SESSIONS:
            self._born.popitem(last=False)

    def _close(self, session: int) -> Cluster:
        _, rows, sums = self._open.pop(session)
        born, all_rows, closed = self._born.get(session, (0, 0, 0))
        if session in self._born:
            self._born[session] = born, all_rows, closed + 1
        return Cluster(born, rows, sums, closed)

    def snapshot(self) -> Tree:
        """Everything :meth:`restored` needs."""
        sums = [held for _, _, held in self._open.values()]
        return {
            "rows": self._rows,
            "open": np.array(list(self._open), np.uint64),
            "counts": np.array([(last, n) for last, n, _ in self._open.values()]).reshape(-1, 2),
            "sums": np.array(sums, np.float64).reshape(-1, self._columns),
            "sessions": np.array(list(self._born), np.uint64),
            "births": np.array(list(self._born.values()), np.int64).reshape(-1, 3),
        }

    @classmethod
    def restored(cls, columns: int, told: Tree) -> Clusters:
        """The clusters as they were.

        Raises:
            KeyError, ValueError: the snapshot is not one of this version.
        """
        if told["sums"].shape[1] != columns:
            raise ValueError(f"clusters of {told['sums'].shape[1]} columns, not {columns}")
        found = cls(columns)
        found._rows = int(told["rows"])
        for session, (last, rows), sums in zip(
            told["open"].tolist(), told["counts"].tolist(), told["sums"], strict=True
        ):
            found._open[session] = last, rows, sums.copy()
        births = told["births"].tolist()
        for session, (born, rows, closed) in zip(told["sessions"].tolist(), births, strict=True):
            found._born[session] = born, rows, closed
        return found

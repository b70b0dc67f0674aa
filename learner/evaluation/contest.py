"""Contestants against the champion: evidence by what each would have made of drafts it cannot know.

A contestant is a network in training as it was at some moment, or the first policy. It is judged on
clusters (:mod:`.clusters`) of sessions born after that moment by what its choices would have
brought and cost (:func:`.tune.worth`) beyond the champion's on the same drafts, and beyond
the gain that a swap is worth: evidence is the whole decision. Where both choose alike the
difference is nothing and has no noise; and it is what serving is about, which a likelihood is not.
A few are alive at once, and one that has not won by its age makes room: the young see what changed
a lot, the old what gains one per cent. The first policy is a contestant whenever it is not the
champion, and its evidence may begin at any time, so that a long bad stretch can always be undone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from decoder.contracts.bundle import Policy
from learner.evaluation.clusters import Cluster
from learner.evaluation.evidence import Bets
from learner.evaluation.measured import Costs
from learner.evaluation.tune import worth
from learner.training.losses import Floats
from learner.training.rows import Rows

VOTES: Final = 8
"""Clusters of a session that count: what is special about a session is in all of them."""
AGES: Final = (32, 128, 512)
"""Clusters after which a contestant makes room, by its seat."""
FIRST: Final = len(AGES)
SEATS: Final = len(AGES) + 1
"""The last seat is the first policy's."""
ALPHA: Final = 0.01
"""Chance that a contestant no better than the champion ever passes."""
MIN_GAIN: Final = 0.002
"""Relative gain in rate that is asked of a contestant: less is not worth a swap on every worker.
Of the first policy none: going back is what is safe."""
RETURN: Final = math.log(100.0)
"""Evidence at which the first policy comes back: where it is no better than the champion, once in a
hundred clusters at most. At ten times the bound it stayed away for half as long again after a
shift, which is what an adapted policy loses most by."""
HOPELESS: Final = math.log(0.05)
PROMISING: Final = math.log(4.0)
"""Evidence with which a contestant may stay beyond its age."""


@dataclass
class Contestant:
    """A policy that would be champion, and what speaks for it.

    ``since`` is the row from which on it may be judged, and ``origin`` says which learner made it.
    ``judged`` counts clusters, ``drafts`` what is in them, and ``gained`` what they brought, in
    plain steps beyond the gain asked of it.
    """

    policy: Policy
    since: int
    origin: str
    bets: Bets = field(default_factory=Bets)
    judged: int = 0
    drafts: int = 0
    gained: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """By which figures it won, for the registry."""
        return {
            "evidence": self.bets.evidence,
            "gate_clusters": float(self.judged),
            "gate_drafts": float(self.drafts),
            "gain": self.gained / max(self.drafts, 1),
        }

    @property
    def reason(self) -> str:
        """The same in words."""
        return (
            f"chooses better: evidence e^{self.bets.evidence:.1f} of {self.judged} clusters, "
            f"{self.metrics['gain']:.3f} plain steps saved a draft"
        )


@dataclass
class Contest:
    """The champion, the first policy, and who sits in which seat; seats may be empty."""

    first: Policy
    champion: Policy
    seats: list[Contestant | None] = field(default_factory=lambda: [None] * SEATS)

    def crown(self, champion: Policy, row: int) -> None:
        """``champion`` is served from ``row`` on: all evidence was against another. Mutates."""
        self.champion = champion
        self.seats = [None] * SEATS
        if champion.digest != self.first.digest:
            self.seat_first(row)

    def seat_first(self, row: int) -> None:
        """Let the first policy contend, by what is born from ``row`` on. Mutates."""
        self.seats[FIRST] = Contestant(self.first, row, "first", Bets(restarts=True))

    def advantages(self, rows: Rows, costs: Costs) -> Floats:
        """What each seat's choices at ``rows`` bring beyond the champion's and the gain asked of
        it, in plain steps, and then what they might lose at the most, float64 [n, 2 * SEATS]; 0
        where nobody sits."""
        seated = [(seat, one.policy) for seat, one in enumerate(self.seats) if one is not None]
        found = np.zeros((len(rows), 2 * SEATS))
        if seated:
            seats, policies = zip(*seated, strict=True)
            least = [MIN_GAIN if seat != FIRST else 0.0 for seat in seats]
            mine, exposed = worth(self.champion, policies, least, rows, costs)
            found[:, list(seats)] = mine.T
            found[:, [SEATS + seat for seat in seats]] = exposed.T
        return found

    def take(self, closed: Sequence[Cluster]) -> None:
        """Take in final clusters, whose first columns are :meth:`advantages`. Mutates."""
        for cluster in closed:
            for seat, one in enumerate(self.seats):
                if one is not None and cluster.born >= one.since and cluster.before < VOTES:
                    one.bets.take(float(cluster.sums[seat]), float(cluster.sums[SEATS + seat]))
                    one.judged += 1
                    one.drafts += cluster.rows
                    one.gained += float(cluster.sums[seat])

    def passed(self) -> list[int]:
        """Seats whose evidence suffices, the strongest first."""
        bounds = [-math.log(ALPHA)] * FIRST + [RETURN]
        found = [
            (one.bets.evidence, seat)
            for seat, one in enumerate(self.seats)
            if one is not None and one.bets.evidence >= bounds[seat]
        ]
        return [seat for _, seat in sorted(found, reverse=True)]

    def vacant(self) -> int | None:
        """A seat for a new contestant, if any: empty, without hope, or held beyond its age."""
        for seat, age in enumerate(AGES):
            one = self.seats[seat]
            if one is None or one.bets.hope < HOPELESS:
                return seat
            if one.judged >= age and one.bets.evidence < PROMISING:
                return seat
        return None

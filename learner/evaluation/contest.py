"""Challengers against the champion, by what each would have made of drafts it cannot know.

A challenger is a network in training as it was at some moment. It is judged by what its choices
would have brought and cost (:func:`learner.evaluation.tune.worth`) beyond the champion's on the
same drafts: the difference is zero, without noise, where both choose alike. It passes when the
confidence sequence of its gain lies above the least gain that a swap is worth. The unit is the
session, as in a trial (``learner.evaluation.effect``): what is special about a session is in all of
its drafts.

What such an interval insures against ends with the losses that it has seen. A champion that has
passed is therefore served on a budget of regret over the first policy (conservative bandits, Wu et
al. 2016; (A,B)-Prod, Sani et al. 2014), counted on every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from decoder.contracts.bundle import Policy
from learner.evaluation.clusters import Cluster
from learner.evaluation.effect import FEWEST, Effect, gain_effect
from learner.evaluation.measured import Costs
from learner.evaluation.tune import worth
from learner.training.losses import Floats
from learner.training.rows import Rows

VOTES: Final = 8
"""Clusters of a session that count, so that no session outweighs sixteen others."""
AGES: Final = (24, 64, 256)
"""Sessions after which a challenger makes room, by its seat: the young see what changed a lot, the
old what gains one per cent."""
RETUNED, FIRST, WON, TRIED = range(len(AGES), len(AGES) + 4)
"""Seats of the champion with its threshold retuned, of the first policy, of the last challenger
that passed, and of the policy on trial."""
SEATS: Final = TRIED + 1
STEPS: Final = SEATS
"""Column of the champion's plain steps, behind those of the seats."""
DOUBTS: Final = slice(STEPS + 1, STEPS + 1 + SEATS)
"""Columns of what each seat would save more by each token that model drafts in doubt bring."""
COLUMNS: Final = STEPS + 1 + SEATS
UNTRIED: Final = 8.0
"""Model drafts that brought nothing, as which the first of those in doubt that were verified count:
a challenger gets no credit for what it has not seen, and most of it once some thirty were."""
MIN_GAIN: Final = 0.002
"""Relative gain in rate that is asked of a challenger: less is not worth a swap on every worker."""
REGRET: Final = 0.002
"""Share of the plain steps served since its promotion that a champion may fall behind the first
policy."""
CLUSTERS: Final = 8.0
"""And so many clusters' usual gain in any case. At 2, chance alone took back one in four of those
that gain as much in the mean as clusters differ by, and nearly all that gain half of it; at 8 none
and one in fourteen."""
EARNED: Final = 0.25
"""And so much of what it has saved: a run of bad luck is short beside it."""
MEMORY: Final = 64.0
"""Clusters over which the usual gain, the mean distance from zero, is taken."""
FORGIVEN: Final = 100_000
"""Drafts after which a return of the first policy no longer makes the next challenger wait."""
STRICTEST: Final = 5
"""Returns that count at most: challengers are then asked for 384 sessions."""


@dataclass
class Challenger:
    """A policy that may replace the champion, and its record.

    ``since`` is the row from which on it is judged, ``origin`` the learner that trained it.
    ``votes`` holds gain, champion's time, and what each token of its model drafts in doubt is worth
    (:class:`learner.evaluation.tune.Worth`), all in plain steps, by session; ``drafts`` counts
    their drafts. ``tried`` are the verified ones of those in doubt, and their accepted tokens.
    """

    policy: Policy
    since: int
    origin: str
    votes: dict[str, list[float]] = field(default_factory=dict)
    drafts: int = 0
    tried: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def judged(self) -> int:
        """Sessions so far."""
        return len(self.votes)

    def gain(self) -> Effect:
        """Rate over the champion's, by the labels of all traffic."""
        votes = np.array([*self.votes.values()], np.float64).reshape(-1, 3)
        drafts, tokens = self.tried
        return gain_effect(votes[:, 0] + tokens / (drafts + UNTRIED) * votes[:, 2], votes[:, 1])

    @property
    def metrics(self) -> dict[str, float]:
        """Figures for the registry."""
        gain = self.gain()
        return {
            "gain": gain.ratio - 1.0,
            "gain_low": gain.low - 1.0,
            "gate_sessions": float(self.judged),
            "gate_drafts": float(self.drafts),
        }

    @property
    def reason(self) -> str:
        """The same in words."""
        if self.origin == "first":
            return "the champion fell behind the first policy, or the one before, beyond its budget"
        gain = self.gain()
        return (
            f"chooses better: {gain.ratio - 1.0:+.1%} by the labels of {self.judged} sessions, "
            f"at least {gain.low - 1.0:+.1%}"
        )


@dataclass
class Regret:
    """The champion's record beside the first policy since its promotion, on every draft.

    ``lead`` is what it has saved so far, ``peak`` the most that was, ``steps`` what was served, all
    in plain steps; ``usual`` is a cluster's mean absolute gain.
    """

    lead: float = 0.0
    peak: float = 0.0
    steps: float = 0.0
    usual: float = 0.0
    clusters: int = 0

    @property
    def behind(self) -> float:
        """Plain steps lost since it was last ahead."""
        return self.peak - self.lead

    @property
    def budget(self) -> float:
        """Plain steps that it may be behind."""
        return max(REGRET * self.steps, CLUSTERS * self.usual, EARNED * self.peak)

    def update(self, saved: float, steps: float) -> None:
        """Take in drafts on which its choices save so much of ``steps`` plain steps. Mutates."""
        self.lead += saved
        self.peak = max(self.peak, self.lead)
        self.steps += steps

    def scale(self, gain: float) -> None:
        """Take in the gain of a cluster, either way. Mutates."""
        self.clusters += 1
        self.usual += (abs(gain) - self.usual) / min(self.clusters, MEMORY)


@dataclass
class Contest:
    """The champion, the first policy, and the challengers by seat; seats may be empty.

    ``returns`` are the rows at which the first policy came back, one for each champion that gave
    way, ``promoted`` the row from which on this one is served.
    """

    first: Policy
    champion: Policy
    seats: list[Challenger | None] = field(default_factory=lambda: [None] * SEATS)
    regret: Regret = field(default_factory=Regret)
    returns: list[int] = field(default_factory=list)
    promoted: int = 0

    def promote(self, champion: Policy, row: int) -> None:
        """``champion`` is served from ``row`` on: all evidence was against another. Mutates."""
        self.champion, self.promoted = champion, row
        self.seats = [None] * SEATS
        self.regret = Regret()
        if champion.digest != self.first.digest:
            self.seats[FIRST] = Challenger(self.first, row, "first")

    def put_on_trial(self, policy: Policy | None, row: int) -> None:
        """Judge the policy that is on trial on all traffic; None ends that. A challenger that
        passed keeps its record. Mutates."""
        tried, won = self.seats[TRIED], self.seats[WON]
        if policy is None:
            self.seats[TRIED] = None
        elif tried is not None and tried.policy.digest == policy.digest:
            tried.policy = policy  # the same under another version
        elif won is not None and won.policy.digest == policy.digest:
            won.policy = policy
            self.seats[TRIED], self.seats[WON] = won, None
        else:
            self.seats[TRIED] = Challenger(policy, row, "trial")

    def advantages(self, rows: Rows, costs: Costs) -> Floats:
        """Float64 [n, COLUMNS]: plain steps that each seat's choices at ``rows`` save over the
        champion's, 0 where nobody sits, those that the champion's take, and the seats' doubts.
        Mutates: takes in which of those model drafts were tried."""
        seated = [(seat, one.policy) for seat, one in enumerate(self.seats) if one is not None]
        found = np.zeros((len(rows), COLUMNS))
        seats = [seat for seat, _ in seated]
        policies = [policy for _, policy in seated]
        bounded = [seat != FIRST for seat in seats]
        of = worth(self.champion, policies, bounded, rows, costs)
        found[:, seats], found[:, STEPS] = of.saved.T, of.steps
        found[:, DOUBTS][:, seats] = of.doubts.T
        for seat, tokens in zip(seats, of.tried, strict=True):
            one, brought = self.seats[seat], tokens[np.isfinite(tokens)]
            assert one is not None
            one.tried[0] += len(brought)
            one.tried[1] += float(brought.sum())
        return found

    def update(self, numbers: Floats, closed: Sequence[Cluster]) -> None:
        """Take in the :meth:`advantages` of drafts, and final clusters whose first columns are
        such. Mutates."""
        if self.seats[FIRST] is not None:
            first, steps = numbers[:, [FIRST, STEPS]].sum(axis=0).tolist()
            self.regret.update(-first, steps)
        for cluster in closed:
            gains, steps = cluster.sums[:SEATS], float(cluster.sums[STEPS])
            doubts = cluster.sums[DOUBTS]
            if self.seats[FIRST] is not None:
                self.regret.scale(float(gains[FIRST]))
            for seat, one in enumerate(self.seats):
                if one is None or seat == FIRST or cluster.before >= VOTES:
                    continue
                if cluster.unseen >= one.since:
                    vote = one.votes.setdefault(cluster.session, [0.0, 0.0, 0.0])
                    vote[0] += float(gains[seat])
                    vote[1] += steps
                    vote[2] += float(doubts[seat])
                    one.drafts += cluster.rows

    def passed(self, row: int) -> int | None:
        """The seat of the challenger with the highest lower bound, if that suffices; the first
        policy's, where the champion has spent its budget."""
        if self.seats[FIRST] is not None and self.regret.behind > self.regret.budget:
            return FIRST
        best, fewest = None, FEWEST << len(self._recent(row))
        least = 1.0 + MIN_GAIN
        for seat in range(FIRST):
            one = self.seats[seat]
            if one is not None and one.judged >= fewest and (low := one.gain().low) > least:
                best, least = seat, low
        return best

    def accept(self, seat: int, row: int) -> Challenger:
        """Who sits on ``seat`` has won. It goes on being judged while it is on trial. Mutates."""
        one = self.seats[seat]
        assert one is not None
        if seat == FIRST:  # nobody is to take its place while it waits for the registry
            self.seats[:FIRST] = [None] * FIRST
            if not self.returns or self.returns[-1] < self.promoted:  # else it waits already
                self.returns = [*self._recent(row), row]
            self.regret = Regret(usual=self.regret.usual, clusters=self.regret.clusters)
        else:
            self.seats[seat], self.seats[WON] = None, one
        return one

    def clear(self) -> None:
        """Let all challengers go: the traffic that they were made for has changed. Mutates."""
        self.seats[: len(AGES)] = [None] * len(AGES)

    def vacant(self) -> int | None:
        """A seat for a new challenger, if any is free."""
        return next((seat for seat, age in enumerate(AGES) if self.free(seat, age)), None)

    def free(self, seat: int, age: int) -> bool:
        """Whether a seat is empty, or held by one that is behind or beyond twice its age."""
        one = self.seats[seat]
        if one is None:
            return True
        ahead = one.gain().ratio > 1.0 + MIN_GAIN
        return one.judged >= (2 * age if ahead else min(age, FEWEST))

    def _recent(self, row: int) -> list[int]:
        return [each for each in self.returns if row - each < FORGIVEN][-STRICTEST:]

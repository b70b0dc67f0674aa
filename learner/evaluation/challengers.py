"""Champion and challengers, evaluated on unseen drafts.

A challenger is a snapshot of a network in training. Its gain is the off-policy value of its
decisions over the champion's on the same drafts (:func:`learner.evaluation.tune.worth`), which is
exactly zero where both choose alike. It passes when the confidence sequence of its gain lies above
the least gain worth a swap. The unit of evidence is the session, as in a trial
(``learner.evaluation.effect``), since drafts of a session are correlated.

The interval does not cover losses that were never observed. A champion is therefore served on a
budget of regret over the first policy (conservative bandits, Wu et al. 2016; (A,B)-Prod, Sani et
al. 2014), counted on every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import numpy as np
from pydantic import Field

from decoder.contracts.bundle import Policy
from learner.evaluation.clusters import Cluster
from learner.evaluation.costs import Costs
from learner.evaluation.effect import FEWEST, Effect, gain_effect
from learner.evaluation.tune import worth
from learner.training.losses import Floats
from learner.training.rows import Rows

VOTES: Final = 8  # clusters that count of a session, so that no session dominates
AGES: Final = (24, 64, 256)
"""Sessions after which a challenger is replaced, by slot: few detect large changes, many a gain of
one per cent."""
RETUNED, FIRST, WON, TRIED = range(len(AGES), len(AGES) + 4)
"""Seats of the champion with its threshold retuned, of the first policy, of the last challenger
that passed, and of the policy on trial."""
SLOTS: Final = TRIED + 1
STEPS: Final = SLOTS
"""Column of the champion's plain steps, behind those of the slots."""
DOUBTS: Final = slice(STEPS + 1, STEPS + 1 + SLOTS)
"""Columns of what each slot would save more by each token that model drafts in doubt bring."""
COLUMNS: Final = STEPS + 1 + SLOTS
UNTRIED: Final = 8.0
"""Model drafts that brought nothing, as which the first of those in doubt that were verified count:
a challenger gets no credit for what it has not seen, and most of it once some thirty were."""
MIN_GAIN: Final = 0.002
"""Least relative gain in rate of a challenger: less is not worth a swap on every worker."""
REGRET: Final = 0.002
"""Share of the plain steps since its promotion that a champion may fall behind the first policy."""
CLUSTERS: Final = 8.0
"""Minimal budget, in clusters' usual gains. At 2, chance alone returned one in four champions whose
mean gain equals the clusters' deviation, and nearly all with half of it; at 8 none and 1 in 14."""
EARNED: Final = 0.25  # minimal budget, as a share of the steps it has saved
MEMORY: Final = 64.0  # clusters over which the usual gain, the mean absolute gain, is taken
FORGIVEN: Final = 100_000
"""Drafts after which a return of the first policy no longer delays challengers."""
STRICTEST: Final = 5  # most returns that count: a challenger then needs 384 sessions


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
        """Number of sessions."""
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
        """Figures in words."""
        if self.origin == "first":
            return "the champion fell behind the first policy, or the one before, beyond its budget"
        gain = self.gain()
        return (
            f"chooses better: {gain.ratio - 1.0:+.1%} by the labels of {self.judged} sessions, "
            f"at least {gain.low - 1.0:+.1%}"
        )


@dataclass
class Regret:
    """The champion's regret over the first policy since its promotion, on every draft.

    ``lead`` is what it has saved, ``peak`` its maximum, ``steps`` what was served, all in plain
    steps; ``usual`` is a cluster's mean absolute gain.
    """

    lead: float = 0.0
    peak: float = 0.0
    steps: float = 0.0
    usual: float = 0.0
    clusters: int = 0

    @property
    def behind(self) -> float:
        """Plain steps lost since the peak."""
        return self.peak - self.lead

    @property
    def budget(self) -> float:
        """Plain steps that it may lose."""
        return max(REGRET * self.steps, CLUSTERS * self.usual, EARNED * self.peak)

    def update(self, saved: float, steps: float) -> None:
        """Take in drafts on which it ``saved`` plain steps. Mutates."""
        self.lead += saved
        self.peak = max(self.peak, self.lead)
        self.steps += steps

    def scale(self, gain: float) -> None:
        """Take in a cluster's gain or loss. Mutates."""
        self.clusters += 1
        self.usual += (abs(gain) - self.usual) / min(self.clusters, MEMORY)


@dataclass
class Challengers:
    """The champion, the first policy, and challengers by slot; slots may be empty.

    ``returns`` are rows at which the first policy came back, one for each replaced champion;
    ``promoted`` is the row of the champion's promotion.
    """

    first: Policy
    champion: Policy
    slots: Annotated[list[Challenger | None], Field(alias="seats")] = field(
        default_factory=lambda: [None] * SLOTS
    )
    regret: Regret = field(default_factory=Regret)
    returns: list[int] = field(default_factory=list)
    promoted: int = 0

    def promote(self, champion: Policy, row: int) -> None:
        """Promote ``champion`` at ``row``, and discard evidence against another. Mutates."""
        self.champion, self.promoted = champion, row
        self.slots = [None] * SLOTS
        self.regret = Regret()
        if champion.digest != self.first.digest:
            self.slots[FIRST] = Challenger(self.first, row, "first")

    def put_on_trial(self, policy: Policy | None, row: int) -> None:
        """Evaluate the policy on trial on all traffic; None ends that. A candidate keeps its
        record. Mutates."""
        tried, won = self.slots[TRIED], self.slots[WON]
        if policy is None:
            self.slots[TRIED] = None
        elif tried is not None and tried.policy.digest == policy.digest:
            tried.policy = policy  # the same under another version
        elif won is not None and won.policy.digest == policy.digest:
            won.policy = policy
            self.slots[TRIED], self.slots[WON] = won, None
        else:
            self.slots[TRIED] = Challenger(policy, row, "trial")

    def advantages(self, rows: Rows, costs: Costs) -> Floats:
        """Float64 [n, COLUMNS]: plain steps that each slot's choices at ``rows`` save over the
        champion's, 0 for empty slots, those that the champion's take, and the slots' doubts.
        Mutates: takes in which of those model drafts were tried."""
        filled = [(slot, one.policy) for slot, one in enumerate(self.slots) if one is not None]
        found = np.zeros((len(rows), COLUMNS))
        slots = [slot for slot, _ in filled]
        policies = [policy for _, policy in filled]
        bounded = [slot != FIRST for slot in slots]
        of = worth(self.champion, policies, bounded, rows, costs)
        found[:, slots], found[:, STEPS] = of.saved.T, of.steps
        found[:, DOUBTS][:, slots] = of.doubts.T
        for slot, tokens in zip(slots, of.tried, strict=True):
            one, brought = self.slots[slot], tokens[np.isfinite(tokens)]
            assert one is not None
            one.tried[0] += len(brought)
            one.tried[1] += float(brought.sum())
        return found

    def update(self, numbers: Floats, closed: Sequence[Cluster]) -> None:
        """Take in :meth:`advantages` of drafts, and final clusters of them. Mutates."""
        if self.slots[FIRST] is not None:
            first, steps = numbers[:, [FIRST, STEPS]].sum(axis=0).tolist()
            self.regret.update(-first, steps)
        for cluster in closed:
            gains, steps = cluster.sums[:SLOTS], float(cluster.sums[STEPS])
            doubts = cluster.sums[DOUBTS]
            if self.slots[FIRST] is not None:
                self.regret.scale(float(gains[FIRST]))
            for slot, one in enumerate(self.slots):
                if one is None or slot == FIRST or cluster.before >= VOTES:
                    continue
                if cluster.unseen >= one.since:
                    vote = one.votes.setdefault(cluster.session, [0.0, 0.0, 0.0])
                    vote[0] += float(gains[slot])
                    vote[1] += steps
                    vote[2] += float(doubts[slot])
                    one.drafts += cluster.rows

    def passed(self, row: int) -> int | None:
        """The slot of the passing challenger with the highest lower bound; the first policy's if
        the champion has spent its budget."""
        if self.slots[FIRST] is not None and self.regret.behind > self.regret.budget:
            return FIRST
        best, fewest = None, FEWEST << len(self._recent(row))
        least = 1.0 + MIN_GAIN
        for slot in range(FIRST):
            one = self.slots[slot]
            if one is not None and one.judged >= fewest and (low := one.gain().low) > least:
                best, least = slot, low
        return best

    def accept(self, slot: int, row: int) -> Challenger:
        """Accept the challenger on ``slot``, which stays evaluated while on trial. Mutates."""
        one = self.slots[slot]
        assert one is not None
        if slot == FIRST:  # none may replace it while it waits for the registry
            self.slots[:FIRST] = [None] * FIRST
            if not self.returns or self.returns[-1] < self.promoted:  # otherwise it waits already
                self.returns = [*self._recent(row), row]
            self.regret = Regret(usual=self.regret.usual, clusters=self.regret.clusters)
        else:
            self.slots[slot], self.slots[WON] = None, one
        return one

    def clear(self) -> None:
        """Remove all challengers, which were trained for other traffic. Mutates."""
        self.slots[: len(AGES)] = [None] * len(AGES)

    def vacant(self) -> int | None:
        """A free slot for a new challenger, if any."""
        return next((slot for slot, age in enumerate(AGES) if self.free(slot, age)), None)

    def free(self, slot: int, age: int) -> bool:
        """Whether a slot is empty, or its challenger is behind, or beyond twice its age."""
        one = self.slots[slot]
        if one is None:
            return True
        ahead = one.gain().ratio > 1.0 + MIN_GAIN
        return one.judged >= (2 * age if ahead else min(age, FEWEST))

    def _recent(self, row: int) -> list[int]:
        return [each for each in self.returns if row - each < FORGIVEN][-STRICTEST:]

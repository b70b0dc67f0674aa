"""The no-regret floor: never slower, for long, than the best fixed arm.

Every cycle tells what each option would have done in it: a cache draft's accepted length is known
whether or not it was verified, drafting nothing commits one token, the model draft's accepted
length is observed or estimated, and times come from the cost table in force. Options are compared
by the time they need for the tokens that were really committed, stretch by stretch: a cheap option
gets no credit for the luck of a stretch it did not make.

What decides is how far the option in force has fallen behind another one since it was last ahead of
it (a cumulative sum that starts anew at zero: Page, Biometrika 1954). So a long good past hides no
change, and a short bad stretch is no change yet. A policy that is ``EVIDENCE`` behind a fixed arm
is relieved by it at once; it is still asked in the shadow, and is back when it is as far ahead.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import compiled
from decoder.contracts.bundle import MAX_DRAFT
from decoder.contracts.features import FEATURES
from decoder.drafting.matches import BACK
from decoder.policy.loops import drafting_time, part, token_value, verifying
from decoder.policy.rule import CACHE, MODEL

Option = Literal["policy", "none", "model", "cache"]
OPTIONS: Final[tuple[Option, ...]] = ("policy", "none", "model", "cache")
POLICY, NOTHING, MODELLED, CACHED = range(4)
IN_FORCE, FALLS, HAS_MODEL = range(3)
"""Of a floor's whole numbers."""
TOKENS, REQUESTS, CYCLES, COMMITTED, TIME = 0, 1, 2, 3, 7
"""Of a stretch, consecutive cycles of one request: tokens that were committed, requests that shared
its steps, cycles, and from there on what each option would have committed in what time."""
WIDTH: Final = TIME + len(OPTIONS)

STRETCH: Final = 8
"""Cycles of a request taken as one stretch, as the learner takes them."""
DECAY: Final = 0.9
"""Weight of the past at each new stretch in what is reported: about eighty cycles."""
EVIDENCE: Final = 8.0
"""Lead that changes the option in force, in steps of the whole batch that verify nothing: what its
requests suffer together (a wrong price, a kind of text) is seen as often as there are requests."""
TOLERANCE: Final = 0.01
"""Relative loss against a fixed arm that is allowed."""
PROBE_EVERY: Final = 64
"""Steps without a model draft after which one is made, so that a recovered drafter is noticed."""
DOUBT: Final = 0.07
"""Doubt about the cost of a step beside one that verifies nothing, as a share, above which one of
those is made: what drafts cost is counted from it, and believed too dear it would never be made."""
PLAIN_EVERY: Final = 16
"""Steps since the last of these after which the doubt is looked at, and again after as many."""
CUTS: Final = tuple(0.6 * 0.8**k for k in range(11))
"""Chances below which a token of a draft is not verified, of which the best for a step is taken."""
_SUMS: Final = np.append(0.0, np.cumsum(1.0 / np.arange(1, BACK + MAX_DRAFT + 1)))
_FIRST, _MATCH, _LENGTH = (FEATURES.index(name) for name in ("prob_1", "match_len", "draft_len"))


@compiled()
def cut_at(features: NDArray[np.float32], least: float) -> int:
    """Tokens of a cache draft whose chance is at least so much: what matched for n tokens goes on
    for j more with the chance n / (n + j), if its first token, by its counted chance, is right."""
    longest = features[_MATCH] * max(features[_FIRST] / least - 1.0, 0.0)
    return int(min(longest, features[_LENGTH]))


@compiled()
def lengths_worth(
    features: NDArray[np.float32], rows: int, beside: int, rate: float, dense: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Tokens [m] that the cache arm verifies of drafts, whatever a policy expects of them.

    Whole ones cost more than they bring where the time of a step grows with its tokens: on a
    processor, at three requests, they made 0.78 of what stock suffix decoding did.

    Args:
        features: [m, features] of the drafts.
        rows, beside: requests of the step, and tokens of prompts that it reads.
        rate, dense: in force.
    """
    plain, value = verifying(rows + beside, dense), token_value(rows, rate, dense)
    best, found = 0.0, 1.0
    for least in CUTS:
        tokens, gain = 0, 0.0
        for row in features:
            length, match = cut_at(row, least), int(row[_MATCH])
            tokens += length
            upto = min(match + length, BACK + MAX_DRAFT)
            gain += row[_FIRST] * match * (_SUMS[upto] - _SUMS[match])
        gain = gain * value - (verifying(rows + beside + tokens, dense) - plain)
        if gain > best:
            best, found = gain, least
    lengths = np.empty(len(features), np.int64)
    for i in range(len(features)):
        lengths[i] = cut_at(features[i], found)
    return lengths


@compiled()
def outcomes_of(
    arm: int,
    wanted: int,
    wanted_len: int,
    all_wanted: int,
    all_cached: int,
    drafting: int,
    model_len: int,
    beside: int,
    batch: int,
    cached_len: int,
    accepted: int,
    verified: int,
    drafted: int,
    seen: int,
    payoff: float,
    dense: NDArray[np.float64],
    prices: tuple[float, float, float],
    outcomes: NDArray[np.float64],
) -> None:
    """Fill ``outcomes`` [options, 2] with the tokens and microseconds that each would have made of
    a cycle.

    A model draft that was to be made and was not (the drafter failed, the scheduler had no room)
    would have come about for no option: it brings nothing, and costs drafting if that was done.

    Args:
        arm to beside: of the cycle, as :mod:`decoder.core.table` has them.
        seen: of a verified model draft accepted, -1 for none; ``payoff`` was expected.
        dense, prices: of the cost table in force.
    """
    for option in range(len(outcomes)):
        outcomes[option, 0] = 1.0
        outcomes[option, 1] = part(batch, 0, 0, 0.0, 1, beside, dense)
    outcomes[CACHED, 0] = 1.0 + min(accepted, cached_len)
    outcomes[CACHED, 1] = part(batch, cached_len, all_cached, 0.0, 1, beside, dense)
    if model_len:
        brings, length = float(seen) if seen >= 0 else payoff, model_len
        time = drafting_time(model_len, batch, prices)
        if arm == MODEL and not verified:
            brings, length = 0.0, 0
            time = time if drafted else 0.0
        outcomes[MODELLED, 0] = 1.0 + brings
        outcomes[MODELLED, 1] = part(batch, length, model_len * batch, time, batch, beside, dense)
        if wanted == MODEL:
            outcomes[POLICY, 0] = 1.0 + brings
            outcomes[POLICY, 1] = part(batch, length, all_wanted, time, drafting, beside, dense)
    if wanted == CACHE:
        outcomes[POLICY, 0] = 1.0 + min(accepted, wanted_len)
        outcomes[POLICY, 1] = part(batch, wanted_len, all_wanted, 0.0, 1, beside, dense)


@compiled()
def judge(
    steps: NDArray[np.float64],
    needed: NDArray[np.float64],
    ahead: NDArray[np.float64],
    floor: NDArray[np.int64],
) -> None:
    """Weigh a stretch for which each option needs so many ``steps``. Mutates the rest."""
    mine = steps[floor[IN_FORCE]]
    for option in range(len(steps)):
        needed[option] = DECAY * needed[option] + steps[option]
        if option == MODELLED and not floor[HAS_MODEL]:
            continue
        theirs = steps[option] if option == POLICY else steps[option] * (1.0 + TOLERANCE)
        ahead[option] = max(ahead[option] + mine - theirs, 0.0)
    best = NOTHING
    for option in (MODELLED, CACHED):
        if ahead[option] > ahead[best]:
            best = option
    if floor[IN_FORCE] != POLICY and ahead[POLICY] > EVIDENCE:
        best = POLICY
    if ahead[best] > EVIDENCE:
        floor[FALLS] += floor[IN_FORCE] == POLICY
        floor[IN_FORCE] = best
        ahead[:] = 0.0


@compiled()
def add(
    stretch: NDArray[np.float64],
    committed: int,
    outcomes: NDArray[np.float64],
    batch: int,
    needed: NDArray[np.float64],
    ahead: NDArray[np.float64],
    floor: NDArray[np.int64],
) -> None:
    """Add one cycle of a step of ``batch`` requests to a stretch, and judge when that is full.
    Mutates all but ``outcomes``."""
    stretch[CYCLES] += 1.0
    stretch[REQUESTS] += batch
    stretch[TOKENS] += committed
    for option in range(len(outcomes)):
        stretch[COMMITTED + option] += outcomes[option, 0]
        stretch[TIME + option] += outcomes[option, 1]
    cycles = stretch[CYCLES]
    if cycles >= STRETCH:
        plain = stretch[TIME + NOTHING] / cycles * (stretch[REQUESTS] / cycles)
        steps = np.empty(len(outcomes))
        for option in range(len(outcomes)):
            time = stretch[TOKENS] * stretch[TIME + option]
            steps[option] = time / (stretch[COMMITTED + option] * plain)
        stretch[:] = 0.0
        judge(steps, needed, ahead, floor)


class Floor:
    """Compares the policy with the fixed arms of one worker. Written by the engine's thread."""

    def __init__(self, has_model: bool) -> None:
        self.needed, self.ahead = np.zeros(len(OPTIONS)), np.zeros(len(OPTIONS))
        """Steps that each option needed lately, and by how much it is ahead of the one in force."""
        self.state = np.array([POLICY, 0, has_model], np.int64)

    @property
    def in_force(self) -> Option:
        """Who decides."""
        return OPTIONS[int(self.state[IN_FORCE])]

    @in_force.setter
    def in_force(self, option: Option) -> None:
        self.state[IN_FORCE] = OPTIONS.index(option)

    @property
    def falls(self) -> int:
        """Times the policy was relieved."""
        return int(self.state[FALLS])

    @property
    def advantage(self) -> float:
        """Time of the best fixed arm over the policy's on recent stretches; above 1 is ahead."""
        fixed = [NOTHING, CACHED, *([MODELLED] if self.state[HAS_MODEL] else [])]
        mine = float(self.needed[POLICY])
        return float(self.needed[fixed].min()) / mine if mine > 0 else 1.0

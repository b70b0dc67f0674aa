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

from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import ConstantArray, compiled, entry_point
from decoder.contracts.bundle import MAX_DRAFT
from decoder.contracts.features import FEATURE_ROW
from decoder.drafting.matches import BACK
from decoder.policy.loops import drafting_time, part, token_value, verifying
from decoder.policy.rule import CACHE, MODEL

Option = Literal["policy", "none", "model", "cache"]
OPTIONS: Final[tuple[Option, ...]] = ("policy", "none", "model", "cache")
POLICY, NOTHING, MODELLED, CACHED = range(4)
FLOOR: Final = np.dtype(
    [
        ("in_force", "i8"),  # the option that decides
        ("falls", "i8"),  # times that the policy was replaced
        ("has_model", "i8"),
        ("needed", "f8", (len(OPTIONS),)),  # steps that each option needed lately
        ("ahead", "f8", (len(OPTIONS),)),  # by how many it is ahead of the one in force
    ],
    align=True,
)
WINDOW: Final = np.dtype(
    [
        ("tokens", "f8"),  # committed
        ("requests", "f8"),  # that shared its steps
        ("cycles", "f8"),
        ("committed", "f8", (len(OPTIONS),)),  # what each option would have committed
        ("time", "f8", (len(OPTIONS),)),  # in so many microseconds
    ],
    align=True,
)
"""Of consecutive cycles of one request."""

STRETCH: Final = 8
"""Cycles of a request taken as one window, as the learner takes them."""
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


@compiled
def cut_at(features: Any, least: float) -> int:
    """Tokens of a cache draft whose chance is at least so much: what matched for n tokens goes on
    for j more with the chance n / (n + j), if its first token, by its counted chance, is right."""
    longest = features["match_len"] * max(features["prob_1"] / least - 1.0, 0.0)
    return int(min(longest, features["draft_len"]))


@entry_point
def lengths_worth(
    drafts: Annotated[NDArray[Any], FEATURE_ROW],
    rows: int,
    beside: int,
    rate: float,
    dense: ConstantArray,
) -> NDArray[np.int64]:
    """Tokens [m] that the cache arm verifies of drafts, whatever a policy expects of them.

    Whole ones cost more than they bring where the time of a step grows with its tokens: on a
    processor, at three requests, they made 0.78 of what stock suffix decoding did.

    Args:
        drafts: features [m].
        rows, beside: requests of the step, and tokens of prompts that it reads.
        rate, dense: in force.
    """
    plain, value = verifying(rows + beside, dense), token_value(rows, rate, dense)
    best, found = 0.0, 1.0
    for least in CUTS:
        tokens, gain = 0, 0.0
        for i in range(len(drafts)):
            row = drafts[i]
            length, match = cut_at(row, least), int(row["match_len"])
            tokens += length
            upto = min(match + length, BACK + MAX_DRAFT)
            gain += row["prob_1"] * match * (_SUMS[upto] - _SUMS[match])
        gain = gain * value - (verifying(rows + beside + tokens, dense) - plain)
        if gain > best:
            best, found = gain, least
    lengths = np.empty(len(drafts), np.int64)
    for i in range(len(drafts)):
        lengths[i] = cut_at(drafts[i], found)
    return lengths


@compiled
def outcomes_of(
    cycle: Any,
    event: Any,
    dense: NDArray[np.float64],
    prices: tuple[float, float, float],
    outcomes: NDArray[np.float64],
) -> None:
    """Fill ``outcomes`` [options, 2] with the tokens and microseconds that each would have made of
    a cycle.

    A model draft that was to be made and was not (the drafter failed, the scheduler had no room)
    would have come about for no option: it brings nothing, and costs drafting if that was done.

    Args:
        cycle, event: its rows in the table.
        dense, prices: of the cost table in force.
    """
    step, batch, beside = cycle["step"], int(event["batch_size"]), cycle["step"]["prefill_tokens"]
    model_len, cached_len = step["model_len"], cycle["cached_len"]
    for option in range(len(outcomes)):
        outcomes[option, 0] = 1.0
        outcomes[option, 1] = part(batch, 0, 0, 0.0, 1, beside, dense)
    outcomes[CACHED, 0] = 1.0 + min(event["accepted"], cached_len)
    outcomes[CACHED, 1] = part(batch, cached_len, step["all_cached"], 0.0, 1, beside, dense)
    if model_len:
        seen = event["model_accepted"]  # -1: none was verified
        brings, length = float(seen) if seen >= 0 else event["predicted_model"], model_len
        time = drafting_time(model_len, batch, prices)
        if cycle["arm"] == MODEL and not event["verified_len"]:
            brings, length = 0.0, 0
            time = time if event["drafted_len"] else 0.0
        outcomes[MODELLED, 0] = 1.0 + brings
        outcomes[MODELLED, 1] = part(batch, length, model_len * batch, time, batch, beside, dense)
        if cycle["wanted"] == MODEL:
            mine = part(batch, length, step["all_wanted"], time, step["drafting"], beside, dense)
            outcomes[POLICY, 0] = 1.0 + brings
            outcomes[POLICY, 1] = mine
    if cycle["wanted"] == CACHE:
        wanted_len = cycle["wanted_len"]
        mine = part(batch, wanted_len, step["all_wanted"], 0.0, 1, beside, dense)
        outcomes[POLICY, 0] = 1.0 + min(event["accepted"], wanted_len)
        outcomes[POLICY, 1] = mine


@compiled
def judge(floor: Any, steps: NDArray[np.float64]) -> None:
    """Weigh a window for which each option needs so many ``steps``. Mutates ``floor``."""
    needed, ahead, mine = floor["needed"], floor["ahead"], steps[floor["in_force"]]
    for option in range(len(steps)):
        needed[option] = DECAY * needed[option] + steps[option]
        if option == MODELLED and not floor["has_model"]:
            continue
        theirs = steps[option] if option == POLICY else steps[option] * (1.0 + TOLERANCE)
        ahead[option] = max(ahead[option] + mine - theirs, 0.0)
    best = NOTHING
    for option in (MODELLED, CACHED):
        if ahead[option] > ahead[best]:
            best = option
    if floor["in_force"] != POLICY and ahead[POLICY] > EVIDENCE:
        best = POLICY
    if ahead[best] > EVIDENCE:
        floor["falls"] += floor["in_force"] == POLICY
        floor["in_force"] = best
        ahead[:] = 0.0


@compiled
def add(floor: Any, window: Any, committed: int, outcomes: NDArray[np.float64], batch: int) -> None:
    """Add one cycle of a step of ``batch`` requests to a window, and judge when that is full.
    Mutates ``floor`` and ``window``."""
    window["cycles"] += 1.0
    window["requests"] += batch
    window["tokens"] += committed
    for option in range(len(outcomes)):
        window["committed"][option] += outcomes[option, 0]
        window["time"][option] += outcomes[option, 1]
    cycles = window["cycles"]
    if cycles >= STRETCH:
        plain = window["time"][NOTHING] / cycles * (window["requests"] / cycles)
        steps = np.empty(len(outcomes))
        for option in range(len(outcomes)):
            time = window["tokens"] * window["time"][option]
            steps[option] = time / (window["committed"][option] * plain)
        window["cycles"] = window["requests"] = window["tokens"] = 0.0
        window["committed"][:] = 0.0
        window["time"][:] = 0.0
        judge(floor, steps)


class Floor:
    """Compares the policy with the fixed arms of one worker. Written by the engine's thread."""

    def __init__(self, has_model: bool) -> None:
        self.state = np.zeros(1, FLOOR)
        self.state["has_model"] = has_model

    @property
    def needed(self) -> NDArray[np.float64]:
        """Steps that each option needed lately."""
        steps: NDArray[np.float64] = self.state["needed"][0]
        return steps

    @property
    def ahead(self) -> NDArray[np.float64]:
        """Steps that each option is ahead of the one in force."""
        steps: NDArray[np.float64] = self.state["ahead"][0]
        return steps

    @property
    def in_force(self) -> Option:
        """Who decides."""
        return OPTIONS[int(self.state["in_force"][0])]

    @in_force.setter
    def in_force(self, option: Option) -> None:
        self.state["in_force"] = OPTIONS.index(option)

    @property
    def falls(self) -> int:
        """Times the policy was relieved."""
        return int(self.state["falls"][0])

    @property
    def advantage(self) -> float:
        """Time of the best fixed arm over the policy's on recent stretches; above 1 is ahead."""
        fixed = [NOTHING, CACHED, *([MODELLED] if self.state["has_model"][0] else [])]
        mine = float(self.needed[POLICY])
        return float(self.needed[fixed].min()) / mine if mine > 0 else 1.0

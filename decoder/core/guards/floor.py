"""No-regret floor: change detection that keeps a policy from staying slower than a fixed arm.

Every cycle gives the counterfactual outcome of each option. A cache draft's accepted length is
known whether or not it was verified; drafting nothing commits one token; a model draft's accepted
length is observed or estimated; times come from the current cost table. Options are compared by the
time they need for the tokens that were really committed in a window, so none profits from an easy
window.

A CUSUM test (Page, Biometrika 1954) decides: how far the serving option has fallen behind another
since it was last ahead. A long good past hides no change, and one bad window triggers none. A
policy that is ``EVIDENCE`` behind a fixed arm is replaced by it at once. It is still evaluated in
the shadow, and returns when it is as far ahead.
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
        ("in_force", "i8"),  # the serving option
        ("falls", "i8"),  # fallbacks so far
        ("has_model", "i8"),
        ("needed", "f8", (len(OPTIONS),)),  # recent steps that each option needed, decayed
        ("ahead", "f8", (len(OPTIONS),)),  # its lead over the serving option, in steps
    ],
    align=True,
)
WINDOW: Final = np.dtype(
    [
        ("tokens", "f8"),  # committed
        ("requests", "f8"),  # sum of the batch sizes
        ("cycles", "f8"),
        ("committed", "f8", (len(OPTIONS),)),  # tokens that each option would have committed
        ("time", "f8", (len(OPTIONS),)),  # microseconds that it would have taken
    ],
    align=True,
)
"""Sums over consecutive cycles of one request."""

STRETCH: Final = 8
"""Cycles of a request per window, as in the learner."""
DECAY: Final = 0.9
"""Decay of the reported ``needed`` per window: about eighty cycles."""
EVIDENCE: Final = 8.0
"""Lead that changes the serving option, in plain steps of the whole batch: a cause common to its
requests (a wrong price, a kind of text) is counted once per request."""
TOLERANCE: Final = 0.01
"""Allowed relative loss against a fixed arm."""
PROBE_EVERY: Final = 64
"""Steps without a model draft after which one is probed, to notice a recovered drafter."""
DOUBT: Final = 0.07
"""Relative uncertainty of a step's cost against a plain step above which a plain step is probed:
draft costs are measured from it, and if it were overestimated it would never be run."""
PLAIN_EVERY: Final = 16
"""Steps between two checks of that uncertainty, counted from the last plain step."""
CUTS: Final = tuple(0.6 * 0.8**k for k in range(11))
"""Candidate survival thresholds below which a draft is cut; the best one for a step is used."""
_SUMS: Final = np.append(0.0, np.cumsum(1.0 / np.arange(1, BACK + MAX_DRAFT + 1)))


@compiled
def cut_at(features: Any, least: float) -> int:
    """Tokens of a cache draft that survive with chance ``least`` or more. A match of n tokens
    continues for j more with chance n / (n + j), times the chance of its first token."""
    longest = features["match_len"] * max(features["prob_1"] / least - 1.0, 0.0)
    return int(min(longest, features["draft_len"]))


@entry_point
def lengths_worth(
    drafts: Annotated[NDArray[Any], FEATURE_ROW],
    rows: int,
    prefill: int,
    rate: float,
    dense: ConstantArray,
) -> NDArray[np.int64]:
    """Tokens [m] that the cache arm verifies of each draft, independent of the policy.

    Full drafts do not pay where step time grows with tokens: on a CPU with three requests they
    reached 0.78 of the speed of stock suffix decoding.

    Args:
        drafts: features [m].
        rows, prefill: requests and prompt tokens of the step.
        rate, dense: current rate and cost table.
    """
    plain, value = verifying(rows + prefill, dense), token_value(rows, rate, dense)
    best, threshold = 0.0, 1.0
    for least in CUTS:
        tokens, gain = 0, 0.0
        for i in range(len(drafts)):
            row = drafts[i]
            length, match = cut_at(row, least), int(row["match_len"])
            tokens += length
            upto = min(match + length, BACK + MAX_DRAFT)
            gain += row["prob_1"] * match * (_SUMS[upto] - _SUMS[match])
        gain = gain * value - (verifying(rows + prefill + tokens, dense) - plain)
        if gain > best:
            best, threshold = gain, least
    lengths = np.empty(len(drafts), np.int64)
    for i in range(len(drafts)):
        lengths[i] = cut_at(drafts[i], threshold)
    return lengths


@compiled
def outcomes_of(
    cycle: Any,
    event: Any,
    dense: NDArray[np.float64],
    prices: tuple[float, float, float],
    outcomes: NDArray[np.float64],
) -> None:
    """Fill ``outcomes`` [options, 2] with each option's counterfactual tokens and microseconds in a
    cycle.

    If a chosen model draft was not made (drafter failed, no room in the scheduler), no option would
    have had it: it yields nothing, and costs drafting only if that ran.

    Args:
        cycle, event: its rows in the table.
        dense, prices: of the current cost table.
    """
    step, batch, prefill = cycle["step"], int(event["batch_size"]), cycle["step"]["prefill_tokens"]
    model_len, cached_len = step["model_len"], cycle["cached_len"]
    for option in range(len(outcomes)):
        outcomes[option, 0] = 1.0
        outcomes[option, 1] = part(batch, 0, 0, 0.0, 1, prefill, dense)
    outcomes[CACHED, 0] = 1.0 + min(event["accepted"], cached_len)
    outcomes[CACHED, 1] = part(batch, cached_len, step["all_cached"], 0.0, 1, prefill, dense)
    if model_len:
        seen = event["model_accepted"]  # -1: none was verified
        yielded, length = float(seen) if seen >= 0 else event["predicted_model"], model_len
        time = drafting_time(model_len, batch, prices)
        if cycle["arm"] == MODEL and not event["verified_len"]:
            yielded, length = 0.0, 0
            time = time if event["drafted_len"] else 0.0
        outcomes[MODELLED, 0] = 1.0 + yielded
        outcomes[MODELLED, 1] = part(batch, length, model_len * batch, time, batch, prefill, dense)
        if cycle["wanted"] == MODEL:
            us = part(batch, length, step["all_wanted"], time, step["drafting"], prefill, dense)
            outcomes[POLICY, 0] = 1.0 + yielded
            outcomes[POLICY, 1] = us
    if cycle["wanted"] == CACHE:
        wanted_len = cycle["wanted_len"]
        us = part(batch, wanted_len, step["all_wanted"], 0.0, 1, prefill, dense)
        outcomes[POLICY, 0] = 1.0 + min(event["accepted"], wanted_len)
        outcomes[POLICY, 1] = us


@compiled
def judge(floor: Any, steps: NDArray[np.float64]) -> None:
    """Update the test with a window in which each option needs ``steps``. Mutates ``floor``."""
    needed, ahead, serving_steps = floor["needed"], floor["ahead"], steps[floor["in_force"]]
    for option in range(len(steps)):
        needed[option] = DECAY * needed[option] + steps[option]
        if option == MODELLED and not floor["has_model"]:
            continue
        option_steps = steps[option] if option == POLICY else steps[option] * (1.0 + TOLERANCE)
        ahead[option] = max(ahead[option] + serving_steps - option_steps, 0.0)
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
    """Add one cycle of a step of ``batch`` requests to a window; a full window updates the test.
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
        """Recent steps that each option needed, decayed."""
        steps: NDArray[np.float64] = self.state["needed"][0]
        return steps

    @property
    def ahead(self) -> NDArray[np.float64]:
        """Lead of each option over the serving one, in plain steps."""
        steps: NDArray[np.float64] = self.state["ahead"][0]
        return steps

    @property
    def in_force(self) -> Option:
        """The serving option."""
        return OPTIONS[int(self.state["in_force"][0])]

    @in_force.setter
    def in_force(self, option: Option) -> None:
        self.state["in_force"] = OPTIONS.index(option)

    @property
    def falls(self) -> int:
        """Fallbacks so far."""
        return int(self.state["falls"][0])

    @property
    def advantage(self) -> float:
        """Time of the best fixed arm over the policy's on recent windows; above 1 is faster."""
        fixed = [NOTHING, CACHED, *([MODELLED] if self.state["has_model"][0] else [])]
        policy_steps = float(self.needed[POLICY])
        return float(self.needed[fixed].min()) / policy_steps if policy_steps > 0 else 1.0

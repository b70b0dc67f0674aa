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

from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import ConstantArray, compiled, entry_point
from decoder.contracts.bundle import MAX_DRAFT
from decoder.contracts.features import FEATURE_ROW
from decoder.drafting.matches import BACK
from decoder.policy.loops import cost_share, drafting_time, token_value, verifying
from decoder.policy.rule import CACHE, MODEL, NONE

Option = Literal["policy", "none", "model", "cache"]
OPTIONS: Final[tuple[Option, ...]] = ("policy", "none", "model", "cache")
POLICY, NOTHING, MODELLED, CACHED, FORMER = range(5)
"""Options by number; the last is the policy before, of which ``probation`` makes use."""
Dense = NDArray[np.float64]
Prices = tuple[float, float, float]
FLOOR: Final = np.dtype(
    [
        ("enabled", "i8"),  # 0: the policy always decides
        ("serving", "i8"),  # the option that decides
        ("fallbacks", "i8"),  # so far
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
        ("committed", "f8", (FORMER + 1,)),  # tokens that each option would have committed
        ("time", "f8", (FORMER + 1,)),  # microseconds that it would have taken
        ("steps", "f8", (FORMER + 1,)),  # once full, plain steps that it would have needed
        ("weight", "f8"),  # steps for which those with a choice of the former policy stand
    ],
    align=True,
)
"""Sums over consecutive cycles of one request."""

WINDOW_CYCLES: Final = 8
"""Cycles of a request per window, as in the learner."""
DECAY: Final = 0.9  # decay of the reported needed per window: about eighty cycles
EVIDENCE: Final = 8.0
"""Lead that changes the serving option, in plain steps of the whole batch: a cause common to its
requests (a wrong price, a kind of text) is counted once per request."""
TOLERANCE: Final = 0.01  # allowed relative loss against a fixed arm
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
def cache_arm_lengths(
    drafts: Annotated[NDArray[Any], FEATURE_ROW],
    rows: int,
    prefill: int,
    rate: float,
    dense: ConstantArray,
) -> NDArray[np.int64]:
    """Tokens [m] that the cache arm verifies of each draft in a step of ``rows`` requests and
    ``prefill`` prompt tokens, independent of the policy.

    Full drafts do not pay where step time grows with tokens: on a CPU with three requests they
    reached 0.78 of the speed of stock suffix decoding.
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


class OptionChoice(NamedTuple):
    """What an option chose for a request, and for its step."""

    arm: int
    length: int  # draft tokens of the request
    step_tokens: int  # draft tokens of all requests
    step_models: int  # requests with a model draft


@compiled
def outcome_of(
    choice: OptionChoice, cycle: Any, event: Any, dense: Dense, prices: Prices
) -> tuple[float, float]:
    """Counterfactual tokens and microseconds of ``choice`` in a cycle.

    If a model draft that was to be made was not (drafter failed, no room in the scheduler), no
    option would have had it: it yields nothing, and costs drafting only if that ran.
    """
    step, batch, length = cycle["step"], int(event["batch_size"]), choice.length
    tokens, drafting_us, models = 1.0, 0.0, 1
    if choice.arm == CACHE:
        tokens += min(event["accepted"], length)
    elif choice.arm == MODEL:
        models, drafting_us = choice.step_models, drafting_time(length, batch, prices)
        accepted = event["model_accepted"]  # -1: none was verified
        if cycle["arm"] != MODEL or event["verified_len"]:
            tokens += accepted if accepted >= 0 else event["predicted_model"]
        else:
            length, drafting_us = 0, drafting_us if event["drafted_len"] else 0.0
    prefill = step["prefill_tokens"]
    share = cost_share(batch, length, choice.step_tokens, drafting_us, models, prefill, dense)
    return tokens, share


@compiled
def outcomes_of(
    cycle: Any, event: Any, dense: Dense, prices: Prices, outcomes: NDArray[np.float64]
) -> None:
    """Fill ``outcomes`` [options, 2] with each option's :func:`outcome_of` a cycle; the former
    policy's is :func:`former_outcome`."""
    step, k = cycle["step"], cycle["step"]["model_len"]
    batch: Any = np.int64(event["batch_size"])  # int32 there: all choices have one type
    policy = OptionChoice(
        cycle["policy_arm"], cycle["policy_len"], step["policy_tokens"], step["policy_models"]
    )
    model = OptionChoice(MODEL if k else NONE, k, k * batch, batch)
    cache = OptionChoice(CACHE, cycle["cached_len"], step["cached_tokens"], 0)
    outcomes[POLICY] = outcome_of(policy, cycle, event, dense, prices)
    outcomes[NOTHING] = outcome_of(OptionChoice(NONE, 0, 0, 0), cycle, event, dense, prices)
    outcomes[MODELLED] = outcome_of(model, cycle, event, dense, prices)
    outcomes[CACHED] = outcome_of(cache, cycle, event, dense, prices)


@compiled
def former_outcome(
    cycle: Any, event: Any, dense: Dense, prices: Prices, outcomes: NDArray[np.float64]
) -> None:
    """Fill the former policy's row of ``outcomes``: the champion's where it was not evaluated."""
    step = cycle["step"]
    outcomes[FORMER] = outcomes[POLICY]
    if step["former_weight"]:
        choice = OptionChoice(
            cycle["former_arm"], cycle["former_len"], step["former_tokens"], step["former_models"]
        )
        outcomes[FORMER] = outcome_of(choice, cycle, event, dense, prices)


@compiled
def update_test(floor: Any, steps: NDArray[np.float64]) -> None:
    """Update the test with a window in which each option needs ``steps``. Mutates ``floor``."""
    needed, ahead, serving_steps = floor["needed"], floor["ahead"], steps[floor["serving"]]
    for option in range(len(needed)):
        needed[option] = DECAY * needed[option] + steps[option]
        option_steps = steps[option] if option == POLICY else steps[option] * (1.0 + TOLERANCE)
        ahead[option] = max(ahead[option] + serving_steps - option_steps, 0.0)
    best = NOTHING
    for option in (MODELLED, CACHED):
        if ahead[option] > ahead[best]:
            best = option
    if floor["serving"] != POLICY and ahead[POLICY] > EVIDENCE:
        best = POLICY
    if ahead[best] > EVIDENCE:
        floor["fallbacks"] += floor["serving"] == POLICY
        floor["serving"] = best
        ahead[:] = 0.0


@compiled
def add_cycle(
    floor: Any, window: Any, committed: int, outcomes: NDArray[np.float64], batch: int
) -> bool:
    """Add one cycle of a step of ``batch`` requests to a window; a full window updates the test.
    Whether it is full. Mutates ``floor`` and ``window``."""
    window["cycles"] += 1.0
    window["requests"] += batch
    window["tokens"] += committed
    for option in range(len(outcomes)):
        window["committed"][option] += outcomes[option, 0]
        window["time"][option] += outcomes[option, 1]
    cycles, steps = window["cycles"], window["steps"]
    if cycles < WINDOW_CYCLES:
        return False
    plain = window["time"][NOTHING] / cycles * (window["requests"] / cycles)
    for option in range(len(outcomes)):
        time = window["tokens"] * window["time"][option]
        steps[option] = time / (window["committed"][option] * plain)
    window["cycles"] = window["requests"] = window["tokens"] = 0.0
    window["committed"][:] = 0.0
    window["time"][:] = 0.0
    update_test(floor, steps)
    return True


class Floor:
    """The test of one worker, in ``state`` (:data:`FLOOR` [1]). For the engine's thread."""

    def __init__(self, enabled: bool = True) -> None:
        self.state = np.zeros(1, FLOOR)
        self.state["enabled"] = enabled

    @property
    def serving(self) -> Option:
        """The option that decides."""
        return OPTIONS[int(self.state["serving"][0])]

    @serving.setter
    def serving(self, option: Option) -> None:
        self.state["serving"] = OPTIONS.index(option)

    @property
    def fallbacks(self) -> int:
        """Fallbacks so far."""
        return int(self.state["fallbacks"][0])

    @property
    def advantage(self) -> float:
        """Time of the best fixed arm over the policy's on recent windows; above 1 is faster."""
        policy, *fixed = self.state["needed"][0].tolist()
        return min(fixed) / policy if policy > 0.0 else 1.0

    def fall_back(self, candidates: NDArray[Any]) -> None:
        """Replace the arms of ``candidates`` by the fixed arm that serves. Mutates."""
        serving, arms = self.serving, candidates["arm"]
        if serving == "model":
            arms[candidates["unable"] == 0] = MODEL
        else:
            arms[:] = NONE
            arms[candidates["draft"] >= 0] = CACHE if serving == "cache" else NONE

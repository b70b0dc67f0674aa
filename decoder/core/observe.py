"""Process the tokens a step committed, compiled: resolve labels and learn payoffs.

:func:`observe` returns early with a code when a request needs Python (a larger window, its end).
Call it again to resume.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Handle, Int32Array, compiled, entry_point
from decoder.contracts.features import RECENT
from decoder.core import table as at
from decoder.core.cycles import complete_cycle
from decoder.core.payoff.memory import learn
from decoder.core.payoff.model_arm import observe_model, payoff_of
from decoder.core.requests import ADVANCED
from decoder.core.table import state_of
from decoder.drafting.matches import BACK, predicted
from decoder.drafting.windows import Pool, extend, fits
from decoder.policy.rule import MODEL, NONE

DONE, GROW, LOST, OVER = range(4)
"""Why :func:`observe` returned: all done, or a request's tokens do not fit into its windows, its
length differs from the engine's, or it has ended."""
OBSERVED: Final = np.dtype(
    [
        ("step_tokens", "i8"),
        ("step_us", "f8"),
        ("compared", "i8"),  # whether to count tokens predicted by a request's own text
        # outputs
        ("closed", "i8"),  # cycles closed
        ("committed", "i8"),  # tokens committed in closed cycles
        ("verified", "i8"),  # draft tokens verified in closed cycles
        ("predicted", "i8"),  # tokens predicted by their request's own text
        ("drafts", "i8"),  # draft tokens verified by all requests
    ],
    align=True,
)
"""A step, and the totals of its requests."""
SMOOTHING: Final = (0.3, 0.05, 0.1, 0.1)
"""Smoothing weights of a new payoff: fast mean, slow mean, share of accepted first tokens, and a
request's mean of model drafts."""


@compiled
def until_end(handle: Handle, slot: int, tokens: NDArray[np.int32]) -> tuple[int, int]:
    """Number of ``tokens`` the client will see, and how the request ends with them, if it does.

    An engine may report tokens after the end. Counting them would overstate acceptance in every
    last cycle.
    """
    table = state_of(handle).table
    request = table.requests[slot]
    left = max(request["max_tokens"] - (request["length"] - request["prompt_len"]), 0)
    for i in range(min(len(tokens), left)):
        for j in range(request["num_stops"]):
            if tokens[i] == table.stops[slot, j]:
                return i + 1, at.STOPPED
    if len(tokens) >= left:
        return left, at.FULL_LENGTH
    return len(tokens), at.LIVE


@compiled
def learn_payoff(request: Any, accepted: int, length: int) -> None:
    """Update a request's payoff statistics with a resolved draft of ``length``. Mutates."""
    request["payoffs"][request["num_payoffs"] % RECENT] = accepted
    request["num_payoffs"] += 1
    value = np.log1p(float(accepted))
    request["first"] += SMOOTHING[2] * ((1.0 if accepted > 0 else 0.0) - request["first"])
    request["log_fast"] += SMOOTHING[0] * (value - request["log_fast"])
    request["log_slow"] += SMOOTHING[1] * (value - request["log_slow"])
    if accepted < length:
        request["broke_at"] = request["length"] - request["prompt_len"]


@compiled
def resolve(handle: Handle, slot: int, tokens: NDArray[np.int32]) -> None:
    """Compare a request's open drafts with the committed tokens; a label resolves when its draft is
    rejected or fully matched. Mutates."""
    state = state_of(handle)
    table, request, kept = state.table, state.table.requests[slot], 0
    for i in range(request["num_open"]):
        number = table.open[slot, i]
        cycle, length = table.cycles[number], table.rows[number]["draft_len"]
        matched, j = cycle["matched"], 0
        while j < len(tokens) and matched < length and table.drafts[number, matched] == tokens[j]:
            matched += 1
            j += 1
        cycle["matched"] = matched
        if matched < length and j == len(tokens):
            table.open[slot, kept] = number
            kept += 1
            continue
        learn_payoff(request, matched, length)
        learn(state.payoffs, request["memory"], cycle["keys"], matched, length)
        complete_cycle(handle, number, matched, 0)
    request["num_open"] = kept


@compiled
def count(handle: Handle, slot: int, number: int, reported: int) -> None:
    """Count a closed cycle for which the engine ``reported`` so many tokens. Mutates.

    A cycle that verified nothing (the scheduler had no room for its draft) counts as arm "none".
    """
    state = state_of(handle)
    table, odds = state.table, state.odds
    row, cycle = table.rows[number], table.cycles[number]
    verified, committed = row["verified_len"], cycle["committed"]
    accepted = min(reported - 1, committed)
    arm_counts = table.counts[0]["arms"][cycle["arm"] if verified else NONE]
    arm_counts["cycles"] += 1
    arm_counts["drafted"] += verified
    arm_counts["accepted"] += accepted
    if verified and cycle["arm"] == MODEL and committed == reported:
        row["model_accepted"] = accepted
        observe_model(odds, state.seen, accepted, verified, cycle["step"]["models"])
        yielded = accepted + payoff_of(odds, len(odds) - verified) * (accepted == verified)
        request = table.requests[slot]
        request["model_recent"] += SMOOTHING[3] * (yielded - request["model_recent"])


@compiled
def append(pool: Pool, request: Any, tokens: NDArray[np.int32]) -> None:
    """Append a request's committed tokens to its text and context. Mutates."""
    count = len(tokens)
    if request["index"]:
        extend(pool, request["index"], tokens)
    context, keep = request["context"], max(BACK - count, 0)
    for j in range(keep):
        context[j] = context[j + BACK - keep]
    for j in range(keep, BACK):
        context[j] = tokens[count - BACK + j]
    request["length"] += count


@compiled
def close_cycle(handle: Handle, slot: int, report: Any, step: Any, reported: int) -> None:
    """Close the cycle of a request that a step advanced by ``reported`` tokens. Mutates."""
    table = state_of(handle).table
    request = table.requests[slot]
    number, request["cycle"] = request["cycle"], -1
    if number < 0:
        return
    row = table.rows[number]
    row["verified_len"], row["step_tokens"] = report["verified"], step["step_tokens"]
    row["step_us"] = step["step_us"]
    table.cycles[number]["committed"] = report["committed"]
    step["closed"] += 1
    step["committed"] += report["committed"]
    step["verified"] += report["verified"]
    count(handle, slot, number, reported)
    if row["draft_len"] == 0:
        complete_cycle(handle, number, 0, 0)


@entry_point
def observe(
    handle: Handle,
    advanced: Annotated[NDArray[Any], ADVANCED],
    tokens: Int32Array,
    steps: Annotated[NDArray[Any], OBSERVED],
    first: int,
) -> tuple[int, int]:
    """Process the committed ``tokens`` of n requests from index ``first`` on; labels resolve. Adds
    totals to ``steps`` [1]. Mutates.

    Returns:
        index where it stopped, and why.
    """
    state = state_of(handle)
    table, pool, step = state.table, state.pool, steps[0]
    step["drafts"] = advanced["verified"].sum()
    for i in range(first, len(advanced)):
        report = advanced[i]
        slot = report["slot"]
        if slot < 0 or table.requests[slot]["ended"]:
            continue
        request = table.requests[slot]
        reported = tokens[(advanced[i - 1]["end"] if i else 0) : report["end"]]
        length, ended = until_end(handle, slot, reported)
        if report["length"] and not ended and request["length"] + length != report["length"]:
            table.counts[0]["tokens"] += length
            return i, LOST
        index = request["index"]
        if index and not fits(pool, index, length):
            return i, GROW
        append(pool, request, reported[:length])
        step["predicted"] += predicted(pool, index, length * step["compared"])
        table.counts[0]["tokens"] += length
        report["committed"] = length
        close_cycle(handle, slot, report, step, len(reported))
        resolve(handle, slot, reported[:length])
        if ended:
            request["ended"] = ended
            return i + 1, OVER
    return len(advanced), DONE

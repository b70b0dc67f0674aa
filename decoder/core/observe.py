"""What a step committed of its requests, compiled: labels resolve, and payoffs are learned.

:func:`observe` returns early with a code where a request needs Python (its first page, a larger
memory, its end). Call it again to resume.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Handle, Int32Array, compiled, entry_point
from decoder.contracts.features import RECENT
from decoder.core import table as at
from decoder.core.cycles import await_settling
from decoder.core.payoff.memory import lacks, learn
from decoder.core.payoff.model_arm import observe_model, payoff_of
from decoder.core.requests import ADVANCED
from decoder.core.table import state_of
from decoder.drafting.matches import BACK, foretold
from decoder.drafting.pages import Pool, append_both, fits
from decoder.policy.rule import MODEL, NONE

DONE, WRITE, GROW, LOST, OVER = range(5)
"""Why :func:`observe` stopped: at the end, or at a request whose tokens are to be written, whose
memory must grow, whose length is not the engine's, or that has ended."""
WRITTEN, GROWN, BEGUN = 1, 2, 4
"""Of ``done``: what was done for a request meanwhile, and whether a page was begun for it."""
OBSERVED: Final = np.dtype(
    [
        ("step_tokens", "i8"),
        ("step_us", "f8"),
        ("compared", "i8"),  # whether to count the tokens that text predicted
        # filled
        ("closed", "i8"),  # cycles
        ("committed", "i8"),  # tokens, and draft tokens verified, in these
        ("verified", "i8"),
        ("predicted", "i8"),  # tokens that their own text predicted
        ("began", "i8"),  # requests that began a page
        ("drafts", "i8"),  # draft tokens verified of all
    ],
    align=True,
)
"""A step, and what its requests come to together."""
TAUGHT: Final = (0.3, 0.05, 0.1, 0.1)
"""How much of a new payoff enters the fast and the slow mean, the share of first tokens accepted,
and a request's mean of model drafts."""


@compiled
def until_end(handle: Handle, slot: int, tokens: NDArray[np.int32]) -> tuple[int, int]:
    """How many of ``tokens`` the client will see, and whether its request ends with them.

    An engine may report more than a request may have; counting what lies behind the end would
    overstate acceptance in every last cycle.
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


@entry_point
def visible(handle: Handle, slot: int, tokens: Int32Array) -> int:
    """How many of ``tokens`` the client of a request will see."""
    return until_end(handle, slot, tokens)[0]


@compiled
def learn_payoff(request: Any, accepted: int, length: int) -> None:
    """Take in a resolved payoff of a request's draft of ``length``. Mutates."""
    request["payoffs"][request["num_payoffs"] % RECENT] = accepted
    request["num_payoffs"] += 1
    value = np.log1p(float(accepted))
    request["first"] += TAUGHT[2] * ((1.0 if accepted > 0 else 0.0) - request["first"])
    request["log_fast"] += TAUGHT[0] * (value - request["log_fast"])
    request["log_slow"] += TAUGHT[1] * (value - request["log_slow"])
    if accepted < length:
        request["broke_at"] = request["length"] - request["prompt_len"]


@compiled
def resolve(handle: Handle, slot: int, tokens: NDArray[np.int32]) -> None:
    """Compare a request's open drafts with what was committed behind them; those that broke off,
    or came to their end, are known. Mutates."""
    state = state_of(handle)
    table, request, kept = state.table, state.table.requests[slot], 0
    for i in range(request["num_open"]):
        number = table.open[slot, i]
        cycle, length = table.cycles[number], table.rows[number]["draft_len"]
        held, place = cycle["held"], 0
        while place < len(tokens) and held < length and table.drafts[number, held] == tokens[place]:
            held += 1
            place += 1
        cycle["held"] = held
        if held < length and place == len(tokens):
            table.open[slot, kept] = number
            kept += 1
            continue
        learn_payoff(request, held, length)
        learn(state.payoffs, request["memory"], cycle["keys"], held, length)
        await_settling(handle, number, held, 0)
    request["num_open"] = kept


@compiled
def count(handle: Handle, slot: int, number: int, reported: int) -> None:
    """Count a closed cycle of which the engine ``reported`` so many tokens. Mutates.

    Nothing verified (a draft the scheduler had no room for) is a cycle of the arm "none".
    """
    state = state_of(handle)
    table, odds = state.table, state.odds
    row, cycle = table.rows[number], table.cycles[number]
    verified, committed = row["verified_len"], cycle["committed"]
    accepted = min(reported - 1, committed)
    mine = table.counts[0]["arms"][cycle["arm"] if verified else NONE]
    mine["cycles"] += 1
    mine["drafted"] += verified
    mine["accepted"] += accepted
    if verified and cycle["arm"] == MODEL and committed == reported:
        row["model_accepted"] = accepted
        observe_model(odds, state.seen, accepted, verified, cycle["step"]["models"])
        whole = accepted + payoff_of(odds, len(odds) - verified) * (accepted == verified)
        request = table.requests[slot]
        request["model_recent"] += TAUGHT[3] * (whole - request["model_recent"])


@compiled
def append(pool: Pool, request: Any, tokens: NDArray[np.int32], done: int) -> int:
    """Write what a request committed to its text and its context; what was done for it. Mutates."""
    index, count = request["index"], len(tokens)
    if index and count and not done & WRITTEN and append_both(pool, index, tokens):
        done |= BEGUN
    context, keep = request["context"], max(BACK - count, 0)
    for j in range(keep):
        context[j] = context[j + BACK - keep]
    for j in range(keep, BACK):
        context[j] = tokens[count - BACK + j]
    request["length"] += count
    return done


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
        await_settling(handle, number, 0, 0)


@entry_point
def observe(
    handle: Handle,
    advanced: Annotated[NDArray[Any], ADVANCED],
    tokens: Int32Array,
    steps: Annotated[NDArray[Any], OBSERVED],
    first: int,
) -> tuple[int, int]:
    """Take in what a step committed of n requests; labels resolve. Mutates.

    Args:
        handle: of the :class:`~decoder.core.table.State`.
        advanced: [n], whose ``done`` says what was done for each meanwhile.
        tokens: of all, up to the ``end`` of each.
        steps: [1], of which sums are added up.
        first: of the requests, to go on with.

    Returns:
        where it stopped, and why.
    """
    state = state_of(handle)
    table, pool, payoffs, step = state.table, state.pool, state.payoffs, steps[0]
    step["drafts"] = advanced["verified"].sum()
    for i in range(first, len(advanced)):
        report = advanced[i]
        slot, done = report["slot"], report["done"]
        if slot < 0 or table.requests[slot]["ended"]:
            continue
        request = table.requests[slot]
        came = tokens[(advanced[i - 1]["end"] if i else 0) : report["end"]]
        length, ended = until_end(handle, slot, came)
        if report["length"] and not ended and request["length"] + length != report["length"]:
            table.counts[0]["tokens"] += length
            return i, LOST
        index = request["index"]
        if index and length and not done & WRITTEN and not fits(pool, index, length):
            return i, WRITE
        labels = request["num_open"]
        if labels and not done & GROWN and lacks(payoffs, request["memory"], labels):
            return i, GROW
        report["done"] = append(pool, request, came[:length], done)
        step["began"] += report["done"] & BEGUN > 0
        step["predicted"] += foretold(pool, index, length * step["compared"])
        table.counts[0]["tokens"] += length
        report["committed"] = length
        close_cycle(handle, slot, report, step, len(came))
        resolve(handle, slot, came[:length])
        if ended:
            request["ended"] = ended
            return i + 1, OVER
    return len(advanced), DONE

"""What a step committed of its requests, compiled: labels resolve, and payoffs are learned.

Where a request needs what only Python can do (a first page, a larger memory, its end), :func:`take`
stops there, says what, and goes on when it is called again.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import (
    HANDLE,
    IDS,
    REAL,
    REALS,
    WHOLE,
    WHOLES,
    YES,
    compiled,
)
from decoder.contracts.features import RECENT
from decoder.core import table as at
from decoder.core.cycles import await_settling
from decoder.core.payoff.memory import Payoffs, lacks, learn, payoffs_of
from decoder.core.payoff.model_arm import observe_model, payoff_of
from decoder.core.table import TABLE, Table, table_of
from decoder.drafting.matches import BACK, foretold
from decoder.drafting.pages import append_both, fits, pool_of
from decoder.policy.rule import MODEL, NONE

DONE, WRITE, GROW, LOST, OVER = range(5)
"""Why :func:`take` stopped: at the end, or at a request whose tokens are to be written, whose
memory must grow, whose length is not the engine's, or that has ended."""
WRITTEN, GROWN, BEGUN = 1, 2, 4
"""Of ``done``: what was done for a request meanwhile, and whether a page was begun for it."""
FORETOLD, BEGAN = 4, 5
"""Of ``sums``, behind those that :func:`take` names first."""
TAUGHT: Final = (0.3, 0.05, 0.1, 0.1)
"""How much of a new payoff enters the fast and the slow mean, the share of first tokens accepted,
and a request's mean of model drafts."""


@compiled((TABLE, WHOLE, IDS))
def until_end(table: Table, slot: int, tokens: NDArray[np.int32]) -> tuple[int, int]:
    """How many of ``tokens`` the client will see, and whether its request ends with them.

    An engine may report more than a request may have; counting what lies behind the end would
    overstate acceptance in every last cycle.
    """
    request = table.requests[slot]
    left = max(request[at.MAX_TOKENS] - (request[at.LENGTH] - request[at.PROMPT]), 0)
    for i in range(min(len(tokens), left)):
        for j in range(request[at.STOPS]):
            if tokens[i] == table.stops[slot, j]:
                return i + 1, at.STOPPED
    if len(tokens) >= left:
        return left, at.FULL_LENGTH
    return len(tokens), at.LIVE


@compiled()
def learn_payoff(table: Table, slot: int, accepted: int, length: int) -> None:
    """Take in a resolved payoff of a request's draft of ``length``. Mutates."""
    request, means = table.requests[slot], table.means[slot]
    table.payoffs[slot, request[at.PAYOFFS_SEEN] % RECENT] = accepted
    request[at.PAYOFFS_SEEN] += 1
    value = np.log1p(float(accepted))
    means[at.FIRST] += TAUGHT[2] * ((1.0 if accepted > 0 else 0.0) - means[at.FIRST])
    means[at.FAST] += TAUGHT[0] * (value - means[at.FAST])
    means[at.SLOW] += TAUGHT[1] * (value - means[at.SLOW])
    if accepted < length:
        request[at.BROKE_AT] = request[at.LENGTH] - request[at.PROMPT]


@compiled()
def resolve(table: Table, payoffs: Payoffs, slot: int, tokens: NDArray[np.int32]) -> None:
    """Compare a request's open drafts with what was committed behind them; those that broke off,
    or came to their end, are known. Mutates."""
    request, kept = table.requests[slot], 0
    for i in range(request[at.OPEN]):
        cycle = table.open[slot, i]
        row, facts = table.rows[cycle], table.cycles[cycle]
        length, held, place = row["draft_len"], facts[at.HELD], 0
        while place < len(tokens) and held < length and table.drafts[cycle, held] == tokens[place]:
            held += 1
            place += 1
        facts[at.HELD] = held
        if held < length and place == len(tokens):
            table.open[slot, kept] = cycle
            kept += 1
            continue
        learn_payoff(table, slot, held, length)
        learn(payoffs, request[at.MEMORY], table.keys[cycle], held, length)
        await_settling(table, cycle, held, 0)
    request[at.OPEN] = kept


@compiled()
def count(
    table: Table,
    slot: int,
    cycle: int,
    reported: int,
    odds: NDArray[np.float64],
    seen: NDArray[np.float64],
) -> None:
    """Count a closed cycle of which the engine ``reported`` so many tokens. Mutates.

    Nothing verified (a draft the scheduler had no room for) is a cycle of the arm "none".
    """
    row, facts = table.rows[cycle], table.cycles[cycle]
    verified, committed = row["verified_len"], facts[at.COMMITTED]
    arm = facts[at.ARM] if verified else NONE
    accepted = min(reported - 1, committed)
    mine = table.counts[at.BY_ARM + 3 * arm :]
    mine[0] += 1
    mine[1] += verified
    mine[2] += accepted
    if arm == MODEL and committed == reported:
        row["model_accepted"] = accepted
        observe_model(odds, seen, accepted, verified, facts[at.MODELS])
        whole = accepted + payoff_of(odds, len(odds) - verified) * (accepted == verified)
        means = table.means[slot]
        means[at.RECENT_MODEL] += TAUGHT[3] * (whole - means[at.RECENT_MODEL])


@compiled((
    HANDLE, HANDLE, HANDLE, REALS, REALS, WHOLES, IDS, WHOLES, WHOLES, WHOLES, WHOLE, REAL, WHOLE,
    YES, WHOLES, WHOLES, WHOLES,
))  # fmt: skip
def take(
    requests: Any,
    text: Any,
    memories: Any,
    odds: NDArray[np.float64],
    seen: NDArray[np.float64],
    slots: NDArray[np.int64],
    tokens: NDArray[np.int32],
    ends: NDArray[np.int64],
    verified: NDArray[np.int64],
    lengths: NDArray[np.int64],
    step_tokens: int,
    step_us: float,
    first: int,
    compared: bool,
    done: NDArray[np.int64],
    made: NDArray[np.int64],
    sums: NDArray[np.int64],
) -> tuple[int, int]:
    """Take in what a step committed of n requests; labels resolve. Mutates.

    Args:
        requests, text, memories: handles of table, pool and payoffs.
        odds, seen: of the model arm.
        slots: [n], -1 for what is to be passed over.
        tokens: of all, up to the ``ends`` [n] of each.
        verified: [n], draft tokens that were.
        lengths: [n], tokens that the engine holds, 0 where it does not say.
        first: of the requests, to go on with.
        compared: whether to count the tokens that their own text foretold.
        done: [n], what was done for each meanwhile; overwritten with what is to be done.
        made: [n], filled: tokens committed.
        sums: to which are added the cycles that closed, tokens committed and draft tokens verified
            in them, draft tokens of all, tokens ``FORETOLD``, and requests that ``BEGAN`` a page.

    Returns:
        where it stopped, and why.
    """
    table, pool, payoffs = table_of(requests), pool_of(text), payoffs_of(memories)
    if first == 0:
        sums[3] = verified.sum()
    for i in range(first, len(slots)):
        slot = slots[i]
        if slot < 0 or table.requests[slot, at.ENDED]:
            continue
        request = table.requests[slot]
        came = tokens[(ends[i - 1] if i else 0) : ends[i]]
        count_of, ended = until_end(table, slot, came)
        committed = came[:count_of]
        if lengths[i] and not ended and request[at.LENGTH] + count_of != lengths[i]:
            table.counts[at.COUNTED] += count_of
            return i, LOST
        index = request[at.INDEX]
        if index and count_of and not done[i] & WRITTEN and not fits(pool, index, count_of):
            return i, WRITE
        if (
            request[at.OPEN]
            and not done[i] & GROWN
            and lacks(payoffs, request[at.MEMORY], request[at.OPEN])
        ):
            return i, GROW
        if index and count_of and not done[i] & WRITTEN and append_both(pool, index, committed):
            done[i] |= BEGUN
            sums[BEGAN] += 1
        sums[FORETOLD] += foretold(pool, index, count_of * compared)
        context = table.contexts[slot]
        keep = max(BACK - count_of, 0)
        for j in range(keep):
            context[j] = context[j + BACK - keep]
        for j in range(keep, BACK):
            context[j] = committed[count_of - BACK + j]
        table.counts[at.COUNTED] += count_of
        request[at.LENGTH] += count_of
        cycle, request[at.CYCLE] = request[at.CYCLE], -1
        if cycle >= 0:
            row = table.rows[cycle]
            row["verified_len"], row["step_tokens"] = verified[i], step_tokens
            row["step_us"] = step_us
            table.cycles[cycle, at.COMMITTED] = count_of
            sums[0] += 1
            sums[1] += count_of
            sums[2] += verified[i]
            count(table, slot, cycle, len(came), odds, seen)
            if row["draft_len"] == 0:
                await_settling(table, cycle, 0, 0)
        resolve(table, payoffs, slot, committed)
        made[i] = count_of
        if ended:
            request[at.ENDED] = ended
            return i + 1, OVER
    return len(slots), DONE

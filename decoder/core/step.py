"""What is done for the requests of a step, compiled: :func:`take` what it committed, :func:`propose`
drafts and describe them, :func:`begin` their cycles, and :func:`settle` those of which all is known.

Where a request needs what only Python can do (a new page, a larger memory, its end), :func:`take`
stops there, says what, and goes on when it is called again.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import (
    BYTES,
    BYTES_2,
    FIXED,
    FLOATS,
    IDS,
    IDS_2,
    MATRIX,
    REAL,
    REALS,
    REALS_3,
    SMALLS,
    WHOLE,
    WHOLES,
    WHOLES_2,
    YES,
    compiled,
)
from decoder.contracts.features import FEATURES, LOGGED, NUM_FEATURES, RECENT, TOKEN_CLASSES
from decoder.core.guards.floor import add, outcomes_of
from decoder.core.payoff.memory import KINDS, PAYOFFS, Payoffs, hashed, lacks, learn, recall
from decoder.core.payoff.model_arm import observe_model, payoff_of
from decoder.core.table import (
    ALL_CACHED,
    ALL_WANTED,
    ARM,
    BESIDE,
    BROKE_AT,
    BY_ARM,
    COMMITTED,
    COUNTED,
    CYCLE,
    CYCLES,
    DRAFTED_AT,
    DRAFTING,
    ENDED,
    EVENTS,
    FAST,
    FIRST,
    FREE,
    FULL_LENGTH,
    HELD,
    INDEX,
    KEYS,
    LABELLED,
    LENGTH,
    LIVE,
    MADE,
    MAX_LENGTH,
    MAX_TOKENS,
    MEMORY,
    MIN_TOKENS,
    MODEL_LEN,
    MODELS,
    OPEN,
    PAYOFFS_SEEN,
    PROMPT,
    RECENT_MODEL,
    SERVES,
    SHARE,
    SLOT,
    SLOW,
    SPECULATES,
    STOPPED,
    STOPS,
    STRETCH,
    TABLE,
    TOOK,
    TOOK_CYCLES,
    UNDRAFTED,
    UNSETTLED,
    WANTED,
    WANTED_LEN,
    Table,
)
from decoder.drafting.matches import BACK, draft
from decoder.drafting.pages import PAGES, POOL, SHARED, Pool, append_both, fits
from decoder.policy.rule import CACHE, MODEL, NONE
from decoder.telemetry.ring import FULL, HEAD, NAMES, OWN, STEP, UNREADABLE

DONE, WRITE, GROW, LOST, OVER = range(5)
"""Why :func:`take` stopped: at the end, or at a request whose tokens are to be written, whose
memory must grow, whose length is not the engine's, or that has ended."""
WRITTEN, GROWN = 1, 2
"""Of ``done``: what was done for a request meanwhile."""
TAUGHT: Final = (0.3, 0.05, 0.1, 0.1)
"""How much of a new payoff enters the fast and the slow mean, the share of first tokens accepted,
and a request's mean of model drafts."""
RECENT_CYCLES: Final = 16
"""Cycles over which the cache-selection rate is taken."""
_ALL_CYCLES: Final = (1 << RECENT_CYCLES) - 1
_SHARES: Final = NUM_FEATURES - 2 * len(TOKEN_CLASSES)
_RECALLED: Final = _SHARES - 3 * KINDS
_DRAFT_LEN: Final = FEATURES.index("draft_len")
_LOGGED: Final = len(LOGGED)
_STEP_AT, _NAMES_AT = OWN.itemsize, OWN.itemsize + STEP.itemsize
_FEATURES_AT: Final = _NAMES_AT + NAMES.itemsize
_STEP_WIDTH, _NAMES_WIDTH = STEP.itemsize, NAMES.itemsize
_UNNAMED: Final = 255


# --- what a step committed


@compiled((TABLE, WHOLE, IDS))
def until_end(table: Table, slot: int, tokens: NDArray[np.int32]) -> tuple[int, int]:
    """How many of ``tokens`` the client will see, and whether its request ends with them.

    An engine may report more than a request may have; counting what lies behind the end would
    overstate acceptance in every last cycle.
    """
    request = table.requests[slot]
    left = max(request[MAX_TOKENS] - (request[LENGTH] - request[PROMPT]), 0)
    for i in range(min(len(tokens), left)):
        for j in range(request[STOPS]):
            if tokens[i] == table.stops[slot, j]:
                return i + 1, STOPPED
    if len(tokens) >= left:
        return left, FULL_LENGTH
    return len(tokens), LIVE


@compiled()
def learn_payoff(table: Table, slot: int, accepted: int, length: int) -> None:
    """Take in a resolved payoff of a request's draft of ``length``. Mutates."""
    request, means = table.requests[slot], table.means[slot]
    table.payoffs[slot, request[PAYOFFS_SEEN] % RECENT] = accepted
    request[PAYOFFS_SEEN] += 1
    value = np.log1p(float(accepted))
    means[FIRST] += TAUGHT[2] * ((1.0 if accepted > 0 else 0.0) - means[FIRST])
    means[FAST] += TAUGHT[0] * (value - means[FAST])
    means[SLOW] += TAUGHT[1] * (value - means[SLOW])
    if accepted < length:
        request[BROKE_AT] = request[LENGTH] - request[PROMPT]


@compiled()
def await_settling(table: Table, cycle: int, accepted: int, censored: int) -> None:
    """All is known of a cycle. Mutates."""
    row = table.rows[cycle]
    row["accepted"], row["censored"] = accepted, censored
    table.unsettled[table.counts[UNSETTLED]] = cycle
    table.counts[UNSETTLED] += 1


@compiled()
def give_back(table: Table, cycle: int) -> None:
    """Nobody knows a cycle any more. Mutates."""
    table.free[table.counts[FREE]] = cycle
    table.counts[FREE] += 1


@compiled()
def resolve(table: Table, payoffs: Payoffs, slot: int, tokens: NDArray[np.int32]) -> None:
    """Compare a request's open drafts with what was committed behind them; those that broke off,
    or came to their end, are known. Mutates."""
    request, kept = table.requests[slot], 0
    for i in range(request[OPEN]):
        cycle = table.open[slot, i]
        row, facts = table.rows[cycle], table.cycles[cycle]
        length, held, place = row["draft_len"], facts[HELD], 0
        while place < len(tokens) and held < length and table.drafts[cycle, held] == tokens[place]:
            held += 1
            place += 1
        facts[HELD] = held
        if held < length and place == len(tokens):
            table.open[slot, kept] = cycle
            kept += 1
            continue
        learn_payoff(table, slot, held, length)
        learn(payoffs, request[MEMORY], table.keys[cycle], held, length)
        await_settling(table, cycle, held, 0)
    request[OPEN] = kept


@compiled((TABLE, WHOLE, WHOLE))
def close(table: Table, slot: int, censored: int) -> None:
    """A request has ended: what matched so far is a lower bound of its open labels. Mutates."""
    request = table.requests[slot]
    for i in range(request[OPEN]):
        cycle = table.open[slot, i]
        await_settling(table, cycle, table.cycles[cycle, HELD], censored)
    request[OPEN] = 0
    cycle, request[CYCLE] = request[CYCLE], -1
    if cycle >= 0 and table.rows[cycle]["draft_len"] == 0:
        give_back(table, cycle)


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
    verified, committed = row["verified_len"], facts[COMMITTED]
    arm = facts[ARM] if verified else NONE
    accepted = min(reported - 1, committed)
    at = BY_ARM + 3 * arm
    table.counts[at] += 1
    table.counts[at + 1] += verified
    table.counts[at + 2] += accepted
    if arm == MODEL and committed == reported:
        row["model_accepted"] = accepted
        observe_model(odds, seen, accepted, verified, facts[MODELS])
        whole = accepted + payoff_of(odds, len(odds) - verified) * (accepted == verified)
        means = table.means[slot]
        means[RECENT_MODEL] += TAUGHT[3] * (whole - means[RECENT_MODEL])


@compiled((
    TABLE, POOL, PAYOFFS, REALS, REALS, WHOLES, IDS, WHOLES, WHOLES, WHOLES, WHOLE, REAL, WHOLE,
    WHOLES, WHOLES_2,
))  # fmt: skip
def take(
    table: Table,
    pool: Pool,
    payoffs: Payoffs,
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
    done: NDArray[np.int64],
    made: NDArray[np.int64],
) -> tuple[int, int]:
    """Take in what a step committed of n requests; labels resolve. Mutates.

    Args:
        odds, seen: of the model arm.
        slots: [n], -1 for what is to be passed over.
        tokens: of all, up to the ``ends`` [n] of each.
        verified: [n], draft tokens that were.
        lengths: [n], tokens that the engine holds, 0 where it does not say.
        first: of the requests, to go on with.
        done: [n], what was done for each meanwhile.
        made: [n, 2], filled: tokens committed, and whether they closed a cycle.

    Returns:
        where it stopped, and why.
    """
    for i in range(first, len(slots)):
        slot = slots[i]
        if slot < 0 or table.requests[slot, ENDED]:
            continue
        request = table.requests[slot]
        came = tokens[(ends[i - 1] if i else 0) : ends[i]]
        count_of, ended = until_end(table, slot, came)
        committed = came[:count_of]
        if lengths[i] and not ended and request[LENGTH] + count_of != lengths[i]:
            table.counts[COUNTED] += count_of
            return i, LOST
        index = request[INDEX]
        if index and count_of and not done[i] & WRITTEN and not fits(pool, index, count_of):
            return i, WRITE
        if request[OPEN] and not done[i] & GROWN and lacks(payoffs, request[MEMORY], request[OPEN]):
            return i, GROW
        if index and count_of and not done[i] & WRITTEN:
            append_both(pool, index, committed)
        context = table.contexts[slot]
        keep = max(BACK - count_of, 0)
        for j in range(keep):
            context[j] = context[j + BACK - keep]
        for j in range(keep, BACK):
            context[j] = committed[count_of - BACK + j]
        table.counts[COUNTED] += count_of
        request[LENGTH] += count_of
        cycle, request[CYCLE] = request[CYCLE], -1
        if cycle >= 0:
            row = table.rows[cycle]
            row["verified_len"], row["step_tokens"] = verified[i], step_tokens
            row["step_us"] = step_us
            table.cycles[cycle, COMMITTED] = count_of
            count(table, slot, cycle, len(came), odds, seen)
            if row["draft_len"] == 0:
                await_settling(table, cycle, 0, 0)
        resolve(table, payoffs, slot, committed)
        made[i, 0], made[i, 1] = count_of, cycle >= 0
        if ended:
            request[ENDED] = ended
            return i + 1, OVER
    return len(slots), DONE


# --- what may be drafted


@compiled((TABLE, WHOLE, WHOLE))
def room_of(table: Table, slot: int, longest: int) -> int:
    """Tokens of a draft for a request, at most ``longest``; one place is kept for the target's own.

    While fewer than its least tokens are written a draft does not reach them: vLLM forbids the end
    in that place, too, by the length before it.
    """
    request = table.requests[slot]
    if not request[SPECULATES] or request[ENDED]:
        return 0
    written = request[LENGTH] - request[PROMPT]
    left = min(request[MAX_TOKENS] - written, request[MAX_LENGTH] - request[LENGTH]) - 1
    least = request[MIN_TOKENS] - written
    return int(min(left, longest, least - 1 if least > 0 else longest))


@compiled()
def classify(
    out: NDArray[np.float32], tokens: NDArray[np.int32], classes: NDArray[np.float32]
) -> None:
    """Shares of a draft's tokens in each class, then those of its first; ids behind the vocabulary
    have none. Mutates ``out`` [2 * classes]."""
    width = classes.shape[1]
    out[:] = 0.0
    for place in range(len(tokens)):
        token = tokens[place]
        if 0 <= token < len(classes):
            for c in range(width):
                out[c] += classes[token, c]
                if place == 0:
                    out[width + c] = classes[token, c]
    for c in range(width):
        out[c] /= np.float32(len(tokens))


@compiled()
def describe(
    out: NDArray[np.float32],
    table: Table,
    payoffs: Payoffs,
    slot: int,
    keys: NDArray[np.int64],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    score: float,
    match: int,
    local: bool,
    rival_len: int,
    rival_score: float,
    rival_match: int,
    rival_first: float,
    agreement: int,
    classes: NDArray[np.float32],
) -> None:
    """Fill ``out`` with the features of a cache draft, in the order of ``FEATURES``."""
    request, means = table.requests[slot], table.means[slot]
    length, written = len(tokens), request[LENGTH] - request[PROMPT]
    for offset in (0, 10):
        out[offset], out[offset + 1], out[offset + 2] = score, match, length
    out[3], out[4], out[5], out[6] = rival_score, rival_match, rival_len, agreement
    out[7], out[8], out[9] = request[PROMPT], written, max(written - request[BROKE_AT], 0)
    for column in range(_LOGGED):
        out[column] = np.log1p(out[column])
    out[13], out[14] = score / length, probs[length - 1]
    for i in range(5):
        place = (1 << i) - 1
        out[15 + i] = probs[place] if place < length else 0.0
    out[20], out[21] = rival_first, agreement / length
    out[22], out[23] = rival_len > 0 and agreement == 0, local
    out[24], out[25] = written / max(request[MAX_TOKENS], 1), means[SHARE]
    known = request[PAYOFFS_SEEN]
    for i in range(3):
        out[26 + i] = table.payoffs[slot, (known - 1 - i) % RECENT] if known > i else 0
    total, most = 0, 0
    for i in range(min(known, RECENT)):
        total += table.payoffs[slot, i]
        most = max(most, table.payoffs[slot, i])
    out[29], out[30] = total / max(min(known, RECENT), 1), most
    out[31] = table.cycles[table.open[slot, 0], HELD] if request[OPEN] else 0
    out[32], out[33], out[34] = means[FIRST], means[FAST], means[SLOW]
    out[35], out[36] = payoffs.means[request[MEMORY], 0], payoffs.means[request[MEMORY], 1]
    out[37] = means[RECENT_MODEL]
    recall(payoffs, request[MEMORY], keys, out[_RECALLED:_SHARES])
    classify(out[_SHARES:], tokens, classes)


@compiled()
def keys_of(
    context: NDArray[np.int32], length: int, tokens: NDArray[np.int32], keys: NDArray[np.int64]
) -> None:
    """Fill ``keys`` with what the memory is asked by, in the order of ``MEMORY_KEYS``."""
    keys[0] = hashed(tokens, 0, min(len(tokens), 8), 11)
    keys[1] = hashed(context, BACK - min(length, 2), BACK, 22)
    keys[2] = hashed(tokens, 0, 1, hashed(context, BACK - min(length, 1), BACK, 33) & 0x7FFFFFFF)


@compiled((
    TABLE, POOL, PAYOFFS, WHOLES, WHOLE, YES, WHOLE, WHOLE, REALS_3, MATRIX,
))  # fmt: skip
def propose(
    table: Table,
    pool: Pool,
    payoffs: Payoffs,
    slots: NDArray[np.int64],
    longest: int,
    shown: bool,
    depth: int,
    most: int,
    limits: tuple[float, float, float],
    classes: NDArray[np.float32],
) -> tuple[
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.float32],
    NDArray[np.int32],
    NDArray[np.int64],
]:
    """Look up the cache drafts of those that may have a draft, and describe them.

    Args:
        slots: of the step's requests, -1 for one that is not followed.
        longest: tokens of a draft at most.
        shown: whether cache drafts are looked up.
        depth, most, limits: of a look-up; see :class:`decoder.drafting.drafts.Limits`.
        classes: of the vocabulary's tokens.

    Returns:
        Of the n requests that may have a draft their places in ``slots`` and their rooms; of the m
        with a cache draft their places among these, the features [m, features], the tokens [m,
        most], and the keys of the memory [m, KEYS].
    """
    count = len(slots)
    places, rooms, owners = (
        np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    )  # fmt: skip
    features = np.empty((count, NUM_FEATURES), np.float32)
    found, keys = np.empty((count, most), np.int32), np.empty((count, KEYS), np.int64)
    tokens, probs = np.empty((2, most), np.int32), np.empty((2, most), np.float32)
    n, m = 0, 0
    for place in range(count):
        slot = slots[place]
        room = room_of(table, slot, longest) if slot >= 0 else 0
        if room <= 0:
            continue
        places[n], rooms[n] = place, room
        n += 1
        request = table.requests[slot]
        own = request[INDEX]
        if not shown or own == 0:
            continue
        length = min(request[LENGTH], BACK)
        context = table.contexts[slot, BACK - length :]
        mine, match, score, theirs, their_match, their_score = 0, 0, 0.0, 0, 0, 0.0
        limit, shared = min(room, most), pool.indexes[own, SHARED]
        if pool.indexes[own, PAGES] > 0:
            mine, match, score, _ = draft(
                pool, own, context, limit, depth, limits, tokens[0], probs[0]
            )
        if shared > 0 and pool.indexes[shared, PAGES] > 0:
            theirs, their_match, their_score, _ = draft(
                pool, shared, context, limit, depth, limits, tokens[1], probs[1]
            )
        if mine == 0 and theirs == 0:
            continue
        best = 0
        if mine == 0 or (theirs > 0 and their_score > score):
            best = 1
            mine, theirs = theirs, mine
            match, their_match = their_match, match
            score, their_score = their_score, score
        agreement = 0
        while agreement < min(mine, theirs) and tokens[0, agreement] == tokens[1, agreement]:
            agreement += 1
        found[m, :mine] = tokens[best, :mine]
        keys_of(table.contexts[slot], request[LENGTH], found[m, :mine], keys[m])
        describe(
            features[m], table, payoffs, slot, keys[m], found[m, :mine], probs[best, :mine], score,
            match, best == 0, theirs, their_score, their_match,
            float(probs[1 - best, 0]) if theirs else 0.0, agreement, classes,
        )  # fmt: skip
        owners[m] = n - 1
        m += 1
    return places[:n], rooms[:n], owners[:m], features[:m], found[:m], keys[:m]


# --- what was chosen


@compiled()
def took(table: Table, slot: int, cache: bool) -> None:
    """Take in whether a cycle verifies a cache draft. Mutates."""
    request = table.requests[slot]
    request[TOOK] = ((request[TOOK] << 1) | (1 if cache else 0)) & _ALL_CYCLES
    request[TOOK_CYCLES] = min(request[TOOK_CYCLES] + 1, RECENT_CYCLES)
    bits, left = 0, request[TOOK]
    while left:
        bits += left & 1
        left >>= 1
    table.means[slot, SHARE] = bits / request[TOOK_CYCLES]


@compiled((
    TABLE, WHOLES, WHOLES, WHOLES, WHOLES, MATRIX, IDS_2, WHOLES_2, SMALLS, SMALLS, IDS, FLOATS,
    FLOATS, WHOLE, WHOLE, YES, WHOLE, YES, BYTES, IDS_2,
))  # fmt: skip
def begin(
    table: Table,
    slots: NDArray[np.int64],
    places: NDArray[np.int64],
    rooms: NDArray[np.int64],
    owners: NDArray[np.int64],
    features: NDArray[np.float32],
    tokens: NDArray[np.int32],
    keys: NDArray[np.int64],
    arms: NDArray[np.int8],
    wanted: NDArray[np.int8],
    lengths: NDArray[np.int32],
    expected: NDArray[np.float32],
    model: NDArray[np.float32],
    model_len: int,
    left: int,
    whole: bool,
    beside: int,
    serves: bool,
    step: NDArray[np.uint8],
    decided: NDArray[np.int32],
) -> None:
    """Open a cycle of each request that may have a draft. Mutates.

    Args:
        slots: of all requests of the step; ``places`` to ``keys`` as :func:`propose` gives them.
        arms: int8 [n] in force; ``wanted`` and ``lengths`` [n] are the policy's.
        model_len: tokens of a model draft; of ``left`` that the step has room for.
        whole: whether cache drafts are verified whole.
        serves: whether the champion decided.
        step: bytes of what the cycles of the step share.
        decided: [slots, 4], filled: arm, tokens, room, and which of ``tokens``; -1 for none.
    """
    all_wanted, all_cached, drafting, models, found = 0, 0, 0, 0, 0
    for row in range(len(places)):
        all_wanted += lengths[row]
        drafting += wanted[row] == MODEL
        models += arms[row] == MODEL
    for i in range(len(owners)):
        all_cached += int(features[i, _DRAFT_LEN])
    for row in range(len(places)):
        slot, arm = slots[places[row]], arms[row]
        request = table.requests[slot]
        before = request[CYCLE]
        if before >= 0 and table.rows[before]["draft_len"] == 0:
            give_back(table, before)
        table.counts[FREE] -= 1
        cycle = table.free[table.counts[FREE]]
        raw, event, facts = table.raw[cycle], table.rows[cycle], table.cycles[cycle]
        raw[_STEP_AT:_NAMES_AT] = step
        raw[_NAMES_AT:_FEATURES_AT] = table.names[slot]
        event["predicted"], event["predicted_model"] = expected[row], model[row]
        event["share"], event["cycle"] = 1.0, request[CYCLES]
        event["position"] = request[LENGTH] - request[PROMPT]
        event["model_accepted"], event["verified_len"], event["censored"] = -1, 0, 0
        facts[:] = 0
        facts[SLOT], facts[ARM], facts[WANTED] = slot, arm, wanted[row]
        facts[WANTED_LEN], facts[ALL_WANTED], facts[ALL_CACHED] = (
            lengths[row],
            all_wanted,
            all_cached,
        )
        facts[DRAFTING], facts[MODELS], facts[MODEL_LEN] = drafting, models, model_len
        facts[BESIDE], facts[SERVES] = beside, serves
        length = 0
        if found < len(owners) and owners[found] == row:
            length = int(features[found, _DRAFT_LEN])
            event["features"][:] = features[found]
            table.drafts[cycle, :length] = tokens[found, :length]
            table.keys[cycle] = keys[found]
            table.open[slot, request[OPEN]] = cycle
            request[OPEN] += 1
            decided[places[row], 3] = found
            found += 1
        else:
            event["features"][:] = np.float32(0.0)
        event["draft_len"] = length
        request[CYCLE] = cycle
        request[CYCLES] += 1
        took(table, slot, arm == CACHE)
        drafted, room = 0, rooms[row]
        if arm == CACHE and length:
            drafted = max(min(length, left if whole else min(lengths[row], left)), 0)
        elif arm == MODEL:
            drafted = min(room, model_len, left)
            room = drafted
        else:
            arm = np.int8(NONE)
        event["drafted_len"] = drafted
        left -= drafted
        decided[places[row], 0], decided[places[row], 1] = arm, drafted if arm == CACHE else 0
        decided[places[row], 2] = room


@compiled((TABLE, WHOLES, WHOLES))
def drafted(table: Table, slots: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Take in how many draft tokens each request really has. Mutates.

    One made before waits for its request to be scheduled again.
    """
    for i in range(len(slots)):
        if slots[i] < 0:
            continue
        request = table.requests[slots[i]]
        cycle = request[CYCLE]
        if cycle < 0 or table.cycles[cycle, MADE]:
            continue
        table.cycles[cycle, MADE] = 1
        table.rows[cycle]["drafted_len"] = lengths[i]
        if table.cycles[cycle, ARM] == MODEL:
            if lengths[i]:
                request[DRAFTED_AT] = request[LENGTH]
            else:
                table.counts[UNDRAFTED] += 1


# --- what is told


@compiled((
    TABLE, REALS, REALS, WHOLES, YES, FIXED, REALS_3, BYTES_2, WHOLES, WHOLE, WHOLES,
))  # fmt: skip
def settle(
    table: Table,
    needed: NDArray[np.float64],
    ahead: NDArray[np.float64],
    floor: NDArray[np.int64],
    weighs: bool,
    dense: NDArray[np.float64],
    drafting: tuple[float, float, float],
    ring: NDArray[np.uint8],
    control: NDArray[np.int64],
    settled: int,
    words: NDArray[np.int64],
) -> int:
    """Weigh every cycle of which all is known, and write its event. Mutates, but for the count of
    events written, which is the caller's to publish.

    Args:
        needed, ahead, floor: of the floor, that ``weighs`` if there is one.
        dense, drafting: of the cost table in force.
        ring: bytes [size, width] of the events' rows; of size 0 where they are kept nowhere.
        control: of the ring; ``settled`` of its rows are free again.
        words: the numbers of the three arms' names, and of the three kinds of labels.

    Returns:
        rows written since the ring was made.
    """
    head, outcomes = control[HEAD], np.empty((len(needed), 2))
    for i in range(table.counts[UNSETTLED]):
        cycle = table.unsettled[i]
        row, facts = table.rows[cycle], table.cycles[cycle]
        length, verified, accepted = row["draft_len"], row["verified_len"], row["accepted"]
        if weighs and facts[COMMITTED] > 0 and facts[SERVES]:
            outcomes_of(
                facts[ARM], facts[WANTED], facts[WANTED_LEN], facts[ALL_WANTED], facts[ALL_CACHED],
                facts[DRAFTING], facts[MODEL_LEN], facts[BESIDE], row["batch_size"], length,
                accepted, verified, row["drafted_len"], row["model_accepted"],
                row["predicted_model"], dense, drafting, outcomes,
            )  # fmt: skip
            add(
                table.means[facts[SLOT], STRETCH:], facts[COMMITTED], outcomes, row["batch_size"],
                needed, ahead, floor,
            )  # fmt: skip
        label = 2 if length else 0
        if facts[ARM] == CACHE and length and (accepted < verified or verified >= length):
            label = 1
        row["number"] = table.counts[EVENTS]
        row["arm"], row["label"] = words[facts[ARM] if verified else NONE], words[3 + label]
        row["drafted_len"] = max(row["drafted_len"], verified)
        table.counts[EVENTS] += 1
        table.counts[LABELLED] += length > 0
        if len(ring):
            if row["side"] < 0 or table.raw[cycle, _NAMES_AT] == _UNNAMED:
                control[UNREADABLE] += 1
            elif head - settled >= len(ring):
                control[FULL] += 1
            else:
                ring[head % len(ring)] = table.raw[cycle]
                head += 1
        give_back(table, cycle)
    table.counts[UNSETTLED] = 0
    return int(head)

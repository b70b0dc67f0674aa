"""Cycles of requests, compiled: begun by what was chosen, and settled when all is known."""

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
    REALS,
    REALS_3,
    SMALLS,
    WHOLE,
    WHOLES,
    WHOLES_2,
    YES,
    compiled,
)
from decoder.contracts.features import FEATURES
from decoder.core.guards.floor import add, outcomes_of
from decoder.core.table import (
    ALL_CACHED,
    ALL_WANTED,
    ARM,
    BESIDE,
    COMMITTED,
    CYCLE,
    CYCLES,
    DRAFTED_AT,
    DRAFTING,
    EVENTS,
    FREE,
    HELD,
    LABELLED,
    LENGTH,
    MADE,
    MODEL_LEN,
    MODELS,
    OPEN,
    PROMPT,
    SERVES,
    SHARE,
    SLOT,
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
from decoder.policy.rule import CACHE, MODEL, NONE
from decoder.telemetry.ring import FULL, HEAD, NAMES, OWN, STEP, UNREADABLE

RECENT_CYCLES: Final = 16
"""Cycles over which the cache-selection rate is taken."""
_ALL_CYCLES: Final = (1 << RECENT_CYCLES) - 1
_DRAFT_LEN: Final = FEATURES.index("draft_len")
_STEP_AT, _NAMES_AT = OWN.itemsize, OWN.itemsize + STEP.itemsize
_FEATURES_AT: Final = _NAMES_AT + NAMES.itemsize
_UNNAMED: Final = 255


@compiled((TABLE, WHOLE, WHOLE, WHOLE))
def await_settling(table: Table, cycle: int, accepted: int, censored: int) -> None:
    """All is known of a cycle. Mutates."""
    row = table.rows[cycle]
    row["accepted"], row["censored"] = accepted, censored
    table.unsettled[table.counts[UNSETTLED]] = cycle
    table.counts[UNSETTLED] += 1


@compiled((TABLE, WHOLE))
def give_back(table: Table, cycle: int) -> None:
    """Nobody knows a cycle any more. Mutates."""
    table.free[table.counts[FREE]] = cycle
    table.counts[FREE] += 1


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
    all_wanted, drafting, models = lengths.sum(), (wanted == MODEL).sum(), (arms == MODEL).sum()
    all_cached, found = int(features[:, _DRAFT_LEN].sum()), 0
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
        event["features"][:] = np.float32(0.0)
        if found < len(owners) and owners[found] == row:
            if request[OPEN] < table.open.shape[1]:
                length = int(features[found, _DRAFT_LEN])
                event["features"][:] = features[found]
                table.drafts[cycle, :length] = tokens[found, :length]
                table.keys[cycle] = keys[found]
                table.open[slot, request[OPEN]] = cycle
                request[OPEN] += 1
                decided[places[row], 3] = found
            found += 1
        event["draft_len"] = length
        request[CYCLE] = cycle
        request[CYCLES] += 1
        took(table, slot, arm == CACHE)
        most = left if whole else min(lengths[row], left)
        drafted = 0
        if arm == CACHE:
            drafted = max(min(length, most), 0)
        elif arm == MODEL:
            drafted = min(rooms[row], model_len, left)
        event["drafted_len"] = drafted
        left -= drafted
        decision = decided[places[row]]
        decision[0] = NONE if arm == CACHE and not length else arm
        decision[1] = drafted if arm == CACHE else 0
        decision[2] = drafted if arm == MODEL else rooms[row]


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

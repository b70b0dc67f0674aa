"""Cycles of requests, compiled: begun by what was chosen, and settled when all is known."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import (
    BYTES,
    BYTES_2,
    FIXED,
    FLOATS,
    HANDLE,
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
from decoder.contracts.features import FEATURES
from decoder.contracts.fields import CYCLE as OWN
from decoder.contracts.fields import REQUEST as NAMES
from decoder.contracts.fields import STEP
from decoder.core import table as at
from decoder.core.guards.floor import add, lengths_worth, outcomes_of
from decoder.core.table import TABLE, Table, table_of
from decoder.policy.rule import CACHE, MODEL, NONE
from decoder.telemetry.ring import FULL, HEAD, UNREADABLE

RECENT_CYCLES: Final = 16
"""Cycles over which the cache-selection rate is taken."""
_ALL_CYCLES: Final = (1 << RECENT_CYCLES) - 1
_DRAFT_LEN: Final = FEATURES.index("draft_len")
_STEP_AT, _NAMES_AT = OWN.itemsize, OWN.itemsize + STEP.itemsize
_FEATURES_AT: Final = _NAMES_AT + NAMES.itemsize
_UNNAMED: Final = 255


@compiled()
def await_settling(table: Table, cycle: int, accepted: int, censored: int) -> None:
    """All is known of a cycle. Mutates."""
    row = table.rows[cycle]
    row["accepted"], row["censored"] = accepted, censored
    table.unsettled[table.counts[at.UNSETTLED]] = cycle
    table.counts[at.UNSETTLED] += 1


@compiled()
def give_back(table: Table, cycle: int) -> None:
    """Nobody knows a cycle any more. Mutates."""
    table.free[table.counts[at.FREE]] = cycle
    table.counts[at.FREE] += 1


@compiled()
def take_free(table: Table) -> int:
    """A cycle of nobody's, of which there is one. Mutates."""
    table.counts[at.FREE] -= 1
    return int(table.free[table.counts[at.FREE]])


@compiled((TABLE, WHOLE, WHOLE))
def close(table: Table, slot: int, censored: int) -> None:
    """A request has ended: what matched so far is a lower bound of its open labels. Mutates."""
    request = table.requests[slot]
    for i in range(request[at.OPEN]):
        cycle = table.open[slot, i]
        await_settling(table, cycle, table.cycles[cycle, at.HELD], censored)
    request[at.OPEN] = 0
    cycle, request[at.CYCLE] = request[at.CYCLE], -1
    if cycle >= 0 and table.rows[cycle]["draft_len"] == 0:
        give_back(table, cycle)


@compiled()
def took(table: Table, slot: int, cache: bool) -> None:
    """Take in whether a cycle verifies a cache draft. Mutates."""
    request = table.requests[slot]
    request[at.TOOK] = ((request[at.TOOK] << 1) | (1 if cache else 0)) & _ALL_CYCLES
    request[at.TOOK_CYCLES] = min(request[at.TOOK_CYCLES] + 1, RECENT_CYCLES)
    bits, left = 0, request[at.TOOK]
    while left:
        bits += left & 1
        left >>= 1
    table.means[slot, at.SHARE] = bits / request[at.TOOK_CYCLES]


@compiled((
    HANDLE, WHOLES, WHOLES, WHOLES, WHOLES, MATRIX, IDS_2, WHOLES_2, SMALLS, SMALLS, IDS, FLOATS,
    FLOATS, WHOLE, WHOLE, YES, WHOLE, WHOLE, REAL, FIXED, YES, BYTES, IDS_2,
))  # fmt: skip
def begin(
    requests: Any,
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
    relieved: bool,
    rows: int,
    beside: int,
    rate: float,
    dense: NDArray[np.float64],
    serves: bool,
    step: NDArray[np.uint8],
    decided: NDArray[np.int32],
) -> None:
    """Open a cycle of each request that may have a draft. Mutates.

    Args:
        requests: the handle of the table.
        slots: of all requests of the step; ``places`` to ``keys`` as :func:`propose` gives them.
        arms: int8 [n] in force; ``wanted`` and ``lengths`` [n] are the policy's.
        model_len: tokens of a model draft; of ``left`` that the step has room for.
        relieved: whether the floor has a fixed arm in force.
        rows, beside, rate, dense: as :func:`lengths_worth`.
        serves: whether the champion decided.
        step: bytes of what the cycles of the step share.
        decided: [slots, 4], filled: arm, tokens, room, and which of ``tokens``; -1 for none.
    """
    table, found = table_of(requests), 0
    cached = lengths_worth(features, rows, beside, rate, dense)
    all_wanted, all_cached, drafting, models = (
        lengths.sum(), cached.sum(), (wanted == MODEL).sum(), (arms == MODEL).sum()
    )  # fmt: skip
    for row in range(len(places)):
        slot, arm = slots[places[row]], arms[row]
        request = table.requests[slot]
        before = request[at.CYCLE]
        if before >= 0 and table.rows[before]["draft_len"] == 0:
            give_back(table, before)
        cycle = take_free(table)
        raw, event, facts = table.raw[cycle], table.rows[cycle], table.cycles[cycle]
        raw[_STEP_AT:_NAMES_AT] = step
        raw[_NAMES_AT:_FEATURES_AT] = table.names[slot]
        event["predicted"], event["predicted_model"] = expected[row], model[row]
        event["share"], event["cycle"] = 1.0, request[at.CYCLES]
        event["position"] = request[at.LENGTH] - request[at.PROMPT]
        event["model_accepted"], event["verified_len"], event["censored"] = -1, 0, 0
        facts[:] = 0
        facts[at.SLOT], facts[at.ARM], facts[at.WANTED] = slot, arm, wanted[row]
        facts[at.WANTED_LEN], facts[at.ALL_WANTED], facts[at.ALL_CACHED] = (
            lengths[row],
            all_wanted,
            all_cached,
        )
        facts[at.DRAFTING], facts[at.MODELS], facts[at.MODEL_LEN] = drafting, models, model_len
        facts[at.BESIDE], facts[at.SERVES] = beside, serves
        length = 0
        event["features"][:] = np.float32(0.0)
        if found < len(owners) and owners[found] == row:
            if request[at.OPEN] < table.open.shape[1]:
                length, facts[at.CACHED_LEN] = int(features[found, _DRAFT_LEN]), cached[found]
                event["features"][:] = features[found]
                table.drafts[cycle, :length] = tokens[found, :length]
                table.keys[cycle] = keys[found]
                table.open[slot, request[at.OPEN]] = cycle
                request[at.OPEN] += 1
                table.counts[at.DEEPEST] = max(table.counts[at.DEEPEST], request[at.OPEN])
                decided[places[row], 3] = found
            found += 1
        event["draft_len"] = length
        request[at.CYCLE] = cycle
        request[at.CYCLES] += 1
        most, drafted = min(facts[at.CACHED_LEN] if relieved else lengths[row], left), 0
        if arm == CACHE:
            drafted = max(min(length, most), 0)
        elif arm == MODEL:
            drafted = min(rooms[row], model_len, left)
        took(table, slot, arm == CACHE and drafted > 0)
        event["drafted_len"] = drafted
        left -= drafted
        decision = decided[places[row]]
        decision[0] = NONE if arm == CACHE and not drafted else arm
        decision[1] = drafted if arm == CACHE else 0
        decision[2] = drafted if arm == MODEL else rooms[row]


@compiled((HANDLE, WHOLES, WHOLES))
def drafted(requests: Any, slots: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Take in how many draft tokens each request really has. Mutates.

    One made before waits for its request to be scheduled again.
    """
    table = table_of(requests)
    for i in range(len(slots)):
        if slots[i] < 0:
            continue
        request = table.requests[slots[i]]
        cycle = request[at.CYCLE]
        if cycle < 0 or table.cycles[cycle, at.MADE]:
            continue
        table.cycles[cycle, at.MADE] = 1
        table.rows[cycle]["drafted_len"] = lengths[i]
        if table.cycles[cycle, at.ARM] == MODEL:
            if lengths[i]:
                request[at.DRAFTED_AT] = request[at.LENGTH]
            else:
                table.counts[at.UNDRAFTED] += 1


@compiled((
    HANDLE, REALS, REALS, WHOLES, YES, FIXED, REALS_3, BYTES_2, WHOLES, WHOLE, WHOLES,
))  # fmt: skip
def settle(
    requests: Any,
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
        requests: the handle of the table.
        needed, ahead, floor: of the floor, that ``weighs`` if there is one.
        dense, drafting: of the cost table in force.
        ring: bytes [size, width] of the events' rows; of size 0 where they are kept nowhere.
        control: of the ring; ``settled`` of its rows are free again.
        words: the numbers of the three arms' names, and of the three kinds of labels.

    Returns:
        rows written since the ring was made.
    """
    table = table_of(requests)
    head, outcomes = control[HEAD], np.empty((len(needed), 2))
    for i in range(table.counts[at.UNSETTLED]):
        cycle = table.unsettled[i]
        row, facts = table.rows[cycle], table.cycles[cycle]
        length, verified, accepted = row["draft_len"], row["verified_len"], row["accepted"]
        if weighs and facts[at.COMMITTED] > 0 and facts[at.SERVES]:
            outcomes_of(
                facts[at.ARM], facts[at.WANTED], facts[at.WANTED_LEN], facts[at.ALL_WANTED],
                facts[at.ALL_CACHED], facts[at.DRAFTING], facts[at.MODEL_LEN], facts[at.BESIDE],
                row["batch_size"], facts[at.CACHED_LEN], accepted, verified, row["drafted_len"],
                row["model_accepted"], row["predicted_model"], dense, drafting, outcomes,
            )  # fmt: skip
            stretch = table.means[facts[at.SLOT], at.STRETCH :]
            add(stretch, facts[at.COMMITTED], outcomes, row["batch_size"], needed, ahead, floor)
        label = 2 if length else 0
        if facts[at.ARM] == CACHE and length and (accepted < verified or verified >= length):
            label = 1
        row["number"] = table.counts[at.EVENTS]
        row["arm"], row["label"] = words[facts[at.ARM] if verified else NONE], words[3 + label]
        row["drafted_len"] = max(row["drafted_len"], verified)
        table.counts[at.EVENTS] += 1
        table.counts[at.LABELLED] += length > 0
        if len(ring):
            if row["side"] < 0 or table.raw[cycle, _NAMES_AT] == _UNNAMED:
                control[UNREADABLE] += 1
            elif head - settled >= len(ring):
                control[FULL] += 1
            else:
                ring[head % len(ring)] = table.raw[cycle]
                head += 1
        give_back(table, cycle)
    table.counts[at.UNSETTLED] = 0
    return int(head)

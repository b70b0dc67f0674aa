"""Draft cycles, compiled: opened by a choice, written as events when complete."""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import (
    ConstantArray,
    Handle,
    Int64Array,
    Uint8Matrix,
    compiled,
    entry_point,
    opener,
)
from decoder.contracts.fields import CYCLE as OWN
from decoder.contracts.fields import REQUEST as NAMES
from decoder.contracts.fields import STEP
from decoder.core.guards.floor import (
    FLOOR,
    FORMER,
    add_cycle,
    cache_arm_lengths,
    former_outcome,
    outcomes_of,
)
from decoder.core.guards.probation import count_request, update_probation
from decoder.core.table import STEP_CHOICE, Table, state_of
from decoder.policy.rule import CACHE, MODEL, NONE, STEP_INPUTS
from decoder.telemetry.ring import FULL, HEAD, SETTLED, UNREADABLE

RECENT_CYCLES: Final = 16  # window of the cache-selection rate, in cycles
_ALL_CYCLES: Final = (1 << RECENT_CYCLES) - 1
_STEP_AT, _NAMES_AT = OWN.itemsize, OWN.itemsize + STEP.itemsize
_FEATURES_AT: Final = _NAMES_AT + NAMES.itemsize
_UNNAMED: Final = 255

DECISION: Final = np.dtype(
    [
        ("arm", "i4"),
        ("length", "i4"),  # tokens of its cache draft
        ("room", "i4"),  # maximum draft tokens, for any arm
        ("draft", "i4"),  # row of its cache draft; also 0 without one
    ],
    align=True,
)
"""What a request verifies next."""


class Outbox(NamedTuple):
    """The event ring: rows as bytes [size, width], control words, ids of arm and label names."""

    rows: Uint8Matrix
    control: Int64Array
    words: Int64Array


outbox_of = opener(Outbox)


@compiled
def complete_cycle(handle: Handle, number: int, accepted: int, censored: int) -> None:
    """Queue a completed cycle for :func:`write_events`. Mutates."""
    table = state_of(handle).table
    row, counts = table.rows[number], table.counts[0]
    row["accepted"], row["censored"] = accepted, censored
    table.completed[counts["completed"]] = number
    counts["completed"] += 1


@compiled
def free_cycle(handle: Handle, number: int) -> None:
    """Free a cycle. Mutates."""
    table = state_of(handle).table
    counts = table.counts[0]
    table.free[counts["free"]] = number
    counts["free"] += 1


@entry_point
def close_request(handle: Handle, slot: int, censored: int) -> None:
    """Close an ended request: open labels are censored at the tokens matched so far. Mutates."""
    table = state_of(handle).table
    request = table.requests[slot]
    count_request(table.counts[0]["probation"], request["compared"])
    for i in range(request["num_open"]):
        number = table.open[slot, i]
        complete_cycle(handle, number, table.cycles[number]["matched"], censored)
    request["num_open"] = 0
    number, request["cycle"] = request["cycle"], -1
    if number >= 0 and table.rows[number]["draft_len"] == 0:
        free_cycle(handle, number)


@compiled
def count_cache_cycle(request: Any, cache: bool) -> None:
    """Update the cache-selection rate with one cycle. Mutates."""
    request["cache_bits"] = ((request["cache_bits"] << 1) | (1 if cache else 0)) & _ALL_CYCLES
    request["cache_cycles"] = min(request["cache_cycles"] + 1, RECENT_CYCLES)
    cached = 0
    for i in range(RECENT_CYCLES):
        cached += request["cache_bits"] >> i & 1
    request["cache_share"] = cached / request["cache_cycles"]


@compiled
def shared_choice(candidates: NDArray[Any], params: Any, cached: NDArray[np.int64]) -> NDArray[Any]:
    """Shared :data:`STEP_CHOICE` [1] of a step's cycles; ``cached`` are the lengths of its cache
    drafts under the cache arm."""
    steps = np.zeros(1, STEP_CHOICE)
    step = steps[0]
    for i in range(len(candidates)):
        candidate = candidates[i]
        step["policy_tokens"] += candidate["length"]
        step["policy_models"] += candidate["policy_arm"] == MODEL
        step["models"] += candidate["arm"] == MODEL
    step["cached_tokens"], step["model_len"] = cached.sum(), params["model_len"]
    step["prefill_tokens"], step["serves"] = params["prefill_tokens"], params["serves"]
    return steps


@compiled
def open_cycle(handle: Handle, slot: int, candidate: Any, steps: NDArray[Any]) -> int:
    """Open a cycle of a request; its number. Mutates.

    ``steps`` [1] is an array: a record would dangle once its array is released.
    """
    state = state_of(handle)
    table, request, counts = state.table, state.table.requests[slot], state.table.counts[0]
    before = request["cycle"]
    if before >= 0 and table.rows[before]["draft_len"] == 0:
        free_cycle(handle, before)
    counts["free"] -= 1
    number = int(table.free[counts["free"]])
    raw, event, cycle = table.raw[number], table.rows[number], table.cycles[number]
    raw[_STEP_AT:_NAMES_AT] = state.event
    raw[_NAMES_AT:_FEATURES_AT] = table.names[slot]
    event["predicted"], event["predicted_model"] = candidate["expected"], candidate["model"]
    event["share"], event["cycle"] = 1.0, request["num_cycles"]
    event["position"] = request["length"] - request["prompt_len"]
    event["model_accepted"], event["verified_len"], event["censored"] = -1, 0, 0
    event["draft_len"] = 0
    event["features"][:] = np.float32(0.0)
    cycle["slot"], cycle["arm"], cycle["matched"] = slot, candidate["arm"], 0
    cycle["policy_arm"], cycle["policy_len"] = candidate["policy_arm"], candidate["length"]
    cycle["cached_len"], cycle["reported"], cycle["committed"] = 0, 0, 0
    cycle["step"] = steps[0]
    request["cycle"] = number
    request["num_cycles"] += 1
    return number


@compiled
def open_label(handle: Handle, number: int, draft: int, cached: int) -> int:
    """Store the cache draft of a cycle until its label resolves; its length, 0 if the request has
    too many open labels. ``cached`` is the length the cache arm would verify. Mutates."""
    state = state_of(handle)
    table, offers = state.table, state.offers
    cycle, event = table.cycles[number], table.rows[number]
    request = table.requests[cycle["slot"]]
    if request["num_open"] >= table.open.shape[1]:
        return 0
    length = int(offers.drafts[draft]["draft_len"])
    event["features"][:] = offers.features[draft]
    event["draft_len"] = length
    table.drafts[number, :length] = offers.tokens[draft, :length]
    cycle["keys"][:], cycle["cached_len"] = offers.keys[draft], cached
    table.open[cycle["slot"], request["num_open"]] = number
    request["num_open"] += 1
    return length


@compiled
def decide_cycle(handle: Handle, number: int, candidate: Any, decision: Any) -> None:
    """Fill the decision of a request from its cycle. Mutates."""
    table = state_of(handle).table
    cycle, event = table.cycles[number], table.rows[number]
    arm, drafted = candidate["arm"], event["drafted_len"]
    count_cache_cycle(table.requests[cycle["slot"]], arm == CACHE and drafted > 0)
    decision["arm"] = NONE if arm == CACHE and not drafted else arm
    decision["length"] = drafted if arm == CACHE else 0
    decision["room"] = drafted if arm == MODEL else candidate["room"]
    if event["draft_len"]:
        decision["draft"] = candidate["draft"]


@entry_point
def open_cycles(
    handle: Handle,
    slots: Int64Array,
    num_candidates: int,
    inputs: Annotated[NDArray[Any], STEP_INPUTS],
    dense: ConstantArray,
) -> NDArray[Any]:
    """Open a cycle of each request that may have a draft, as chosen in the state's ``offers``.
    Mutates.

    Returns:
        :data:`DECISION` [n], one for each of the step's ``slots``.
    """
    state, params = state_of(handle), inputs[0]
    candidates, num_drafts = state.offers.candidates[:num_candidates], 0
    for i in range(num_candidates):
        num_drafts += candidates[i]["draft"] >= 0
    cached = cache_arm_lengths(
        state.offers.drafts[:num_drafts], params["batch_size"], params["prefill_tokens"],
        params["rate"], dense,
    )  # fmt: skip
    steps = shared_choice(candidates, params, cached)
    decisions, budget = np.zeros(len(slots), DECISION), params["budget"]
    for i in range(num_candidates):
        candidate = candidates[i]
        if state.table.counts[0]["free"] == 0:
            break
        number = open_cycle(handle, slots[candidate["place"]], candidate, steps)
        length, most, draft = 0, candidate["length"], candidate["draft"]
        if draft >= 0:
            length = open_label(handle, number, draft, cached[draft])
        if params["fallback"]:
            most = state.table.cycles[number]["cached_len"]
        drafted = 0
        if candidate["arm"] == CACHE:
            drafted = max(min(length, most, budget), 0)
        elif candidate["arm"] == MODEL:
            drafted = min(candidate["room"], params["model_len"], budget)
        state.table.rows[number]["drafted_len"] = drafted
        budget -= drafted
        decide_cycle(handle, number, candidate, decisions[candidate["place"]])
    return decisions


@entry_point
def note_drafted(handle: Handle, slots: Int64Array, lengths: Int64Array) -> None:
    """Record how many draft tokens each request really has. Mutates.

    Only the first report of a cycle counts: later its draft waits until the request is scheduled.
    """
    table = state_of(handle).table
    for i in range(len(slots)):
        if slots[i] < 0:
            continue
        request = table.requests[slots[i]]
        number = request["cycle"]
        if number < 0 or table.cycles[number]["reported"]:
            continue
        cycle = table.cycles[number]
        cycle["reported"] = 1
        table.rows[number]["drafted_len"] = lengths[i]
        if cycle["arm"] == MODEL:
            if lengths[i]:
                request["drafted_at"] = request["length"]
            else:
                table.counts[0]["undrafted"] += 1


def note_former(table: Table, slots: NDArray[np.int64], choice: NDArray[Any], weight: int) -> None:
    """Store the former policy's choice, candidates [n], in the open cycles of a step that stands
    for ``weight``. Mutates."""
    numbers = table.requests["cycle"][slots[choice["place"]]]
    choice, numbers = choice[numbers >= 0], numbers[numbers >= 0]
    table.cycles["former_arm"][numbers] = choice["policy_arm"]
    table.cycles["former_len"][numbers] = choice["length"]
    steps = table.cycles["step"]
    steps["former_tokens"][numbers] = choice["length"].sum()
    steps["former_models"][numbers] = np.count_nonzero(choice["policy_arm"] == MODEL)
    steps["former_weight"][numbers] = weight


@compiled
def label_event(handle: Handle, number: int, words: NDArray[np.int64]) -> None:
    """Fill the event fields that are known once the cycle is complete. Mutates."""
    table = state_of(handle).table
    row, cycle, counts = table.rows[number], table.cycles[number], table.counts[0]
    length, verified, accepted = row["draft_len"], row["verified_len"], row["accepted"]
    label = 2 if length else 0
    if cycle["arm"] == CACHE and length and (accepted < verified or verified >= length):
        label = 1
    row["number"] = counts["events"]
    row["arm"], row["label"] = words[cycle["arm"] if verified else NONE], words[3 + label]
    row["drafted_len"] = max(row["drafted_len"], verified)
    counts["events"] += 1
    counts["labelled"] += length > 0


@entry_point
def write_events(
    handle: Handle,
    floors: Annotated[NDArray[Any], FLOOR],
    dense: ConstantArray,
    prices: tuple[float, float, float],
    outbox: Handle,
) -> int:
    """Update the floor with every completed cycle, and write its event; to an outbox without rows,
    none. Mutates everything except the ring's head, which the caller publishes.

    Returns:
        rows written since the ring was created.
    """
    table, out = state_of(handle).table, outbox_of(outbox)
    head, settled, probation = out.control[HEAD], out.control[SETTLED], table.counts[0]["probation"]
    outcomes = np.empty((FORMER + 1, 2))
    options = outcomes if probation["left"] > 0 else outcomes[:FORMER]
    for i in range(table.counts[0]["completed"]):
        number = table.completed[i]
        row, cycle = table.rows[number], table.cycles[number]
        if floors[0]["enabled"] and cycle["committed"] > 0 and cycle["step"]["serves"]:
            outcomes_of(cycle, row, dense, prices, outcomes)
            request, batch = table.requests[cycle["slot"]], row["batch_size"]
            if probation["left"] > 0:
                former_outcome(cycle, row, dense, prices, outcomes)
            full = add_cycle(floors[0], request["window"], cycle["committed"], options, batch)
            if probation["left"] > 0:
                request["window"]["weight"] += cycle["step"]["former_weight"]
                if full and request["window"]["weight"] > 0.0:
                    update_probation(probation, request["compared"], request["window"], batch)
        label_event(handle, number, out.words)
        if len(out.rows):
            if row["side"] < 0 or table.raw[number, _NAMES_AT] == _UNNAMED:
                out.control[UNREADABLE] += 1
            elif head - settled >= len(out.rows):
                out.control[FULL] += 1
            else:
                out.rows[head % len(out.rows)] = table.raw[number]
                head += 1
        free_cycle(handle, number)
    table.counts[0]["completed"] = 0
    return int(head)

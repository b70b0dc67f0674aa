"""The request table: per-request state and open cycles as records in preallocated arrays.

From the choice on, a cycle is a row of :data:`decoder.contracts.fields.ROW`: outcomes are written
directly into its future event. ``observe``, ``proposer`` and ``cycles`` are the operations of a
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import (
    Float32Matrix,
    Float64Array,
    Int32Array,
    Int32Matrix,
    Uint8Array,
    Uint8Matrix,
    opener,
)
from decoder.contracts.features import FEATURE_ROW, NUM_FEATURES, RECENT
from decoder.contracts.fields import REQUEST as NAMES
from decoder.contracts.fields import ROW
from decoder.core.guards.floor import WINDOW
from decoder.core.guards.probation import COMPARED, PROBATION
from decoder.core.payoff.memory import KINDS, PRIOR_FIRST, PRIOR_LOG, Payoffs
from decoder.core.requests import RequestOptions
from decoder.drafting.drafts import Tokens
from decoder.drafting.matches import BACK, Scratch, Written, scratch_for
from decoder.drafting.windows import Pool
from decoder.policy.rule import ARMS, CANDIDATE

REQUEST: Final = np.dtype(
    [
        ("length", "i8"),  # tokens of prompt and output
        ("prompt_len", "i8"),
        ("max_tokens", "i8"),  # of output
        ("max_length", "i8"),  # of prompt and output
        ("min_tokens", "i8"),
        ("speculates", "i8"),
        ("ended", "i8"),  # LIVE, STOPPED or FULL_LENGTH
        ("cycle", "i8"),  # number of its open cycle, -1 for none
        ("num_cycles", "i8"),
        ("drafted_at", "i8"),  # its length when it last had a model draft
        ("index", "i8"),  # window of its text, 0 for none
        ("memory", "i8"),  # row of its payoff memory
        ("num_stops", "i8"),  # stop token ids
        ("num_open", "i8"),  # open labels
        ("broke_at", "i8"),  # output tokens when a cache draft was last rejected
        ("cache_bits", "i8"),  # bit set of its last cycles: 1 if the cycle verified a cache draft
        ("cache_cycles", "i8"),  # valid bits
        ("num_payoffs", "i8"),  # resolved so far
        ("payoffs", "i8", (RECENT,)),  # ring of the last ones, tokens
        ("cache_share", "f8"),  # share of cache drafts in its last cycles
        ("first", "f8"),  # decayed share of drafts whose first token was accepted
        ("log_fast", "f8"),  # decayed means of log1p(payoff)
        ("log_slow", "f8"),
        ("model_recent", "f8"),  # decayed accepted length of its model drafts
        ("window", WINDOW),
        ("compared", COMPARED),  # with the former policy
        ("context", "i4", (BACK,)),  # its last tokens, right-aligned
    ],
    align=True,
)
STEP_CHOICE: Final = np.dtype(
    [
        ("policy_tokens", "i8"),  # draft tokens of the policy's choice
        ("policy_models", "i8"),  # requests for which it prefers a model draft
        ("cached_tokens", "i8"),  # draft tokens under the cache arm
        ("models", "i8"),  # requests that get a model draft
        ("model_len", "i8"),  # length of a model draft
        ("prefill_tokens", "i8"),
        ("serves", "i8"),  # whether the champion decided
        ("former_tokens", "i8"),  # the same of the former policy's choice
        ("former_models", "i8"),
        ("former_weight", "i8"),  # steps that this one stands for; 0: that was not evaluated
    ],
    align=True,
)
"""Shared data of a step's cycles, for the floor."""
CYCLE: Final = np.dtype(
    [
        ("slot", "i8"),
        ("matched", "i8"),  # tokens of its cache draft that matched so far
        ("arm", "i8"),
        ("policy_arm", "i8"),  # the arm the policy preferred, and its draft tokens
        ("policy_len", "i8"),
        ("cached_len", "i8"),  # draft tokens under the cache arm
        ("former_arm", "i8"),  # the arm the former policy preferred, and its draft tokens
        ("former_len", "i8"),
        ("reported", "i8"),  # 1 once the engine has reported what it drafted
        ("committed", "i8"),
        ("step", STEP_CHOICE),
        ("keys", "i8", (KINDS,)),  # payoff memory keys
    ],
    align=True,
)
ARM_COUNTS: Final = np.dtype([("cycles", "i8"), ("drafted", "i8"), ("accepted", "i8")], align=True)
COUNTS: Final = np.dtype(
    [
        ("free", "i8"),  # free cycles
        ("unsettled", "i8"),  # cycles to be settled
        ("deepest", "i8"),  # maximum number of open labels of a request so far
        ("events", "i8"),
        ("labelled", "i8"),
        ("tokens", "i8"),  # committed
        ("undrafted", "i8"),  # model drafts chosen but not made
        ("arms", ARM_COUNTS, (len(ARMS),)),
        ("probation", PROBATION),
    ],
    align=True,
)
LIVE, STOPPED, FULL_LENGTH = range(3)
"""Values of ``ended``."""
GROWTH: Final = 2


class Table(NamedTuple):
    """All requests by slot, and all cycles by number."""

    requests: Annotated[NDArray[Any], REQUEST]  # [slots]
    stops: Int32Matrix  # [slots, widest]
    open: Int32Matrix  # [slots, deepest], cycles with open labels, oldest first
    names: Uint8Matrix  # [slots, bytes], packed for events
    rows: Annotated[NDArray[Any], ROW]  # [cycles]
    raw: Uint8Matrix  # bytes of ``rows``, [cycles, bytes]
    cycles: Annotated[NDArray[Any], CYCLE]  # [cycles]
    drafts: Int32Matrix  # [cycles, longest], tokens of cache drafts
    free: Int32Array  # [cycles], stack
    unsettled: Int32Array  # [cycles], completed cycles in order of completion
    counts: Annotated[NDArray[Any], COUNTS]  # [1]


class Offers(NamedTuple):
    """Drafts that a step may verify; overwritten by the next step."""

    candidates: Annotated[NDArray[Any], CANDIDATE]  # [requests] that may have a draft
    drafts: Annotated[NDArray[Any], FEATURE_ROW]  # [requests], features of their cache drafts
    features: Float32Matrix  # view of ``drafts`` for networks, [requests, features]
    tokens: Int32Matrix  # [requests, longest]
    keys: Annotated[NDArray[np.int64], 2]  # [requests, KINDS], payoff memory keys


class LookUps(NamedTuple):
    """Buffers of look-ups."""

    ours: Written  # draft from a request's own text
    theirs: Written  # draft from its key's
    scratch: Scratch


class State(NamedTuple):
    """All arrays that the compiled functions of a step use."""

    table: Table
    pool: Pool
    payoffs: Payoffs
    offers: Offers
    look_ups: LookUps
    odds: Float64Array  # of the model arm
    seen: Float64Array  # of the model arm
    classes: Float32Matrix  # [vocabulary, classes]
    event: Uint8Array  # packed STEP fields of a step's events


state_of = opener(State)


def new_table(slots: int, cycles: int, longest: int) -> Table:
    """An empty table.

    Args:
        longest: maximum length of a cache draft, tokens.
    """
    rows, counts = np.zeros(cycles, ROW), np.zeros(1, COUNTS)
    counts["free"] = cycles
    return Table(
        np.zeros(slots, REQUEST), np.zeros((slots, 4), np.int32), np.zeros((slots, 16), np.int32),
        np.zeros((slots, NAMES.itemsize), np.uint8), rows, raw_of(rows), np.zeros(cycles, CYCLE),
        np.zeros((cycles, longest), np.int32), np.arange(cycles, dtype=np.int32),
        np.zeros(cycles, np.int32), counts,
    )  # fmt: skip


def new_offers(requests: int, longest: int) -> Offers:
    """Empty offers for ``requests`` requests, with cache drafts of at most ``longest`` tokens."""
    drafts = np.zeros(requests, FEATURE_ROW)
    return Offers(
        np.zeros(requests, CANDIDATE), drafts,
        drafts.view(np.float32).reshape(requests, NUM_FEATURES),
        np.zeros((requests, longest), np.int32), np.zeros((requests, KINDS), np.int64),
    )  # fmt: skip


def new_look_ups(longest: int) -> LookUps:
    """Look-up buffers for cache drafts of at most ``longest`` tokens."""
    own, shared = (
        Written(np.zeros(longest, np.int32), np.zeros(longest, np.float32)) for _ in range(2)
    )
    return LookUps(own, shared, scratch_for(longest))


def raw_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """Byte view of rows of a structured dtype: [n, bytes]."""
    return rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)


class RequestTable:
    """Owns the table: slots by request name, allocation and growth."""

    def __init__(self, longest: int) -> None:
        """Begin empty."""
        self.arrays, self.offers = new_table(64, 1024, longest), new_offers(64, longest)
        self.look_ups = new_look_ups(longest)
        self.slots: dict[str, int] = {}
        self.options: dict[int, RequestOptions] = {}  # by slot
        self._free = list(range(63, -1, -1))
        self._stopped: list[int] = []  # slots of stopped requests with unsettled cycles

    def __contains__(self, name: str) -> bool:
        return name in self.slots

    def shared(
        self, names: Sequence[str], slots: NDArray[np.int64], committed: NDArray[np.int64]
    ) -> tuple[dict[tuple[str, str], list[int]], frozenset[str]]:
        """Tokens and requests by tenant and workload, and the sessions, of n requests that
        committed so many tokens each. Stopped requests are known until :meth:`settled`."""
        groups, sessions = dict[tuple[str, str], list[int]](), set[str]()
        for name, slot, tokens in zip(names, slots.tolist(), committed.tolist(), strict=True):
            if slot >= 0:
                options = self.options[slot]
                sums = groups.setdefault((options.tenant, options.workload), [0, 0])
                sums[0] += tokens
                sums[1] += 1
                sessions.add(options.session or name)
        return groups, frozenset(sessions)

    def add(
        self,
        name: str,
        options: RequestOptions,
        text: Tokens,
        prompt_len: int,
        model: float,
        packed: bytes | None,
    ) -> int:
        """Add a request with ``text`` (int32 [n]); its slot.

        Args:
            model: expected accepted length of its first model draft.
            packed: its names packed for events; None if they cannot be encoded.
        """
        if not self._free:
            self._more_slots()
        stops = np.array(sorted(options.stop_ids), np.int32)
        slot = self._free.pop()
        if len(stops) > self.arrays.stops.shape[1]:
            self._widen("stops", len(stops))
        table, seen = self.arrays, text[-BACK:]
        table.requests[slot] = np.zeros((), REQUEST)
        row = table.requests[slot]
        row["length"], row["prompt_len"], row["cycle"] = len(text), prompt_len, -1
        row["max_tokens"], row["max_length"] = options.max_tokens, options.max_model_len
        row["min_tokens"], row["speculates"] = options.min_tokens, options.speculate
        row["first"], row["log_fast"], row["log_slow"] = PRIOR_FIRST, PRIOR_LOG, PRIOR_LOG
        row["model_recent"], row["num_stops"] = model, len(stops)
        row["context"][BACK - len(seen) :] = seen
        table.stops[slot, : len(stops)] = stops
        table.names[slot] = np.frombuffer(packed, np.uint8) if packed is not None else 255
        self.slots[name], self.options[slot] = slot, options
        return slot

    def remove(self, name: str) -> int:
        """Remove a request; its slot. The slot is reused after :meth:`settled`."""
        slot = self.slots.pop(name)
        self._stopped.append(slot)
        return slot

    def settled(self) -> None:
        """Free the slots of stopped requests: all their cycles are settled."""
        for slot in self._stopped:
            del self.options[slot]
        self._free += self._stopped
        self._stopped = []

    def reserve(self, cycles: int) -> None:
        """Grow the table for a step of ``cycles`` cycles, each with an open label."""
        table = self.arrays
        if table.counts["free"][0] < cycles:
            self._more_cycles(cycles)
        if len(self.offers.candidates) < cycles:
            self.offers = new_offers(GROWTH * cycles, table.drafts.shape[1])
        if table.counts["deepest"][0] >= table.open.shape[1]:
            self._widen("open", GROWTH * table.open.shape[1])

    def _more_slots(self) -> None:
        table, slots = self.arrays, len(self.arrays.requests)
        grown = {
            name: _longer(getattr(table, name), GROWTH * slots)
            for name in ("requests", "stops", "open", "names")
        }
        self.arrays = table._replace(**grown)
        self._free += range(GROWTH * slots - 1, slots - 1, -1)

    def _more_cycles(self, cycles: int) -> None:
        table, old_size = self.arrays, len(self.arrays.rows)
        size = GROWTH * old_size
        num_free = int(table.counts["free"][0])
        while size - old_size + num_free < cycles:
            size *= GROWTH
        names = ("rows", "cycles", "drafts", "free", "unsettled")
        grown = {name: _longer(getattr(table, name), size) for name in names}
        grown["free"][num_free : num_free + size - old_size] = np.arange(old_size, size)
        table.counts["free"] += size - old_size
        self.arrays = table._replace(**grown, raw=raw_of(grown["rows"]))

    def _widen(self, name: str, width: int) -> None:
        old = getattr(self.arrays, name)
        wider = np.zeros((len(old), width), old.dtype)
        wider[:, : old.shape[1]] = old
        self.arrays = self.arrays._replace(**{name: wider})


def _longer(array: NDArray[Any], size: int) -> NDArray[Any]:
    grown = np.zeros((size, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown

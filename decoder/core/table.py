"""The request table: per-request state and open cycles as records in preallocated arrays.

From the choice on, a cycle is a row of :data:`decoder.contracts.fields.ROW`: outcomes are written
directly into its future event. ``observe``, ``proposer`` and ``cycles`` are the operations of a
step.
"""

from __future__ import annotations

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
from decoder.contracts.bundle import MAX_DRAFT
from decoder.contracts.features import FEATURE_ROW, NUM_FEATURES, RECENT
from decoder.contracts.fields import REQUEST as NAMES
from decoder.contracts.fields import ROW
from decoder.core.guards.floor import WINDOW
from decoder.core.guards.probation import COMPARED, PROBATION
from decoder.core.payoff.memory import KINDS, Payoffs
from decoder.drafting.matches import BACK, Scratch, Written
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
        ("completed", "i8"),  # cycles to be written
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
MAX_REQUESTS: Final = 8192  # requests tracked at once; further ones have no drafts
MAX_CYCLES: Final = 1 << 17
"""Open and completed cycles. Without a free one, a request verifies nothing."""
MAX_STOPS: Final = 1024  # stop token ids of a request


class Table(NamedTuple):
    """All requests by slot, and all cycles by number."""

    requests: Annotated[NDArray[Any], REQUEST]  # [slots]
    stops: Int32Matrix  # [slots, MAX_STOPS]
    open: Int32Matrix  # [slots, MAX_DRAFT], cycles with open labels, oldest first
    names: Uint8Matrix  # [slots, bytes], packed for events
    rows: Annotated[NDArray[Any], ROW]  # [cycles]
    raw: Uint8Matrix  # bytes of ``rows``, [cycles, bytes]
    cycles: Annotated[NDArray[Any], CYCLE]  # [cycles]
    drafts: Int32Matrix  # [cycles, longest], tokens of cache drafts
    free: Int32Array  # [cycles], stack
    completed: Int32Array  # [cycles], completed cycles in order of completion
    counts: Annotated[NDArray[Any], COUNTS]  # [1]


class Offers(NamedTuple):
    """Drafts that a step may verify; overwritten by the next step."""

    candidates: Annotated[NDArray[Any], CANDIDATE]  # [requests] that may have a draft
    drafts: Annotated[NDArray[Any], FEATURE_ROW]  # [requests], features of their cache drafts
    features: Float32Matrix  # view of ``drafts`` for networks, [requests, features]
    tokens: Int32Matrix  # [requests, longest]
    keys: Annotated[NDArray[np.int64], 2]  # [requests, KINDS], payoff memory keys


class State(NamedTuple):
    """All arrays that the compiled functions of a step use."""

    table: Table
    pool: Pool
    payoffs: Payoffs
    offers: Offers
    own: Written  # the draft from a request's own text
    others: Written  # the draft from its key's
    scratch: Scratch
    odds: Float64Array  # of the model arm
    seen: Float64Array  # of the model arm
    classes: Float32Matrix  # [vocabulary, classes]
    event: Uint8Array  # packed STEP fields of a step's events


state_of = opener(State)


def new_table(longest: int) -> Table:
    """An empty table, for cache drafts of at most ``longest`` tokens. It has its final size: the
    system commits memory when it is first written."""
    rows, counts = np.zeros(MAX_CYCLES, ROW), np.zeros(1, COUNTS)
    counts["free"] = MAX_CYCLES
    return Table(
        np.zeros(MAX_REQUESTS, REQUEST), np.zeros((MAX_REQUESTS, MAX_STOPS), np.int32),
        np.zeros((MAX_REQUESTS, MAX_DRAFT), np.int32),
        np.zeros((MAX_REQUESTS, NAMES.itemsize), np.uint8), rows, raw_of(rows),
        np.zeros(MAX_CYCLES, CYCLE), np.zeros((MAX_CYCLES, longest), np.int32),
        np.arange(MAX_CYCLES, dtype=np.int32)[::-1].copy(), np.zeros(MAX_CYCLES, np.int32), counts,
    )  # fmt: skip


def new_offers(longest: int) -> Offers:
    """Empty offers, with cache drafts of at most ``longest`` tokens."""
    drafts = np.zeros(MAX_REQUESTS, FEATURE_ROW)
    return Offers(
        np.zeros(MAX_REQUESTS, CANDIDATE), drafts,
        drafts.view(np.float32).reshape(MAX_REQUESTS, NUM_FEATURES),
        np.zeros((MAX_REQUESTS, longest), np.int32), np.zeros((MAX_REQUESTS, KINDS), np.int64),
    )  # fmt: skip


def raw_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """Byte view of rows of a structured dtype: [n, bytes]."""
    return rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)

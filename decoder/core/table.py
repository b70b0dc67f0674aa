"""The requests that a worker follows, as slots in arrays, and their cycles until these are told of.

A cycle is a row of :data:`decoder.contracts.fields.ROW` from the choice on: what becomes of it is
written where its event will be. ``taking``, ``proposing`` and ``cycles`` have what is done with
them in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import (
    BYTES_2,
    IDS,
    IDS_2,
    REALS_2,
    WHOLES,
    WHOLES_2,
    Handle,
    opener,
    record,
    rows_of,
)
from decoder.contracts.features import RECENT
from decoder.contracts.fields import REQUEST, ROW
from decoder.core.guards.floor import WIDTH
from decoder.core.payoff.memory import KINDS, PRIOR_FIRST, PRIOR_LOG
from decoder.core.requests import RequestOptions
from decoder.drafting.drafts import Tokens
from decoder.drafting.matches import BACK
from decoder.policy.rule import ARMS

(
    LENGTH, PROMPT, MAX_TOKENS, MAX_LENGTH, MIN_TOKENS, SPECULATES, ENDED, CYCLE, CYCLES,
    DRAFTED_AT, INDEX, MEMORY, STOPS, OPEN, BROKE_AT, TOOK, TOOK_CYCLES, PAYOFFS_SEEN,
) = range(18)  # fmt: skip
"""Of ``requests``: tokens there are, of them the prompt's, bounds, whether and how it has ended,
its cycle under way (-1: none) and how many there were, tokens there were when it last had a model
draft, its rows of the cache and of the memories, how many ids end it, labels that are open, output
tokens when a cache draft last broke off, a bit for each of its last cycles that verified a cache
draft, of how many that tells, and payoffs that are known."""
SHARE, FIRST, FAST, SLOW, RECENT_MODEL, STRETCH = range(6)
"""Of ``means``: the cache's share of cycles, decayed means, and from ``STRETCH`` on what
:mod:`decoder.core.guards.floor` sums up."""
(
    SLOT, HELD, ARM, WANTED, WANTED_LEN, ALL_WANTED, ALL_CACHED, DRAFTING, MODELS, MODEL_LEN,
    BESIDE, SERVES, MADE, COMMITTED, CACHED_LEN,
) = range(15)  # fmt: skip
"""Of ``cycles``: whose, tokens of its draft that matched so far, its arm by number, what the policy
wanted of it, and of its step: draft tokens, had the policy its way and if the cache arm were in
force, requests for which the policy wants a model draft and those that have one, tokens of
a model draft and of prompts beside; whether the champion decided, whether the engine has said what
it drafted, tokens committed, and those of its draft that the cache arm verifies."""
(FREE, UNSETTLED, EVENTS, LABELLED, COUNTED, UNDRAFTED, BY_ARM) = range(7)
DEEPEST: Final = BY_ARM + 3 * len(ARMS)
"""Of ``counts``: free cycles, those to be settled, events made, labels known, tokens committed,
model drafts not made; then for each arm cycles, tokens drafted, and accepted;
and the most labels that a request had open."""
LIVE, STOPPED, FULL_LENGTH = range(3)
"""How a request has ended."""
GROWS: Final = 2


class Table(NamedTuple):
    """Requests by slot, cycles by number."""

    requests: NDArray[np.int64]  # [slots, 18]
    means: NDArray[np.float64]  # [slots, 5 + WIDTH]
    payoffs: NDArray[np.int64]  # [slots, RECENT], as they come, the oldest overwritten
    contexts: NDArray[np.int32]  # [slots, BACK], the last tokens, at the end
    stops: NDArray[np.int32]  # [slots, widest]
    open: NDArray[np.int32]  # [slots, deepest], cycles whose labels are open, the oldest first
    names: NDArray[np.uint8]  # [slots, bytes], as events have them
    rows: NDArray[Any]  # [cycles] of ROW
    raw: NDArray[np.uint8]  # the same, [cycles, bytes]
    cycles: NDArray[np.int64]  # [cycles, 15]
    keys: NDArray[np.int64]  # [cycles, KINDS], of the memory
    drafts: NDArray[np.int32]  # [cycles, longest], tokens of cache drafts
    free: NDArray[np.int32]  # [cycles]
    unsettled: NDArray[np.int32]  # [cycles], those of which all is known, in that order
    counts: NDArray[np.int64]


TABLE: Final = record(
    Table, WHOLES_2, REALS_2, WHOLES_2, IDS_2, IDS_2, IDS_2, BYTES_2, rows_of(ROW), BYTES_2,
    WHOLES_2, WHOLES_2, IDS_2, IDS, IDS, WHOLES,
)  # fmt: skip


table_of = opener(TABLE)


def new_table(slots: int, cycles: int, longest: int) -> Table:
    """An empty table.

    Args:
        longest: tokens of a cache draft at most.
    """
    rows = np.zeros(cycles, ROW)
    counts = np.zeros(DEEPEST + 1, np.int64)
    counts[FREE] = cycles
    return Table(
        np.zeros((slots, 18), np.int64), np.zeros((slots, STRETCH + WIDTH)),
        np.zeros((slots, RECENT), np.int64), np.zeros((slots, BACK), np.int32),
        np.zeros((slots, 4), np.int32), np.zeros((slots, 16), np.int32),
        np.zeros((slots, REQUEST.itemsize), np.uint8), rows, raw_of(rows),
        np.zeros((cycles, 15), np.int64), np.zeros((cycles, KINDS), np.int64),
        np.zeros((cycles, longest), np.int32), np.arange(cycles, dtype=np.int32),
        np.zeros(cycles, np.int32), counts,
    )  # fmt: skip


def raw_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of rows of a structured dtype: [n, bytes]."""
    return rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)


class RequestTable:
    """The table, who is where in it, and what grows."""

    def __init__(self, longest: int) -> None:
        """Begin empty."""
        self.arrays = new_table(64, 1024, longest)
        self._handle = Handle()
        self.slots: dict[str, int] = {}
        self.options: dict[int, RequestOptions] = {}  # by slot
        self._free = list(range(63, -1, -1))
        self._asked: list[str] | None = None
        self._found = np.zeros(0, np.int64)  # what was found for them
        self._left: list[int] = []  # slots whose cycles may still wait to be settled

    def __contains__(self, name: str) -> bool:
        return name in self.slots

    @property
    def handle(self) -> Any:
        """Of ``arrays``."""
        return self._handle.of(self.arrays)

    def of(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Slots of requests by name, -1 for those that are not followed; not to be changed."""
        if names != self._asked:  # a batch is asked for three times a step
            slots, self._asked = self.slots, [*names]
            self._found = np.array([slots.get(name, -1) for name in names], np.int64)
        return self._found

    def shared(
        self, names: Sequence[str], slots: NDArray[np.int64], made: NDArray[np.int64]
    ) -> tuple[dict[tuple[str, str], list[int]], frozenset[str]]:
        """Of the requests [n], that ``made`` so many tokens, the tokens and requests of each tenant
        and workload, and the sessions; those that have just left are known until :meth:`settled`.
        """
        groups, sessions = dict[tuple[str, str], list[int]](), set[str]()
        for name, slot, tokens in zip(names, slots.tolist(), made.tolist(), strict=True):
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
        told: bytes | None,
    ) -> int:
        """A slot for a request with ``text`` (int32 [n]).

        Args:
            model: accepted length that its first model draft has to expect.
            told: its names as events have them; None where they cannot be written.
        """
        if not self._free:
            self._more_slots()
        stops = np.array(sorted(options.stop_ids), np.int32)
        slot = self._free.pop()
        if len(stops) > self.arrays.stops.shape[1]:
            self._widen("stops", len(stops))
        table = self.arrays
        row = table.requests[slot]
        row[:] = 0
        row[:6] = (
            len(text), prompt_len, options.max_tokens, options.max_model_len, options.min_tokens,
            options.speculate,
        )  # fmt: skip
        row[CYCLE], row[STOPS] = -1, len(stops)
        table.means[slot] = 0.0
        table.means[slot, FIRST : RECENT_MODEL + 1] = PRIOR_FIRST, PRIOR_LOG, PRIOR_LOG, model
        table.stops[slot, : len(stops)] = stops
        seen = text[-BACK:]
        table.contexts[slot, BACK - len(seen) :] = seen
        table.names[slot] = np.frombuffer(told, np.uint8) if told is not None else 255
        self.slots[name], self.options[slot], self._asked = slot, options, None
        return slot

    def remove(self, name: str) -> int:
        """Forget who is in a slot; what is left of its cycles may be settled first."""
        slot, self._asked = self.slots.pop(name), None
        self._left.append(slot)
        return slot

    def settled(self) -> None:
        """No cycle of one that left waits any more."""
        for slot in self._left:
            del self.options[slot]
        self._free += self._left
        self._left = []

    def reserve(self, cycles: int) -> None:
        """Make room for so many more cycles, each with an open label."""
        table = self.arrays
        if table.counts[FREE] < cycles:
            self._more_cycles(cycles)
        if table.counts[DEEPEST] >= table.open.shape[1]:
            self._widen("open", GROWS * table.open.shape[1])

    def _more_slots(self) -> None:
        table, had = self.arrays, len(self.arrays.requests)
        grown = {
            name: _longer(getattr(table, name), GROWS * had)
            for name in ("requests", "means", "payoffs", "contexts", "stops", "open", "names")
        }
        self.arrays = table._replace(**grown)
        self._free += range(GROWS * had - 1, had - 1, -1)

    def _more_cycles(self, cycles: int) -> None:
        table, had = self.arrays, len(self.arrays.rows)
        size = GROWS * had
        while size - had + int(table.counts[FREE]) < cycles:
            size *= GROWS
        names = ("rows", "cycles", "keys", "drafts", "free", "unsettled")
        grown = {name: _longer(getattr(table, name), size) for name in names}
        left = int(table.counts[FREE])
        grown["free"][left : left + size - had] = np.arange(had, size)
        table.counts[FREE] += size - had
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

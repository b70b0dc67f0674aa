"""The plan of a step's drafts, decided once and followed by every rank that runs the drafter.

Rank 0 broadcasts it as int32. The message holds step, rows, ``k`` and the number of given tokens;
for each row a number, positive for its given tokens, negative for its room; and the first of the
tokens. Its length is fixed, so that ranks which disagree on the batch can detect it. The remaining
tokens are a second message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Message = NDArray[np.int32]

HEADER: Final = 4
INLINE: Final = 256
"""Given tokens in the message: more than most steps propose, and still one packet."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The drafts of one step, by rows of the batch.

    ``given`` are the cache drafts; a row without one proposes at most ``rooms`` tokens of the
    model's draft. The model drafter makes ``k`` tokens.
    """

    given: tuple[tuple[int, ...], ...]
    rooms: tuple[int, ...]
    k: int = 0

    @classmethod
    def nothing(cls, rows: int) -> Plan:
        """No drafts."""
        return cls(((),) * rows, (0,) * rows)

    @classmethod
    def of(
        cls,
        size: int,
        rows: Sequence[int],
        given: Sequence[Sequence[int]],
        rooms: Sequence[int],
        k: int,
    ) -> Plan:
        """A plan for a batch of ``size``, of which only ``rows`` may have a draft."""
        if len(rows) == size:
            return cls(tuple(map(tuple, given)), tuple(rooms), k)
        drafts, left = list[tuple[int, ...]]([()] * size), [0] * size
        for row, tokens, room in zip(rows, given, rooms, strict=True):
            drafts[row], left[row] = tuple(tokens), room
        return cls(tuple(drafts), tuple(left), k)

    def proposals(self, made: Sequence[Sequence[int]]) -> list[list[int]]:
        """Each row's draft; ``made`` are the model's, by rows, of which the last may be missing."""
        rows = [*made, *((),) * (len(self.given) - len(made))]
        return [
            list(given) or list(model[:room])
            for given, room, model in zip(self.given, self.rooms, rows, strict=False)
        ]


def write(message: Message, step: int, rows: int, plan: Plan) -> Message:
    """Fill the message in place; returns the given tokens beyond ``INLINE``.

    Raises:
        ValueError: the plan has another number of rows.
        OverflowError: a token is no int32.
    """
    if not len(plan.given) == len(plan.rooms) == rows:
        raise ValueError(f"a plan of {len(plan.given)} rows for a step of {rows}.")
    given = np.array([token for row in plan.given for token in row], np.int32)
    inline = given[:INLINE]
    message[:HEADER] = step, rows, plan.k, len(given)
    message[HEADER : HEADER + rows] = [
        len(row) or -room for row, room in zip(plan.given, plan.rooms, strict=True)
    ]
    message[len(message) - INLINE :][: len(inline)] = inline
    return given[INLINE:]


def read(message: Message, rest: Message) -> Plan:
    """The plan in ``message``; ``rest`` is the result of :func:`write`."""
    _, rows, k, count = message[:HEADER].tolist()
    numbers = message[HEADER : HEADER + rows]
    tokens = np.concatenate([message[len(message) - INLINE :][:count], rest]).tolist()
    ends = np.cumsum(np.maximum(numbers, 0)).tolist()
    given = tuple(tuple(tokens[a:b]) for a, b in zip([0, *ends], ends, strict=False))
    return Plan(given, tuple(np.maximum(-numbers, 0).tolist()), k)

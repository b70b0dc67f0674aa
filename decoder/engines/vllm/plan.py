"""What one step drafts: decided once, and done alike by whoever runs the drafter.

Rank 0 sends it to the others as int32. The message holds step, rows, ``k`` and the number of given
tokens; a number for each row, positive for given tokens and negative for a room; and the first of
the tokens. Its length is fixed, so that ranks which disagree on the batch still notice. What is
left of the tokens is apart.
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
"""Given tokens that the message holds: more than most steps propose, and still one packet."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step drafts, by rows of the batch.

    ``given`` are tokens to propose as they are; in a row without, ``rooms`` says how many tokens of
    the model's draft to propose at most. The model drafter makes ``k`` tokens.
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
        """A plan for a batch of ``size``, by those ``rows`` of it that may have a draft."""
        if len(rows) == size:
            return cls(tuple(map(tuple, given)), tuple(rooms), k)
        drafts, left = list[tuple[int, ...]]([()] * size), [0] * size
        for row, tokens, room in zip(rows, given, rooms, strict=True):
            drafts[row], left[row] = tuple(tokens), room
        return cls(tuple(drafts), tuple(left), k)

    def proposals(self, made: Sequence[Sequence[int]]) -> list[list[int]]:
        """Each row's draft; ``made`` are the model's, in rows, some or all of which may lack."""
        rows = [*made, *((),) * (len(self.given) - len(made))]
        return [
            list(given) or list(model[:room])
            for given, room, model in zip(self.given, self.rooms, rows, strict=False)
        ]


def write(message: Message, step: int, rows: int, plan: Plan) -> Message:
    """Fill the message, in place; returns the given tokens that it has no room for.

    Raises:
        ValueError: not a plan for so many rows.
        OverflowError: a token that is none.
    """
    if not len(plan.given) == len(plan.rooms) == rows:
        raise ValueError(f"a plan of {len(plan.given)} rows for a step of {rows}.")
    given = np.array([token for row in plan.given for token in row], np.int32)
    held = given[:INLINE]
    message[:HEADER] = step, rows, plan.k, len(given)
    message[HEADER : HEADER + rows] = [
        len(row) or -room for row, room in zip(plan.given, plan.rooms, strict=True)
    ]
    message[len(message) - INLINE :][: len(held)] = held
    return given[INLINE:]


def read(message: Message, rest: Message) -> Plan:
    """The plan that was written; ``rest`` is what :func:`write` returned."""
    _, rows, k, count = message[:HEADER].tolist()
    numbers = message[HEADER : HEADER + rows]
    tokens = np.concatenate([message[len(message) - INLINE :][:count], rest]).tolist()
    ends = np.cumsum(np.maximum(numbers, 0)).tolist()
    given = tuple(tuple(tokens[a:b]) for a, b in zip([0, *ends], ends, strict=False))
    return Plan(given, tuple(np.maximum(-numbers, 0).tolist()), k)

"""A plan on its way from rank 0 to the others, as int32.

The message holds step, rows, ``k``, ``catch_up``, ``reads`` and the number of given
tokens; a number for each row, positive for given tokens and negative for a room; and the first of
the tokens. Its length is fixed, so that ranks which disagree on the batch still notice. What is
left of the tokens is apart.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.engines.vllm.plan import Plan

Message = NDArray[np.int32]

HEADER: Final = 6
INLINE: Final = 256
"""Given tokens that the message holds: more than most steps propose, and still one packet."""


def message_for(most_rows: int) -> Message:
    """A message with room for so many rows."""
    return np.zeros(HEADER + most_rows + INLINE, np.int32)


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
    message[:HEADER] = step, rows, plan.k, plan.catch_up, plan.reads, len(given)
    message[HEADER : HEADER + rows] = [
        len(row) or -room for row, room in zip(plan.given, plan.rooms, strict=True)
    ]
    message[len(message) - INLINE :][: len(held)] = held
    return given[INLINE:]


def place(message: Message) -> tuple[int, int]:
    """The step that the message is of, and its rows."""
    return int(message[0]), int(message[1])


def missing(message: Message) -> int:
    """Given tokens that are not in the message."""
    return max(int(message[HEADER - 1]) - INLINE, 0)


def read(message: Message, rest: Message) -> Plan:
    """The plan that was written; ``rest`` is what :func:`write` returned."""
    _, rows, k, *flags, count = message[:HEADER].tolist()
    numbers = message[HEADER : HEADER + rows]
    tokens = np.concatenate([message[len(message) - INLINE :][:count], rest]).tolist()
    ends = np.cumsum(np.maximum(numbers, 0)).tolist()
    given = tuple(tuple(tokens[a:b]) for a, b in zip([0, *ends], ends, strict=False))
    return Plan(given, tuple(np.maximum(-numbers, 0).tolist()), k, *map(bool, flags))

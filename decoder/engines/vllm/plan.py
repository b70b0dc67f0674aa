"""The plan of a step's drafts, decided once and followed by every rank that runs the drafter.

Rank 0 broadcasts it as int32. The message holds step, rows, ``k`` and the number of cache draft
tokens; for each row a number, positive for the length of its cache draft, negative for its limit of
a model draft; and the first of the tokens. Its length is fixed, so that ranks which disagree on the
batch can detect it. The remaining tokens are a second message.
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
"""Cache draft tokens in the message: more than most steps propose, and still one packet."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The drafts of one step, by rows of the batch.

    ``cached`` are the cache drafts; a row without one proposes at most ``limits`` tokens of the
    model's draft. The model drafter makes ``k`` tokens.
    """

    cached: Sequence[list[int]]
    limits: Sequence[int]
    k: int = 0

    @classmethod
    def nothing(cls, rows: int) -> Plan:
        """No drafts."""
        return cls([[] for _ in range(rows)], [0] * rows)

    def spread(self, rows: Sequence[int], size: int) -> Plan:
        """This plan, whose rows are ``rows`` of a batch of ``size``; others draft nothing."""
        if len(rows) == size:
            return self
        plan = Plan.nothing(size)
        cached, limits = list(plan.cached), list(plan.limits)
        for row, tokens, limit in zip(rows, self.cached, self.limits, strict=True):
            cached[row], limits[row] = tokens, limit
        return Plan(cached, limits, self.k)

    def lengths(self) -> list[int]:
        """Length of each row's draft, if the model drafter makes ``k`` tokens."""
        return [
            len(cached) or min(limit, self.k)
            for cached, limit in zip(self.cached, self.limits, strict=True)
        ]

    def proposals(self, from_model: Sequence[list[int]]) -> list[list[int]]:
        """Each row's draft. ``from_model`` are the drafter's, by rows; the last may be missing."""
        rows = [*from_model, *[[]] * (len(self.cached) - len(from_model))]
        return [
            cached or model[:limit]
            for cached, limit, model in zip(self.cached, self.limits, rows, strict=False)
        ]


def write(message: Message, step: int, rows: int, plan: Plan) -> Message:
    """Fill the message in place; returns the cache draft tokens beyond ``INLINE``.

    Raises:
        ValueError: the plan has another number of rows.
        OverflowError: a token is no int32.
    """
    if not len(plan.cached) == len(plan.limits) == rows:
        raise ValueError(f"a plan of {len(plan.cached)} rows for a step of {rows}.")
    cached = np.array([token for row in plan.cached for token in row], np.int32)
    inline = cached[:INLINE]
    message[:HEADER] = step, rows, plan.k, len(cached)
    message[HEADER : HEADER + rows] = [
        len(row) or -limit for row, limit in zip(plan.cached, plan.limits, strict=True)
    ]
    message[len(message) - INLINE :][: len(inline)] = inline
    return cached[INLINE:]


def read(message: Message, remaining: Message) -> Plan:
    """The plan in ``message``; ``remaining`` is the result of :func:`write`."""
    _, rows, k, count = message[:HEADER].tolist()
    numbers = message[HEADER : HEADER + rows]
    tokens = np.concatenate([message[len(message) - INLINE :][:count], remaining]).tolist()
    ends = np.cumsum(np.maximum(numbers, 0)).tolist()
    cached = [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return Plan(cached, np.maximum(-numbers, 0).tolist(), k)

"""The interface between engine and router: request options, step reports, decisions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.events import Arm
from decoder.policy.rule import ARMS


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request. ``stop_ids`` are token ids that end it, from ``min_tokens`` on.

    ``opaque``, ``tenant`` and ``session`` are pseudonyms, the only names that leave the worker.
    ``choice`` numbers the choices of one client request. ``cache_key`` groups the requests that may
    draft from each other's output; None means the tenant.
    """

    max_tokens: int
    max_model_len: int
    stop_ids: frozenset[int] = frozenset()
    tenant: str = ""
    workload: str = ""
    speculate: bool = True
    opaque: str = ""
    session: str = ""
    choice: int = 0
    cache_key: str | None = None
    min_tokens: int = 0

    @property
    def key(self) -> str:
        """Key under which it shares its output."""
        return self.tenant if self.cache_key is None else self.cache_key


ADVANCED: Final = np.dtype(
    [
        ("slot", "i8"),  # in the request table, -1 if not tracked
        ("end", "i8"),  # end of its tokens in StepReport.tokens
        ("verified", "i8"),  # draft tokens
        ("length", "i8"),  # tokens the engine holds, 0 if unknown
        ("committed", "i8"),  # output: tokens that its client sees
    ],
    align=True,
)
"""A request that a step advanced."""


@dataclass(slots=True)
class StepReport:
    """One step: the requests it advanced, their tokens, and the next step's budget.

    The router fills ``committed`` of ``advanced`` and sets ``slot`` of ended requests to -1.
    """

    names: Sequence[str]
    """Requests that the step advanced; the next step decides for the same ones."""
    tokens: NDArray[np.int32]
    """Committed tokens of all requests, concatenated."""
    advanced: NDArray[Any]
    """:data:`ADVANCED` [n], one per name."""
    step_tokens: int = 0
    """Tokens that the step ran through the target, prefill included; 0 if no step produced the
    tokens, in which case no time is learned."""
    timed: bool = True
    """Whether its time is used for costs: not if the step also did deferred work."""
    others: int = 0
    """Requests of the next step that the router does not track; they verify nothing."""
    budget: int | None = None
    """Draft tokens that the next step has room for, over all requests."""
    unable: Collection[str] = ()
    """Requests that the model drafter cannot draft for."""
    waiting: int = 0
    """Prompt tokens waiting for prefill."""
    capacity: int = 1 << 40
    """Maximum tokens of a step."""


class Decision(NamedTuple):
    """What one request verifies in the next cycle; ``tokens`` only for the arm ``cache``."""

    arm: Arm
    tokens: Sequence[int] = ()
    room: int = 0  # maximum draft tokens, for any arm


class Decisions:
    """Decisions for n requests: ``arms``, ``lengths`` of cache drafts, ``rooms`` (as in
    :class:`Decision`) and ``drafts``, their rows in ``tokens``; all int32 [n].

    Valid until the next choice, which overwrites ``tokens``.
    """

    def __init__(self, decided: NDArray[Any], tokens: NDArray[np.int32]) -> None:
        self.arms, self.lengths = decided["arm"], decided["length"]
        self.rooms, self.drafts = decided["room"], decided["draft"]
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.arms)

    def __iter__(self) -> Iterator[Decision]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, at: int) -> Decision:
        length, room = int(self.lengths[at]), int(self.rooms[at])
        tokens = self.tokens[self.drafts[at], :length].tolist() if length else ()
        return Decision(ARMS[self.arms[at]], tokens, room)

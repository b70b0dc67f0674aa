"""What engine and router tell each other: requests, reports of steps, decisions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.events import Arm
from decoder.policy.rule import ARMS


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request asks for. ``stop_ids`` are the token ids that end it, from ``min_tokens`` on.

    ``opaque``, ``tenant`` and ``session`` are pseudonyms, and the only names of it that leave the
    worker; ``choice`` counts the choices of one client request. ``cache_key`` is what it has in
    common with the requests that it may draft from: its tenant, unless it says more.
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
        """What it shares its text under."""
        return self.tenant if self.cache_key is None else self.cache_key


ADVANCED: Final = np.dtype(
    [
        ("slot", "i8"),  # in the request table, -1 for one that is not followed
        ("end", "i8"),  # of its tokens, in those of all
        ("verified", "i8"),  # draft tokens
        ("length", "i8"),  # tokens that the engine holds, 0 where it does not say
        ("done", "i8"),  # of decoder.core.observe
        ("committed", "i8"),  # filled: tokens that its client sees
    ],
    align=True,
)
"""A request that a step advanced."""


@dataclass(slots=True)
class StepReport:
    """One step: who advanced by which tokens, and what the next step has room for.

    The router fills ``committed`` of ``advanced``, and takes away the slots of those that ended.
    """

    names: Sequence[str]
    """Requests that the step advanced; the next step decides for the same."""
    tokens: NDArray[np.int32]
    """What was committed, of all requests one after the other."""
    advanced: NDArray[Any]
    """Of :data:`ADVANCED`, for each of ``names``."""
    step_tokens: int = 0
    """Tokens that the step ran through the target, prefill included; 0 for tokens that no step
    made, of which nothing is learned about time."""
    usual: bool = True
    """False where the step also did work that had waited: it says nothing of costs."""
    others: int = 0
    """Requests of the next step that the router does not follow, and which verify nothing."""
    budget: int | None = None
    """Draft tokens that the next step has room for, of all requests together."""
    unable: Collection[str] = ()
    """Requests that the model drafter cannot draft for."""
    waiting: int = 0
    """Tokens of prompts that wait to be read."""
    capacity: int = 1 << 40
    """Tokens of a step at most."""

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        slots: list[int],
        tokens: Sequence[Sequence[int]],
        verified: Sequence[int] | int,
        lengths: Sequence[int] | int,
        step_tokens: int,
    ) -> StepReport:
        """A report by request: its slot, what was committed, how many draft tokens were verified,
        and how many tokens the engine holds for it after the step, 0 where it does not say.

        Raises:
            OverflowError: a token is none.
        """
        advanced = np.zeros(len(names), ADVANCED)
        advanced["slot"], advanced["verified"], advanced["length"] = slots, verified, lengths
        advanced["end"] = [*accumulate(map(len, tokens))]
        flat = np.array([*chain.from_iterable(tokens)], np.int32)
        return cls(names, flat, advanced, step_tokens, others=slots.count(-1))


class Decision(NamedTuple):
    """What one request verifies in the coming cycle: ``tokens`` when the arm is ``cache``."""

    arm: Arm
    tokens: Sequence[int] = ()
    room: int = 0  # draft tokens of any arm that the request may still use


class Decisions:
    """What each of n requests verifies: ``arms``, ``lengths`` of cache drafts, ``rooms`` (as in
    :class:`Decision`) and ``drafts``, the row of ``tokens`` that each has; all int32 [n].

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

"""What engine and router tell each other of a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

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


class Decision(NamedTuple):
    """What one request verifies in the coming cycle: ``tokens`` when the arm is ``cache``."""

    arm: Arm
    tokens: Sequence[int] = ()
    room: int = 0  # draft tokens of any arm that the request may still use


class Committed(NamedTuple):
    """One cycle's outcome: tokens committed, and how many draft tokens were really verified.

    ``length`` is what the engine holds for the request after the step, prompt and output tokens
    together; 0 where it does not say.
    """

    request: str
    tokens: Sequence[int]
    verified_len: int
    length: int = 0


class Outcomes(NamedTuple):
    """What a step committed of n requests: ``tokens`` are of all, up to the ``ends`` of each."""

    names: Sequence[str]
    tokens: NDArray[np.int32]
    ends: NDArray[np.int64]
    verified: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, outcomes: Sequence[Committed]) -> Outcomes:
        """The same in columns.

        Raises:
            OverflowError: a token is none.
        """
        names = [outcome.request for outcome in outcomes]
        return cls.flat(
            names, [o.tokens for o in outcomes], [o.verified_len for o in outcomes],
            [o.length for o in outcomes],
        )  # fmt: skip

    @classmethod
    def flat(
        cls,
        names: Sequence[str],
        tokens: Sequence[Sequence[int]],
        verified: Sequence[int],
        lengths: Sequence[int],
    ) -> Outcomes:
        """By request its tokens, how many draft tokens were verified, and its length.

        Raises:
            OverflowError: a token is none.
        """
        ends = np.fromiter(accumulate(map(len, tokens)), np.int64, len(tokens))
        flat = np.array([*chain.from_iterable(tokens)], np.int32)
        return cls(names, flat, ends, np.array(verified, np.int64), np.array(lengths, np.int64))


class Decisions:
    """What each of n requests verifies: ``arms``, ``lengths`` of cache drafts, ``rooms`` (as in
    :class:`Decision`) and ``drafts``, the row of ``tokens`` that each has; all int32 [n]."""

    def __init__(self, decided: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        self.arms, self.lengths, self.rooms, self.drafts = decided.T
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.arms)

    def __iter__(self) -> Iterator[Decision]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, at: int) -> Decision:
        length, room = int(self.lengths[at]), int(self.rooms[at])
        tokens = self.tokens[self.drafts[at], :length].tolist() if length else ()
        return Decision(ARMS[self.arms[at]], tokens, room)

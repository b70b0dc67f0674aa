"""Event sink: the compiled step writes a row of the ring per cycle."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.contracts.events import PSEUDONYMISED, pseudonymised
from decoder.contracts.fields import LIMITS, REQUEST, ROW, STEP
from decoder.core.requests import RequestOptions
from decoder.core.table import raw_of
from decoder.limited_log import LimitedLog
from decoder.policy.rule import ARMS
from decoder.telemetry.ring import Ring, packer

LABELS: Final = ("", "verified", "hindsight")
_PARAMETER_LIMITS: Final = LIMITS["parameter"]
"""A policy's threshold may exceed this range; clipping keeps its meaning, all or nothing."""
_STEP, _REQUEST = packer(STEP), packer(REQUEST)


class Sink:
    """Prepares the bytes of event rows; rows that cannot be written are counted in the ring."""

    def __init__(self, ring: Ring | None) -> None:
        """Write into ``ring``; None discards events."""
        self.ring = ring
        self.raw = raw_of(ring.rows if ring is not None else np.zeros(0, ROW))
        self.control = ring.control if ring is not None else np.zeros(8, np.int64)
        words = (*ARMS, *LABELS)
        self.words = np.array([self.word(word) for word in words], np.int64)
        self._limited_log = LimitedLog()

    def word(self, text: str) -> int:
        """Interned id of ``text`` in a row.

        Raises:
            ValueError: the ring's string table is full.
        """
        return self.ring.intern(text) if self.ring is not None else 0

    def names(self, name: str, options: RequestOptions) -> bytes | None:
        """A request's names packed for rows; None if they cannot be encoded."""
        try:
            return _REQUEST.pack(*self._told(name, options), options.choice)
        except Exception:  # noqa: BLE001 -- logged
            self._limited_log.exception("no event can be made of a request's cycles")
            return None

    def step(
        self,
        policy: Policy,
        block: tuple[str, int],
        parameter: float,
        wall: float,
        batch: int,
        draft_us: float,
    ) -> NDArray[np.uint8]:
        """Packed ``STEP`` fields of a step's events; ``block`` is the variant that decides it and
        its round, "" and -1 outside of comparisons, ``wall`` in seconds since the epoch."""
        ids = 0, -1, 0
        try:
            ids = self.word(policy.role), self.word(block[0]), self.word(policy.parameter_name)
        except ValueError:
            self._limited_log.exception("no events can be made of a step")
        values = {
            "time": wall,
            "parameter": min(max(parameter, _PARAMETER_LIMITS[0]), _PARAMETER_LIMITS[1]),
            "draft_us": draft_us,
            "step_us": 0.0,  # filled after the step, as is step_tokens
            "publication": policy.publication,
            "round": block[1],
            "policy_version": policy.version,
            "batch_size": batch,
            "step_tokens": 0,
            **dict(zip(("role", "side", "parameter_name"), ids, strict=True)),
        }
        return np.frombuffer(_STEP.pack(*map(values.__getitem__, STEP.names or ())), np.uint8)

    def written(self) -> None:
        """Hook: settled events are in the ring."""

    def _told(self, name: str, options: RequestOptions) -> list[bytes]:
        """Pseudonymised names of a request, in the order of :data:`PSEUDONYMISED`."""
        names = options.opaque or name, options.tenant, options.session, options.workload
        return [
            pseudonymised(kind, each).encode()
            for kind, each in zip(PSEUDONYMISED, names, strict=True)
        ]

"""Event sink: the compiled step writes a row of the ring per cycle."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import handle_of
from decoder.contracts.events import PSEUDONYMISED, pseudonymised
from decoder.contracts.fields import LIMITS, REQUEST, ROW, STEP
from decoder.contracts.identity import Named
from decoder.core.cycles import Outbox
from decoder.core.requests import RequestOptions
from decoder.core.table import raw_of
from decoder.experiment.variants import Variant
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
        self.control = ring.control if ring is not None else np.zeros(8, np.int64)
        raw = raw_of(ring.rows if ring is not None else np.zeros(0, ROW))
        words = np.array([self.word(word) for word in (*ARMS, *LABELS)], np.int64)
        self._outbox = Outbox(raw, self.control, words)
        self.outbox = handle_of(self._outbox)
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
            names = options.opaque or name, options.tenant, options.session, options.workload
            return _REQUEST.pack(*map(self._packed, PSEUDONYMISED, names), options.choice)
        except Exception:  # noqa: BLE001 -- logged
            self._limited_log.exception("no event can be made of a request's cycles")
            return None

    def step(
        self,
        variant: Variant,
        block: int,
        rate: float,
        batch: int,
        draft_us: float,
    ) -> NDArray[np.uint8]:
        """Packed ``STEP`` fields of a step's events; ``block`` is the number of its round, -1
        outside of comparisons."""
        policy, ids = variant.policy, (0, -1, 0)
        parameter = rate if policy.kind == "survival" else policy.threshold
        name = variant.name if block >= 0 else ""
        try:
            ids = self.word(policy.role), self.word(name), self.word(policy.parameter_name)
        except ValueError:
            self._limited_log.exception("no events can be made of a step")
        values = {
            "time": time.time(),
            "parameter": min(max(parameter, _PARAMETER_LIMITS[0]), _PARAMETER_LIMITS[1]),
            "draft_us": draft_us,
            "step_us": 0.0,  # filled after the step, as is step_tokens
            "publication": policy.publication,
            "round": block,
            "policy_version": policy.version,
            "batch_size": batch,
            "step_tokens": 0,
            **dict(zip(("role", "side", "parameter_name"), ids, strict=True)),
        }
        return np.frombuffer(_STEP.pack(*map(values.__getitem__, STEP.names or ())), np.uint8)

    def written(self) -> None:
        """Hook: new events are in the ring."""

    def _packed(self, kind: Named, name: str) -> bytes:
        """A request's name as it may be sent."""
        return pseudonymised(kind, name).encode()

"""Follows accepted length and calibration error by workload, with drift detection by ADWIN.

ADWIN (Bifet and Gavalda 2007) keeps a window and cuts it where the means of its parts differ. The
window then describes the workload as it is now, and a cut is a change. Drafts of one request in one
record are correlated, so their mean counts as one value.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from river.drift import ADWIN

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import EventBatch, decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from pipelines.telemetry.reading import reading, records, spans

DELTA: Final = 0.002  # significance level of a cut: river's default
WORKLOADS: Final = 200
"""Most workloads to follow by name, since clients choose the names; later ones count as
``OTHERS``."""
OTHERS: Final = "(others)"
LOOK_SECONDS: Final = 1.0
MEASURES: Final = {"accepted": "accepted length", "calibration": "calibration error"}
"""In tokens of a draft; the error is predicted less accepted tokens."""


@dataclass(frozen=True)
class Change:
    """The mean of ``measure``, in tokens, changed from ``before`` to ``now``, at ``time`` (seconds
    since the epoch)."""

    workload: str
    measure: str
    before: float
    now: float
    time: float

    def __str__(self) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.time))
        name = self.workload or "(no workload)"
        return f"{at} {name}: {MEASURES[self.measure]} {self.before:.2f} -> {self.now:.2f} tokens"


@dataclass
class Followed:
    """The state of all workloads; ``refused`` counts invalid records."""

    drafts: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    _windows: dict[tuple[str, str], ADWIN] = field(default_factory=dict)

    def update(self, batch: EventBatch) -> list[Change]:
        """Read the complete labels of a record; returns the changes. Mutates."""
        numbers = batch.numbers
        whole = ~np.array(list(map(bool, batch.names["censored"]))) & (numbers["draft_len"] > 0)
        values = {
            "accepted": numbers["accepted"].astype(np.float64),
            "calibration": numbers["predicted"].astype(np.float64) - numbers["accepted"],
        }
        requests: dict[tuple[str, str], list[int]] = {}
        for row in np.flatnonzero(whole).tolist():
            key = batch.names["workload"][row], batch.names["request"][row]
            requests.setdefault(key, []).append(row)
        changes, at = [], float(numbers["time"].max())
        for (named, _), rows in requests.items():
            known = named in self.drafts or len(self.drafts) < WORKLOADS
            workload = named if known else OTHERS
            self.drafts[workload] = self.drafts.get(workload, 0) + len(rows)
            for measure, column in values.items():
                window = self._windows.setdefault((workload, measure), ADWIN(DELTA))
                before = window.estimation
                window.update(float(column[rows].mean()))
                if window.drift_detected:
                    changes.append(Change(workload, measure, before, window.estimation, at))
        return changes

    def summary(self) -> dict[str, Any]:
        """By workload its drafts and the current means of both measures; JSON-ready."""
        now = {key: window.estimation for key, window in self._windows.items()}
        workloads = {
            name: {"drafts": n, **{measure: now[name, measure] for measure in MEASURES}}
            for name, n in self.drafts.items()
        }
        return {"workloads": workloads, "refused": self.refused}


def follow(kafka: KafkaSettings, followed: Followed, *, past: bool, on: bool) -> Iterator[Change]:
    """Yield changes as they are found.

    Args:
        past: start with the existing records instead of the topic's end.
        on: continue with new records until closed.

    Raises:
        BrokerError: the broker is away.
    """
    with reading(kafka, "watch") as consumer:
        available = spans(consumer, DRAFTS)
        reached = {p: span.start if past else span.stop for p, span in available.items()}
        while True:
            wanted = {
                p: range(max(span.start, reached.get(p, span.start)), span.stop)
                for p, span in spans(consumer, DRAFTS).items()
            }
            for fetched in records(consumer, DRAFTS, wanted):
                for record in fetched:
                    try:
                        yield from followed.update(decode_batch(record.value or b""))
                    except EventRefused:
                        followed.refused += 1
            reached = {p: span.stop for p, span in wanted.items()}
            if not on:
                return
            time.sleep(LOOK_SECONDS)

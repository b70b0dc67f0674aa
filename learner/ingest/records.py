"""Decodes records of draft events into training rows, each once.

:func:`decode_record` is a pure function. :class:`RecordReader` deduplicates, counts, and sends
refused records to the dead-letter topic.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.errors import EventRefused, SchemaUnknown
from decoder.contracts.events import EventBatch, Source, decode_batch, encode_batch
from decoder.contracts.fields import LIMITS
from decoder.limited_log import LimitedLog
from learner.ingest.dead_letters import DeadLetters
from learner.ingest.sequences import Sequences
from learner.ingest.source import EventSource, Fetched
from learner.training.rows import Rows, from_batch, training_mask

MAX_AHEAD_SECONDS: Final = 86_400.0
"""Tolerance for wrong clocks. An event from another century would make all later ones look old."""
MAX_BYTES: Final = 4 << 20
MAX_ROWS: Final = 4_096
"""Limit of a decompressed record. A worker writes 256 rows; the loop ends between two records."""


@dataclass(frozen=True)
class DraftRecord:
    """A decoded record: ``events`` of ``scope``, ``drafts`` of them trainable, ``rows`` sampled.

    ``foreign`` counts drafts within limits other than the worker's own. ``served`` holds the names
    ``target`` and ``drafter``, if reported. ``predicted`` and ``accepted`` are sums of tokens over
    drafts with a complete label. ``indices`` [rows] are positions of the rows in ``batch``.
    """

    scope: str
    events: int
    drafts: int
    rows: Rows
    served: Mapping[str, str]
    predicted: float
    accepted: int
    foreign: int
    batch: EventBatch
    indices: NDArray[np.intp]


def decode_record(record: Fetched, sample_rates: Mapping[str, float], now: float) -> DraftRecord:
    """Decode, check and sample ``record``.

    Args:
        sample_rates: in (0, 1] by scope; 1 where absent. Requests are sampled whole, by their hash:
            a smaller sample is a subset of a larger one.
        now: seconds since the epoch.

    Raises:
        EventRefused: the record violates the contract.
    """
    try:
        if (size := len(record.value)) > MAX_BYTES:
            raise EventRefused(f"{size} bytes exceed the limit of {MAX_BYTES}", "range")
        batch = decode_batch(record.value)
        if len(batch) > MAX_ROWS:
            raise EventRefused(f"{len(batch)} events exceed the limit of {MAX_ROWS}", "range")
        _check_time(batch, record, now)
    except EventRefused:
        raise
    except Exception as failure:  # otherwise the learner would fail at each start
        raise EventRefused(f"a record that cannot be read: {failure!r}") from failure
    origin = batch.origin
    served = {"target": origin.target, "drafter": origin.drafter}
    trainable = training_mask(batch)
    complete = trainable & ~np.array(list(map(bool, batch.names["censored"])))
    predicted, accepted = (
        float(batch.numbers[name][complete].sum()) for name in ("predicted", "accepted")
    )
    rows, indices = from_batch(batch), np.flatnonzero(trainable)
    foreign = int(np.count_nonzero(batch.numbers["draft_len"])) - len(rows)
    drafts, rate = len(rows), sample_rates.get(origin.scope, 1.0)
    if rate < 1.0:
        sampled = rows.request < np.uint64(rate * 2.0**64)
        rows, indices = rows.take(sampled), indices[sampled]
    if batch.source is not None:  # already sampled by an intake
        drafts = round(drafts / batch.source.share)
    return DraftRecord(
        origin.scope, len(batch), drafts, rows, {key: name for key, name in served.items() if name},
        predicted, int(accepted), foreign, batch, indices,
    )  # fmt: skip


def encode_rows(record: DraftRecord, source: Source) -> bytes:
    """Serialise the sampled rows, at least one, as a record of ``hvd.lessons.v2``."""
    return encode_batch(replace(record.batch.take(record.indices), source=source))


class RecordReader:
    """Reads each record once; refused ones go to ``dead``, except those with the feature schema of
    another release: its own learner reads them.

    ``relayed``: records come from an intake and name their source. ``sample_rates``: see
    :func:`decode_record`. ``refused`` counts records by reason, ``repeated`` events of duplicates,
    ``events`` those of the ``records`` that this process has read.
    """

    def __init__(
        self,
        dead: DeadLetters,
        sequences: Sequences | None = None,
        refused: Mapping[str, int] = {},
        repeated: int = 0,
        sample_rates: Mapping[str, float] = {},
        relayed: bool = False,
    ) -> None:
        self.dead = dead
        self.sequences = sequences or Sequences()
        self.refused = Counter(refused)
        self.repeated = repeated
        self.records = self.events = 0
        self.sample_rates = sample_rates
        self._relayed = relayed
        self._limited_log = LimitedLog()

    def read(self, record: Fetched) -> DraftRecord | None:
        """Decode a new record; None for one that is refused or a duplicate."""
        decoded = self.decode(record)
        return decoded if decoded is not None and self.admit(record, decoded) else None

    def decode(self, record: Fetched) -> DraftRecord | None:
        """Decode a record, new or not; None for one that is refused."""
        try:
            decoded = decode_record(record, self.sample_rates, time.time())
            if (decoded.batch.source is not None) != self._relayed:
                raise EventRefused("training rows among draft events, or the reverse", "contract")
        except SchemaUnknown as error:
            self.refused[error.reason] += 1
            self._limited_log.warning(
                "draft events with feature schema %r are counted and skipped: their worker has "
                "another version than this learner", error.schema,
            )  # fmt: skip
            return None
        except EventRefused as error:
            self.refused[error.reason] += 1
            self.dead.send(record, error)
            return None
        return decoded

    def admit(self, record: Fetched, decoded: DraftRecord) -> bool:
        """Whether the decoded record is new. Mutates the counts."""
        batch, sequences = decoded.batch, self.sequences
        partition = record.partition if batch.source is None else batch.source.partition
        admit = sequences.admit_sparse if self._relayed else sequences.admit
        if not admit(batch.origin.life, partition, batch.sequence):
            self.repeated += decoded.events
            return False
        self.records += 1
        self.events += decoded.events
        return True

    def status(self, source: EventSource) -> dict[str, Any]:
        """Status fields of a process that reads ``source``."""
        lag, read_at = source.lag(), source.read_at
        age = time.time() - read_at if lag and read_at else 0.0
        return {
            "scope": "",
            "time": time.time(),
            "events_duplicate": self.repeated,
            "records_refused": self.refused.total(),
            "refusals": dict(self.refused),
            "dead_letters_failed": self.dead.failed,
            "records_missing": self.sequences.missing,
            "records_duplicate": self.sequences.duplicates,
            "records_skipped": source.skipped,
            "lag": lag,
            "lag_events": round(lag * self.events / max(self.records, 1)),
            "lag_seconds": max(age, source.unreachable_seconds()),
        }


def _check_time(batch: EventBatch, record: Fetched, now: float) -> None:
    latest = float(batch.numbers["time"].max())
    written = record.timestamp / 1e3
    # a timestamp may have another unit, and the local clock may be wrong
    known = max(now, written if written < LIMITS["time"][1] else 0.0)
    if latest > known + MAX_AHEAD_SECONDS:
        raise EventRefused(f"draft events of {latest:.0f} in a record of an earlier day", "range")

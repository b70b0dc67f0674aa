"""Reader of a compacted topic (all records) or of another (the last ones), then of new records."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, Final

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import Topic
from decoder.kafka.clients import (
    ANSWER_MS,
    AWAY,
    close,
    fetch,
    layout_of,
    log_error,
    offsets,
    open_consumer,
    partitions_of,
)
from decoder.limited_log import LimitedLog

REQUEST_MS: Final = 5_000
REVIEW_SECONDS: Final = 30.0
"""Interval of checks of which offsets the topic still holds."""
MAX_OVERRUN_S: Final = 1.0
"""Longest overrun of a call's time where records arrive without end: the caller has other work, or
must stop."""


class Compacted:
    """Calls ``receive`` with every record of ``topic``, in order within a partition. New partitions
    are read from their beginning.

    ``retained`` is called from time to time with the range of offsets a partition may still hold;
    an empty one for a partition that was recreated or deleted. ``last`` limits the number of
    existing records read, and of records read in one call: more are skipped, but for the newest.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        topic: Topic,
        receive: Callable[[Any], None],
        retained: Callable[[int, range], None] = lambda partition, offsets: None,
        answer_ms: int = ANSWER_MS,
        last: int | None = None,
    ) -> None:
        self._last = last
        self._kafka, self._topic, self._receive, self._retained = kafka, topic, receive, retained
        self._answer_ms = answer_ms
        self._consumer: Any = None
        self._topic_id: Any = None
        self._places: list[Any] = []
        self._ends: dict[Any, int] = {}
        self._review_at = 0.0
        self._limited_log = LimitedLog()

    def read(self, seconds: float = 0.0) -> bool:
        """Read new records; whether all records that existed at first have been read.

        Args:
            seconds: time to read all that exist now.

        Raises:
            KafkaError, OSError: broker or topic are unreachable or refuse, which is logged; the
                next call starts again from the beginning.
        """
        try:
            self._connect()
            if seconds:
                self._ends = self._ask(self._consumer.end_offsets)
            deadline, received = time.monotonic() + seconds, 0
            self._skip()
            while True:
                records = fetch(self._consumer, self._answer_ms)
                received += len(records)
                for record in records:
                    self._receive(record)
                # the client may have no position yet
                at = {place: self._consumer.position(place) or 0 for place in self._ends}
                done = all(at[place] >= end for place, end in self._ends.items())
                if done:
                    self._ends = {}  # reached once; a recreated topic has other ends
                late = time.monotonic() - deadline
                full = late >= MAX_OVERRUN_S or (self._last is not None and received >= self._last)
                newest = done and bool(seconds) and self._last is not None  # it needs no more
                if full or newest or (not records and (done or late >= 0.0)):
                    return done
        except BaseException as error:
            self.close()
            if isinstance(error, AWAY):
                log_error(self._limited_log, self._topic.name, "read", error)
            raise

    def close(self) -> None:
        """Close the consumer; the next read starts from the beginning."""
        close(self._consumer)
        self._consumer = None

    def _connect(self) -> None:
        opens = self._consumer is None
        if opens:
            self._consumer = open_consumer(
                self._kafka, f"reader-of-{self._topic.name}", request_timeout_ms=REQUEST_MS
            )
            partitions_of(self._consumer, self._topic.name)
        topic_id, places = layout_of(self._consumer, self._topic.name)
        if opens or (topic_id, places) != (self._topic_id, self._places):
            same = topic_id == self._topic_id
            remaining = set(self._places).intersection(places) if same else set[Any]()
            for removed in set(self._places) - remaining:
                self._retained(removed.partition, range(0))
            self._topic_id, self._places = topic_id, places
            self._assign(set() if opens else remaining)
        elif time.monotonic() >= self._review_at:
            self._review(self._ask(self._consumer.end_offsets))

    def _assign(self, remaining: Collection[Any]) -> None:
        """Assign all partitions: the ``remaining`` at their positions, others at their beginning,
        or at their last records."""
        read_to = {place: self._consumer.position(place) for place in remaining}
        self._consumer.assign(self._places)  # which forgets all positions
        self._consumer.seek_to_beginning(*self._places)
        self._ends = self._ask(self._consumer.end_offsets)
        if self._last is not None:
            begins = self._ask(self._consumer.beginning_offsets)
            for place, end in self._ends.items():
                first = end - self._last // len(self._places)
                self._consumer.seek(place, max(begins[place], first))
        for place, offset in read_to.items():
            self._consumer.seek(place, offset or 0)
        self._review(self._ends)

    def _skip(self) -> None:
        """Skip records of which more arrive than are read, or the reader falls ever further behind.
        The end is the one that the last fetch reported."""
        if self._last is None:
            return
        for place in self._places:
            first = (self._consumer.highwater(place) or 0) - self._last // len(self._places)
            if first > 0 and (self._consumer.position(place) or 0) < first:
                self._consumer.seek(place, first)

    def _ask(self, ask: Callable[..., dict[Any, int]]) -> dict[Any, int]:
        """Offsets of all partitions, with a timeout for those deleted or without a leader."""
        return offsets(ask, self._places, timeout_ms=REQUEST_MS)

    def _review(self, ends: dict[Any, int]) -> None:
        """Report the existing offsets up to ``ends``; read recreated partitions from the start."""
        self._review_at = time.monotonic() + REVIEW_SECONDS
        begins = self._ask(self._consumer.beginning_offsets)
        for place, first in begins.items():
            recreated = ends[place] < (self._consumer.position(place) or 0)
            existing = range(0) if recreated else range(first, ends[place])
            self._retained(place.partition, existing)
            if recreated:
                self._ends.pop(place, None)
                self._consumer.seek_to_beginning(place)

"""Reading a compacted topic: all that lies on it, or of another the last, then what is added."""

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
    offsets,
    open_consumer,
    places_of,
)
from decoder.kafka.faults import tell
from decoder.limited_log import LimitedLog

REQUEST_MS: Final = 5_000
REVIEW_SECONDS: Final = 30.0
"""How often it is asked what the topic still holds."""
MOST_SECONDS: Final = 1.0
"""Of one reading, beyond what its caller gives it: where somebody writes without end, the caller
has else to do, or is to stop."""


class Compacted:
    """Hands every record of ``topic`` to ``take``, in the order of its partition. Partitions that
    are added while it reads are read from their beginning.

    ``lies`` is told, now and then, which offsets of a partition may still be there: of one that was
    made anew, or is gone, none. ``last`` bounds how many are read of what lies there, and in one
    reading.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        topic: Topic,
        take: Callable[[Any], None],
        lies: Callable[[int, range], None] = lambda partition, offsets: None,
        answer_ms: int = ANSWER_MS,
        last: int | None = None,
    ) -> None:
        self._last = last
        self._kafka, self._topic, self._take, self._lies = kafka, topic, take, lies
        self._answer_ms = answer_ms
        self._consumer: Any = None
        self._topic_id: Any = None
        self._places: list[Any] = []
        self._ends: dict[Any, int] = {}
        self._review_at = 0.0
        self._limited_log = LimitedLog()

    def read(self, seconds: float = 0.0) -> bool:
        """Take what has come; whether all that lay there at first has been taken.

        Args:
            seconds: how long to go on until it has, and what lies there now.

        Raises:
            KafkaError, OSError: broker or topic are away, or refuse, which is said in the log; the
                next call begins anew.
        """
        try:
            self._connect()
            if seconds:
                self._ends = self._ask(self._consumer.end_offsets)
            deadline, taken = time.monotonic() + seconds, 0
            while True:
                records = fetch(self._consumer, self._answer_ms)
                taken += len(records)
                for record in records:
                    self._take(record)
                # the client may have no position yet
                at = {place: self._consumer.position(place) or 0 for place in self._ends}
                done = all(at[place] >= end for place, end in self._ends.items())
                if done:
                    self._ends = {}  # once is enough, and a topic made anew has others
                late = time.monotonic() - deadline
                much = late >= MOST_SECONDS or (self._last is not None and taken >= self._last)
                enough = done and self._last is not None  # who reads the newest waits for no end
                if much or enough or (not records and (done or late >= 0.0)):
                    return done
        except BaseException as error:
            self.close()
            if isinstance(error, AWAY):
                tell(self._limited_log, self._topic.name, "read", error)
            raise

    def close(self) -> None:
        """Leave the broker; what is read next is read from the beginning."""
        close(self._consumer)
        self._consumer = None

    def _connect(self) -> None:
        opens = self._consumer is None
        if opens:
            self._consumer = open_consumer(
                self._kafka, f"reader-of-{self._topic.name}", request_timeout_ms=REQUEST_MS
            )
            places_of(self._consumer, self._topic.name)
        topic_id, places = layout_of(self._consumer, self._topic.name)
        if opens or (topic_id, places) != (self._topic_id, self._places):
            same = topic_id == self._topic_id
            kept = set(self._places).intersection(places) if same else set[Any]()
            for gone in set(self._places) - kept:
                self._lies(gone.partition, range(0))
            self._topic_id, self._places = topic_id, places
            self._assign(set() if opens else kept)
        elif time.monotonic() >= self._review_at:
            self._review(self._ask(self._consumer.end_offsets))

    def _assign(self, kept: Collection[Any]) -> None:
        """Read all partitions: those ``kept`` from where they were read to, others from their
        beginning, or the last records of them."""
        read_to = {place: self._consumer.position(place) for place in kept}
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

    def _ask(self, ask: Callable[..., dict[Any, int]]) -> dict[Any, int]:
        """Offsets of all partitions; one that is gone, or has no leader, would be waited for."""
        return offsets(ask, self._places, timeout_ms=REQUEST_MS)

    def _review(self, ends: dict[Any, int]) -> None:
        """Tell what lies there up to ``ends``, and begin again with what was made anew."""
        self._review_at = time.monotonic() + REVIEW_SECONDS
        begins = self._ask(self._consumer.beginning_offsets)
        for place, first in begins.items():
            anew = ends[place] < (self._consumer.position(place) or 0)
            self._lies(place.partition, range(0 if anew else first, 0 if anew else ends[place]))
            if anew:
                self._ends.pop(place, None)
                self._consumer.seek_to_beginning(place)

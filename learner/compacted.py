"""Reading a compacted topic: all that lies on it, then whatever is added."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import UnknownTopicOrPartitionError

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import Topic

ANSWER_MS: Final = 20
"""Milliseconds given to a fetch under way: the wait is not the client's, which fetches without
pause from a broker that answers empty fetches at once."""
REVIEW_SECONDS: Final = 30.0
"""How often it is asked what the topic still holds."""


class Compacted:
    """Hands every record of ``topic`` to ``take``, in the order of its partition.

    ``lies`` is told, now and then, which offsets of a partition may still be there: of one that was
    made anew, none.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        topic: Topic,
        take: Callable[[Any], None],
        lies: Callable[[int, range], None] = lambda partition, offsets: None,
    ) -> None:
        self._kafka, self._topic, self._take, self._lies = kafka, topic, take, lies
        self._consumer: Any = None
        self._places: list[TopicPartition] = []
        self._ends: dict[TopicPartition, int] = {}
        self._review_at = 0.0

    def read(self, seconds: float = 0.0) -> bool:
        """Take what has come; whether all that lay there at first has been taken.

        Args:
            seconds: how long to go on until it has.

        Raises:
            KafkaError, OSError: broker or topic are away; the next call begins anew.
        """
        try:
            self._connect()
            deadline = time.monotonic() + seconds
            while True:
                polled = self._consumer.poll(timeout_ms=ANSWER_MS)
                for records in polled.values():
                    for record in records:
                        self._take(record)
                done = all(self._consumer.position(p) >= end for p, end in self._ends.items())
                if done:
                    self._ends = {}  # once is enough, and a topic made anew has others
                if not polled and (done or time.monotonic() >= deadline):
                    return done
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the broker; what is read next is read from the beginning."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _connect(self) -> None:
        if self._consumer is None:
            self._consumer = KafkaConsumer(
                **self._kafka.client_options(),
                group_id=None,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                allow_auto_create_topics=False,
                bootstrap_timeout_ms=2_000,
                request_timeout_ms=5_000,
            )
            partitions = sorted(self._consumer.partitions_for_topic(self._topic.name) or ())
            if not partitions:
                raise UnknownTopicOrPartitionError(self._topic.name)
            self._places = [TopicPartition(self._topic.name, p) for p in partitions]
            self._consumer.assign(self._places)
            self._consumer.seek_to_beginning(*self._places)
            self._ends = self._consumer.end_offsets(self._places)
            self._review(self._ends)
        elif time.monotonic() >= self._review_at:
            self._review(self._consumer.end_offsets(self._places))

    def _review(self, ends: dict[TopicPartition, int]) -> None:
        """Tell what lies there up to ``ends``, and begin again with what was made anew."""
        self._review_at = time.monotonic() + REVIEW_SECONDS
        for place, first in self._consumer.beginning_offsets(self._places).items():
            anew = ends[place] < self._consumer.position(place)
            self._lies(place.partition, range(0 if anew else first, 0 if anew else ends[place]))
            if anew:
                self._ends.pop(place, None)
                self._consumer.seek_to_beginning(place)

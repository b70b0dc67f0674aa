"""Consumers, producers and admin clients with common addresses, security, names and timeouts."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import (
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    LeaderNotAvailableError,
    NodeNotReadyError,
    UnknownTopicOrPartitionError,
)
from kafka.net.compat import KafkaNetClient

from decoder.contracts.settings import KafkaSettings
from decoder.kafka.codec import SoundFetcher, Unreadable
from decoder.kafka.tokens import Tokens
from decoder.limited_log import LimitedLog

AWAY: Final[tuple[type[Exception], ...]] = (KafkaError, OSError)
"""Errors that a client raises while its broker is unreachable, or refuses."""
LOST: Final[tuple[type[Exception], ...]] = (
    KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError, OSError,
)  # fmt: skip
"""Those of a connection that failed or was lost. The senders and readers of events log them."""
CONNECT_MS: Final = 2_000
ANSWER_MS: Final = 20
"""Poll timeout. A reader that received nothing waits outside the client: where a broker answers an
empty fetch at once instead of holding it, the client fetches again at once, and in a worker that
thread would hold the interpreter's lock (measured: two thirds of a core)."""
METADATA_MS: Final = 30_000
"""Maximal age of a client's list of partitions. With Kafka's default of 300,000 ms, a reader misses
the records of an added partition for five minutes."""
SKIPPING_S: Final = 0.5
"""Longest time in which unreadable batches are skipped before :func:`fetch` returns."""
CLOSE_S: Final = 2.0
"""Timeout of a producer's close, for records that are not acknowledged yet."""
ADDRESS_TIMEOUT_S: Final = 5.0
"""Connection timeout of each address."""

log = logging.getLogger(__name__)
_limited_log: Final = LimitedLog()


class Network(KafkaNetClient):  # type: ignore[misc]
    """A client's connections; once closed, they hold no socket.

    kafka-python (3.0.12) leaves a socket with a half-written request open until the rest is sent,
    which never happens.
    """

    def close(self, node_id: Any = None) -> None:
        """Close the connection to one broker, or all."""
        links = [each.transport for each in list(self._manager._conns.values()) if each.transport]
        try:
            super().close(node_id)
        finally:
            for sock in (link._sock for link in links if node_id is None):
                if sock is not None:
                    sock.close()


def open_consumer(kafka: KafkaSettings, purpose: str, **options: Any) -> Any:
    """A consumer without a group: it commits nothing and creates no topic. The broker sees its
    ``purpose``; ``options`` of kafka-python replace the defaults here.

    Raises:
        KafkaError, OSError: the broker is unreachable.
    """
    defaults = {
        "group_id": None,
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "allow_auto_create_topics": False,
        "bootstrap_timeout_ms": CONNECT_MS,
    }
    consumer = _open(KafkaConsumer, kafka, purpose, defaults | options)
    consumer._fetcher.__class__ = SoundFetcher  # the client offers no other way to replace it
    return consumer


def open_producer(kafka: KafkaSettings, purpose: str, **options: Any) -> Any:
    """A producer that waits for all replicas, keeps its order and survives a refused record;
    arguments and errors as :func:`open_consumer`.

    After an error that is final for one record, an idempotent producer of kafka-python (3.0.12)
    sends nothing any more. In exchange, readers must tolerate duplicates.
    """
    defaults = {
        "acks": "all",
        "enable_idempotence": False,
        "max_in_flight_requests_per_connection": 1,
        "bootstrap_timeout_ms": CONNECT_MS,
    }
    return _open(KafkaProducer, kafka, purpose, defaults | options)


def open_admin(kafka: KafkaSettings, purpose: str, timeout_ms: int) -> Any:
    """An admin client; raises as :func:`open_consumer`."""
    timeouts = {"request_timeout_ms": timeout_ms, "bootstrap_timeout_ms": timeout_ms}
    return _open(KafkaAdminClient, kafka, purpose, timeouts)


def _open(kind: Any, kafka: KafkaSettings, purpose: str, options: dict[str, Any]) -> Any:
    """Open a client; where no broker answers, close its connections.

    kafka-python leaks the thread and the sockets of such a client, and a process that retries
    during an outage would run out of both.
    """
    opened: list[Network] = []

    def connect(**config: Any) -> Network:
        opened.append(Network(**config))
        return opened[-1]

    try:
        return kind(
            **kafka.client_options(),
            **({"sasl_oauth_token_provider": Tokens(kafka)} if kafka.needs_tokens else {}),
            client_id=f"hvd-{purpose}",
            kafka_client=connect,
            **{"metadata_max_age_ms": METADATA_MS} | options,
        )
    except BaseException:
        for each in opened:
            each.close()
        raise


def close(client: Any) -> None:
    """Close a client, or None. Never raises, since the client may be the one that failed.

    Important records were acknowledged before; a producer waits ``CLOSE_S`` for others.
    """
    with contextlib.suppress(Exception):
        if isinstance(client, KafkaProducer):
            client.close(timeout=CLOSE_S)
        elif client is not None:
            client.close()


def partitions_of(consumer: Any, topic: str) -> list[TopicPartition]:
    """The partitions of ``topic``.

    Raises:
        UnknownTopicOrPartitionError: it does not exist (yet).
        KafkaError, OSError: the broker is unreachable.
    """
    return _in_order(topic, consumer.partitions_for_topic(topic))


def _in_order(topic: str, partitions: Collection[int] | None) -> list[TopicPartition]:
    if not partitions:
        raise UnknownTopicOrPartitionError(topic)
    return [TopicPartition(topic, partition) for partition in sorted(partitions)]


def layout_of(consumer: Any, topic: str) -> tuple[Any, list[TopicPartition]]:
    """Id and partitions of ``topic``, which ``consumer`` reads, from cached metadata at most
    ``METADATA_MS`` old. The id is None where brokers have none.

    Raises:
        UnknownTopicOrPartitionError: it was deleted.
    """
    # consumer.partitions_for_topic would ask for a deleted topic, without a timeout
    places = _in_order(topic, consumer._cluster.partitions_for_topic(topic))
    return consumer._cluster.topic_id(topic), places


def offsets(
    ask: Callable[..., dict[TopicPartition, int]],
    places: Collection[TopicPartition],
    **timeout: int,
) -> dict[TopicPartition, int]:
    """Offsets of the partitions ``places`` by ``ask``, a consumer's ``beginning_offsets`` or
    ``end_offsets``; raises AWAY where the broker is unreachable or a partition has no leader."""
    try:
        return ask(places, **timeout)
    except KeyError as error:  # the client (3.0.12) raises it for a partition without an answer
        raise LeaderNotAvailableError(f"of {error}") from error


def fetch(
    consumer: Any,
    answer_ms: int = ANSWER_MS,
    passed: Callable[[Unreadable], None] = lambda batch: None,
) -> list[Any]:
    """Records received within ``answer_ms``, in order within a partition.

    A batch that cannot be decompressed is skipped, logged, and given to ``passed``.

    Raises:
        KafkaError, OSError: the broker is unreachable.
    """
    began = time.monotonic()
    while True:
        try:
            polled = consumer.poll(timeout_ms=answer_ms)
            break
        except Unreadable as batch:
            consumer.seek(batch.place, batch.upto)
            _limited_log.warning(
                f"topic {batch.place.topic} holds an unreadable batch, which is skipped: %s: %r",
                batch, batch.__cause__,
            )  # fmt: skip
            passed(batch)
            if time.monotonic() - began > SKIPPING_S:
                return []
            answer_ms = max(answer_ms, ANSWER_MS)  # for the fetch that begins now
    return [record for records in polled.values() for record in records]


def log_error(limited_log: LimitedLog, topic: str, what: str, error: BaseException) -> None:
    """Log, once a minute, that ``topic`` cannot be ``what`` ("read", "written to"). Never raises.

    Lost connections are logged at DEBUG only.
    """
    if isinstance(error, LOST):
        log.debug("topic %s cannot be %s: %r", topic, what, error)
    else:
        limited_log.warning(
            f"topic {topic} cannot be {what}: %s. Check that it exists, and that this process is "
            "allowed to.",
            repr(error),
        )


def listens(kafka: KafkaSettings) -> bool:
    """Whether one of the addresses accepts connections. Checked before a client is made, which
    would try for seconds and leak its sockets."""
    for address in kafka.bootstrap_servers.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=ADDRESS_TIMEOUT_S
            ).close()
        except (OSError, ValueError):
            continue
        return True
    return False

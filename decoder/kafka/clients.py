"""Consumers, producers and admin clients, opened alike: addresses, security, names, patience."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError, LeaderNotAvailableError, UnknownTopicOrPartitionError
from kafka.net.compat import KafkaNetClient

from decoder.contracts.settings import KafkaSettings
from decoder.kafka.codec import SoundFetcher, Unreadable
from decoder.kafka.tokens import Tokens
from decoder.limited_log import LimitedLog

AWAY: Final[tuple[type[Exception], ...]] = (KafkaError, OSError)
"""What a client raises while its broker is away, or refuses."""
CONNECT_MS: Final = 2_000
ONE_AT_A_TIME: Final = {
    "enable_idempotence": False,
    "max_in_flight_requests_per_connection": 1,
}
"""Of a producer that keeps its order and lives through a refusal: an idempotent one of kafka-python
(3.0.12) sends nothing any more after an error that is final for one record, and for that its
readers must not mind a record that comes twice."""
BRIEF: Final = {
    "bootstrap_timeout_ms": 1_000,
    "max_block_ms": 200,  # what waits longer is worth less than its sender's time
    "delivery_timeout_ms": 5_000,
    "request_timeout_ms": 3_000,
}
"""Patience with what can be done without."""
ANSWER_MS: Final = 20
"""Milliseconds given to a fetch under way. A reader that found nothing waits outside the client:
where a broker answers an empty fetch at once instead of holding it, the client asks again at once,
and in a worker such a thread takes the interpreter from decoding (measured: two thirds of a
core)."""
GLANCE_MS: Final = 2
"""The same where nothing came the last time: time enough to send a fetch or to take an answer. With
none at all kafka-python (3.0.12) needs several calls for either."""

METADATA_MS: Final = 30_000
"""How old a client's list of partitions may be: in Kafka's own 300,000 ms, a reader misses what is
written to a partition that was added for five minutes."""
PASSING_S: Final = 0.5
"""Given to what cannot be unpacked before the reader has its turn."""
CLOSE_S: Final = 2.0
"""Given to a producer that is left, for what nobody waited for."""
LISTENS_S: Final = 5.0
"""Given to each address to accept a connection."""

_limited_log: Final = LimitedLog()


class Network(KafkaNetClient):  # type: ignore[misc]
    """What a client is connected by; once closed it holds no socket.

    Where a request is half written, kafka-python (3.0.12) leaves the socket open until the rest is
    sent, and then sends no more.
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
    """A consumer of no group: it takes records from nobody, commits nothing and makes no topic.

    Args:
        purpose: what it reads for; the broker sees it in the client's name.
        options: kafka-python's own, in the place of what stands here.

    Raises:
        KafkaError, OSError: the broker is away.
    """
    usual = {
        "group_id": None,
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "allow_auto_create_topics": False,
        "bootstrap_timeout_ms": CONNECT_MS,
    }
    consumer = _open(KafkaConsumer, kafka, purpose, usual | options)
    consumer._fetcher.__class__ = SoundFetcher  # the client has no other way to be given one
    return consumer


def open_producer(kafka: KafkaSettings, purpose: str, **options: Any) -> Any:
    """A producer that waits for all replicas; arguments and errors as :func:`open_consumer`."""
    usual = {"acks": "all", "bootstrap_timeout_ms": CONNECT_MS}
    return _open(KafkaProducer, kafka, purpose, usual | options)


def open_brief_producer(kafka: KafkaSettings, purpose: str) -> Any:
    """A producer for what can be done without: it gives up soon and never sends twice."""
    return open_producer(kafka, purpose, acks=1, enable_idempotence=False, **BRIEF)


def open_admin(kafka: KafkaSettings, purpose: str, timeout_ms: int) -> Any:
    """An admin client; raises as :func:`open_consumer`."""
    patience = {"request_timeout_ms": timeout_ms, "bootstrap_timeout_ms": timeout_ms}
    return _open(KafkaAdminClient, kafka, purpose, patience)


def _open(kind: Any, kafka: KafkaSettings, purpose: str, options: dict[str, Any]) -> Any:
    """Open a client; of one that finds no broker nothing is left behind.

    kafka-python leaves the thread and the sockets of such a client: in an outage a process that
    tries again would run out of both.
    """
    opened: list[Network] = []

    def connect(**config: Any) -> Network:
        opened.append(Network(**config))
        return opened[-1]

    try:
        return kind(
            **kafka.client_options(),
            **({"sasl_oauth_token_provider": Tokens(kafka)} if kafka.asks_tokens else {}),
            client_id=f"hvd-{purpose}",
            kafka_client=connect,
            **{"metadata_max_age_ms": METADATA_MS} | options,
        )
    except BaseException:
        for each in opened:
            each.close()
        raise


def close(client: Any) -> None:
    """Leave the broker; never raises, since what is closed may be what failed. None is no client.

    Everything that matters was acknowledged before: a producer waits ``CLOSE_S`` for the rest.
    """
    with contextlib.suppress(Exception):
        if isinstance(client, KafkaProducer):
            client.close(timeout=CLOSE_S)
        elif client is not None:
            client.close()


def places_of(consumer: Any, topic: str) -> list[TopicPartition]:
    """The partitions of ``topic``.

    Raises:
        UnknownTopicOrPartitionError: it is not there (yet).
        KafkaError, OSError: the broker is away.
    """
    partitions = consumer.partitions_for_topic(topic)
    if not partitions:
        raise UnknownTopicOrPartitionError(topic)
    return [TopicPartition(topic, partition) for partition in sorted(partitions)]


def layout_of(consumer: Any, topic: str) -> tuple[Any, list[TopicPartition]]:
    """Id and partitions of ``topic``, which ``consumer`` reads, by metadata that is
    ``METADATA_MS`` old at most; asks no broker. The id is None where brokers have none.

    Raises:
        UnknownTopicOrPartitionError: it is gone.
    """
    cluster = consumer._cluster  # partitions_for_topic asks for what is gone, without a time limit
    partitions = cluster.partitions_for_topic(topic)
    if not partitions:
        raise UnknownTopicOrPartitionError(topic)
    places = [TopicPartition(topic, partition) for partition in sorted(partitions)]
    return cluster.topic_id(topic), places


def offsets(
    ask: Callable[..., dict[TopicPartition, int]],
    places: Collection[TopicPartition],
    **patience: int,
) -> dict[TopicPartition, int]:
    """What a consumer's ``beginning_offsets`` or ``end_offsets`` answers for ``places``.

    Raises:
        KafkaError, OSError: the broker is away, or one of the partitions has no leader.
    """
    try:
        return ask(places, **patience)
    except KeyError as error:  # the client (3.0.12) trips over a partition without an answer
        raise LeaderNotAvailableError(f"of {error}") from error


def fetch(
    consumer: Any,
    answer_ms: int = ANSWER_MS,
    passed: Callable[[Unreadable], None] = lambda batch: None,
) -> list[Any]:
    """Records that have come, each partition's in order; none where nothing came in time.

    A batch that cannot be unpacked is passed over, said in the log, and told to ``passed``.

    Raises:
        KafkaError, OSError: the broker is away.
    """
    began = time.monotonic()
    while True:
        try:
            polled = consumer.poll(timeout_ms=answer_ms)
            break
        except Unreadable as batch:
            consumer.seek(batch.place, batch.upto)
            _limited_log.warning(
                f"topic {batch.place.topic} holds what cannot be unpacked and is passed over: "
                "%s: %r",
                batch, batch.__cause__,
            )  # fmt: skip
            passed(batch)
            if time.monotonic() - began > PASSING_S:
                return []
            answer_ms = max(answer_ms, ANSWER_MS)  # to what is asked for now
    return [record for records in polled.values() for record in records]


def listens(kafka: KafkaSettings) -> bool:
    """Whether one of the addresses accepts connections: asked before a client is made, which would
    keep trying for seconds, and leave its sockets behind.
    """
    for address in kafka.bootstrap_servers.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=LISTENS_S).close()
        except (OSError, ValueError):
            continue
        return True
    return False

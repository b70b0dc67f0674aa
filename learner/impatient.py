"""A Kafka producer for what the learner can do without: it gives up soon and never twice."""

from __future__ import annotations

from kafka import KafkaProducer

from decoder.contracts.settings import KafkaSettings


def impatient_producer(kafka: KafkaSettings, block_ms: int) -> KafkaProducer:
    """A producer that waits ``block_ms`` for the broker at most and five seconds for its answer.

    Raises:
        KafkaError, OSError: the broker is away.
    """
    return KafkaProducer(
        **kafka.client_options(),
        acks=1,
        enable_idempotence=False,
        bootstrap_timeout_ms=1_000,
        max_block_ms=block_ms,
        delivery_timeout_ms=5_000,
        request_timeout_ms=3_000,
    )

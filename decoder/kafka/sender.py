"""The telemetry producer: librdkafka, which retries without end and never blocks its caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from decoder.contracts.settings import KafkaSettings
from decoder.kafka.tokens import Tokens

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Producer

_NAMES: Final = {
    "sasl_mechanism": "sasl.mechanism",
    "sasl_plain_username": "sasl.username",
    "sasl_plain_password": "sasl.password",
    "ssl_cafile": "ssl.ca.location",
    "ssl_certfile": "ssl.certificate.location",
    "ssl_keyfile": "ssl.key.location",
    "ssl_password": "ssl.key.password",
}
"""librdkafka's names of settings that differ in more than the dots."""


def options_of(kafka: KafkaSettings) -> dict[str, Any]:
    """The options of ``kafka`` by librdkafka's names."""
    options = kafka.client_options()
    if kafka.ssl_certfile is not None:
        options.setdefault("ssl_keyfile", options["ssl_certfile"])
    named = {_NAMES.get(name, name.replace("_", ".")): value for name, value in options.items()}
    named["bootstrap.servers"] = ",".join(map(str.strip, options["bootstrap_servers"]))
    return named


def open_sender(
    kafka: KafkaSettings,
    purpose: str,
    on_error: Callable[[KafkaError], None],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Producer:
    """A producer with acks=all that retries without a time limit.

    A lost acknowledgement may duplicate a record; readers detect that by its sequence number. So
    idempotence is not needed. It takes an extra permission on some brokers, and an error that is
    final for one record can stop it for all.

    Args:
        on_error: called while polling, with errors of connections.
        options: of librdkafka; they replace the defaults here.

    Raises:
        KafkaConnectionError: a token is needed and there is none.
        KafkaException: librdkafka refuses the settings.
    """
    from confluent_kafka import Producer

    defaults: dict[str, Any] = {
        "client.id": f"hvd-{purpose}",
        "acks": "all",
        "enable.idempotence": False,
        "message.timeout.ms": 0,
        "request.timeout.ms": 10_000,
        "reconnect.backoff.max.ms": 1_000,
        "topic.metadata.refresh.interval.ms": 10_000,  # to notice a permission granted later
        "linger.ms": 0,  # records are batches already
        "compression.type": "zstd",
        "log.connection.close": False,
        "log_level": 2,  # ``on_error`` reports errors
        "error_cb": on_error,
    }
    if kafka.needs_tokens:
        tokens = Tokens(kafka)
        tokens.token()  # raises where there is none; the client would wait without a message
        defaults["oauth_cb"] = tokens.expiring_token
    return Producer({**options_of(kafka), **defaults, **options})

"""The producer of a worker's telemetry: librdkafka, which keeps retrying and never waits."""

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
"""Names of settings as librdkafka has them, where they are not the same but for the dots."""


def options_of(kafka: KafkaSettings) -> dict[str, Any]:
    """``kafka`` in librdkafka's names."""
    given = kafka.client_options()
    if kafka.ssl_certfile is not None:
        given.setdefault("ssl_keyfile", given["ssl_certfile"])
    named = {_NAMES.get(name, name.replace("_", ".")): value for name, value in given.items()}
    named["bootstrap.servers"] = ",".join(map(str.strip, given["bootstrap_servers"]))
    return named


def open_sender(
    kafka: KafkaSettings,
    purpose: str,
    troubled: Callable[[KafkaError], None],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Producer:
    """A producer that waits for all replicas, and for a broker as long as it takes.

    A record may come twice, where an acknowledgement is lost: its readers know it by its number.
    So there is no need of idempotence, which takes a right of its own on some brokers, and which
    an error that is final for one record can end for all.

    Args:
        troubled: told, while somebody polls, of what goes wrong with connections.
        options: librdkafka's own, in the place of what stands here.

    Raises:
        KafkaConnectionError: there is no token, where one is needed.
        KafkaException: librdkafka does not take the settings.
    """
    from confluent_kafka import Producer

    usual: dict[str, Any] = {
        "client.id": f"hvd-{purpose}",
        "acks": "all",
        "enable.idempotence": False,
        "message.timeout.ms": 0,
        "request.timeout.ms": 10_000,
        "reconnect.backoff.max.ms": 1_000,
        "topic.metadata.refresh.interval.ms": 10_000,  # a right that was missing is seen then
        "linger.ms": 0,  # records come whole
        "compression.type": "zstd",
        "log.connection.close": False,
        "log_level": 2,  # what goes wrong is told by ``troubled``
        "error_cb": troubled,
    }
    if kafka.asks_tokens:
        tokens = Tokens(kafka)
        tokens.token()  # else the client would wait for one, and not say why there is none
        usual["oauth_cb"] = tokens.told
    return Producer({**options_of(kafka), **usual, **options})

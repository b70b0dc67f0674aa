"""The embedded Kafka broker, for one machine.

``noida-db`` is a small binary that speaks the Kafka protocol. It saves its topics about every
second and on SIGTERM; when killed it may lose the last moments, unlike a replicated Kafka. If
``HVD_KAFKA_BOOTSTRAP_SERVERS`` names a broker, that is used instead, with the same client and
topics.
"""

from __future__ import annotations

import importlib.util
import logging
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from decoder.contracts.errors import BrokerError
from decoder.contracts.settings import KafkaSettings
from pipelines import machine
from pipelines.stack.processes import Part

START_SECONDS: Final = 120.0
REQUEST_MS: Final = 5_000
VARIABLE: Final = "HVD_KAFKA_BOOTSTRAP_SERVERS"  # if it is set, no broker is started here
EMBEDDED_LIMITS: Final = {"retention.bytes": str(8 << 20), "segment.bytes": str(1 << 20)}
"""The embedded broker keeps its topics in memory and rewrites them to disk whole, at three times
their size. Without limits 30 MB of telemetry would cost a quarter of a core."""


def local(port: int) -> KafkaSettings:
    """Settings for a broker on this machine."""
    return KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")


def broker_part(port: int, data: Path, log: Path) -> Part:
    """The embedded broker with its files in ``data``; it is ready once our topics exist.

    Raises:
        BrokerError: it is not installed.
        ProcessError: the port is taken.
    """
    from learner.topics import ensure_topics

    spec = importlib.util.find_spec("noida_db")
    if not (spec and spec.origin):
        raise BrokerError(
            "the embedded broker is not installed: run 'pip install noida-db', or set "
            f"{VARIABLE} to a Kafka you have."
        )
    # the package's own command is a wrapper that leaves this process running when terminated
    program = str(Path(spec.origin).parent / "noida-db")
    arguments = (program, "start", "--only", "kafka", "--kafka-port", str(port))

    def is_ready() -> bool:
        try:
            ensure_topics(local(port), EMBEDDED_LIMITS)
        except BrokerError:
            return False
        return True

    machine.check_free(port, f"set {VARIABLE}=127.0.0.1:{port} if that is the broker to use")
    data.mkdir(parents=True, exist_ok=True)
    return Part("broker", (*arguments, "--data-dir", str(data)), log, is_ready, START_SECONDS)


def answers(kafka: KafkaSettings) -> bool:
    """Whether a broker answers and lists its topics."""
    from decoder.kafka.clients import AWAY, listens, open_admin

    logging.getLogger("kafka").setLevel(logging.CRITICAL)  # refused connections are expected
    with suppress(*AWAY):
        if listens(kafka):
            with closing(open_admin(kafka, "stack", REQUEST_MS)) as admin:
                return admin.list_topics() is not None
    return False

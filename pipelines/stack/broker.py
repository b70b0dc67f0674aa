"""The embedded Kafka broker, for one machine; and the topics, on whatever broker there is.

``noida-db`` is a small binary that speaks the Kafka protocol. It saves its topics every second or
so, and when it is stopped; killed, it may forget the last moments, which Kafka with replicas does
not. A real cluster is used instead as soon as ``HVD_KAFKA_BOOTSTRAP_SERVERS`` names one: same
client, same topics.
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
VARIABLE: Final = "HVD_KAFKA_BOOTSTRAP_SERVERS"
"""Where the environment sets it, no broker is started here."""
EMBEDDED_LIMITS: Final = {"retention.bytes": str(8 << 20), "segment.bytes": str(1 << 20)}
"""The embedded broker holds its topics in memory and rewrites them to disk whole, three times their
size: unlimited, 30 MB of telemetry would cost it a quarter of a core."""


def local(port: int) -> KafkaSettings:
    """How to reach a broker of this machine."""
    return KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")


def broker_part(port: int, data: Path, log: Path) -> Part:
    """The embedded broker over what is kept in ``data``; it serves once our topics are there.

    Raises:
        BrokerError: it is not installed.
        ProcessError: the port is taken.
    """
    from learner.topics import make_right

    found = importlib.util.find_spec("noida_db")
    if not (found and found.origin):
        raise BrokerError(
            "the embedded broker is not installed: run 'pip install noida-db', or set "
            f"{VARIABLE} to a Kafka you have."
        )
    # the package's own command is a wrapper that leaves this running when it is told to stop
    program = str(Path(found.origin).parent / "noida-db")
    arguments = (program, "start", "--only", "kafka", "--kafka-port", str(port))

    def is_ready() -> bool:
        try:
            make_right(local(port), EMBEDDED_LIMITS)
        except BrokerError:
            return False
        return True

    machine.check_free(port, f"set {VARIABLE}=127.0.0.1:{port} if that is the broker to use")
    data.mkdir(parents=True, exist_ok=True)
    return Part("broker", (*arguments, "--data-dir", str(data)), log, is_ready, START_SECONDS)


def answers(kafka: KafkaSettings) -> bool:
    """Whether a broker is there and lists its topics."""
    from decoder.kafka.clients import AWAY, listens, open_admin

    logging.getLogger("kafka").setLevel(logging.CRITICAL)  # refused connections are expected here
    with suppress(*AWAY):
        if listens(kafka):
            with closing(open_admin(kafka, "stack", REQUEST_MS)) as admin:
                return admin.list_topics() is not None
    return False

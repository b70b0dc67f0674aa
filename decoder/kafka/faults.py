"""Logging of errors of Kafka clients."""

from __future__ import annotations

import logging
from typing import Final

from kafka.errors import KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError

from decoder.limited_log import LimitedLog

log = logging.getLogger(__name__)

UNREACHED: Final[tuple[type[Exception], ...]] = (
    KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError, OSError,
)  # fmt: skip
"""Errors of a connection that failed or was lost. The senders and readers of events log them."""


def tell(limited_log: LimitedLog, topic: str, what: str, error: BaseException) -> None:
    """Log, once a minute, that ``topic`` cannot be ``what`` ("read", "written to"). Never raises.

    Connection errors are logged at DEBUG only.
    """
    if isinstance(error, UNREACHED):
        log.debug("topic %s cannot be %s: %r", topic, what, error)
    else:
        limited_log.warning(
            f"topic {topic} cannot be {what}: %s. Check that it exists, and that this process is "
            "allowed to.",
            repr(error),
        )

"""What is said of a broker that answers and refuses."""

from __future__ import annotations

import logging
from typing import Final

from kafka.errors import KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError

from decoder.limited_log import LimitedLog

log = logging.getLogger(__name__)

UNREACHED: Final[tuple[type[Exception], ...]] = (
    KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError, OSError,
)  # fmt: skip
"""No connection came about, or it was lost: whoever sends or reads events says so aloud."""


def tell(limited_log: LimitedLog, topic: str, what: str, error: BaseException) -> None:
    """Say, once a minute, that ``topic`` cannot be ``what``: read, or written to. Never raises."""
    if isinstance(error, UNREACHED):
        log.debug("topic %s cannot be %s: %r", topic, what, error)
    else:
        limited_log.warning(
            f"topic {topic} cannot be {what}: %s. See that it is there, and that this process is "
            "allowed to.",
            repr(error),
        )

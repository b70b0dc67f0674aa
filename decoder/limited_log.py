"""Logging: each kind of fault at most once a minute, passwords masked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from decoder.contracts.masking import masked

log = logging.getLogger(__name__)

INTERVAL_S: Final = 60.0
"""A fault in every step would fill a disk with a hundred tracebacks a second."""


class LimitedLog:
    """Logs each message at most once a minute, with the number of those suppressed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def exception(self, message: str, *args: object) -> None:
        """Log the exception being handled, under a ``message`` that names its kind."""
        self._log(message, args, traceback=True)

    def warning(self, message: str, *args: object) -> None:
        """Log ``message``, a format string that names its kind; ``args`` hold what varies."""
        self._log(message, args, traceback=False)

    def _log(self, message: str, args: tuple[object, ...], traceback: bool) -> None:
        now = self._clock()
        if now - self._logged_at.get(message, -INTERVAL_S) < INTERVAL_S:
            self._suppressed[message] = self._suppressed.get(message, 0) + 1
            return
        self._logged_at[message] = now
        suppressed = self._suppressed.pop(message, 0)
        note = f" ({suppressed} more since the last line)" if suppressed else ""
        log.log(logging.ERROR if traceback else logging.WARNING, message + "%s", *args, note,
                exc_info=traceback)  # fmt: skip


class TextLines(logging.Formatter):
    """Lines for people; passwords in addresses are masked."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the exception if any."""
        return masked(super().format(record))

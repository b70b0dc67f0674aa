"""Faults as the log tells them: each kind at most once a minute, with how many it stands for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

PAUSE_S: Final = 60.0
"""A fault of every step would fill a disk with one traceback a hundred times a second."""


class Complaints:
    """Logs the exception being handled, unless its kind was logged within the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def exception(self, what: str, *details: object) -> None:
        """Log the exception being handled under ``what``, one sentence that names its kind."""
        self._say(what, details, traceback=True)

    def warning(self, what: str, *details: object) -> None:
        """Log ``what``, a sentence that names its kind. What differs from one time to the next are
        ``details``, for which it has places as a log line has.
        """
        self._say(what, details, traceback=False)

    def _say(self, what: str, details: tuple[object, ...], traceback: bool) -> None:
        now = self._clock()
        if now - self._last.get(what, -PAUSE_S) < PAUSE_S:
            self._held[what] = self._held.get(what, 0) + 1
            return
        self._last[what] = now
        held = self._held.pop(what, 0)
        since = f" ({held} more since this was last said)" if held else ""
        log.log(logging.ERROR if traceback else logging.WARNING, what + "%s", *details, since,
                exc_info=traceback)  # fmt: skip

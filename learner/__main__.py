"""``python -m learner``: run the learner until SIGINT or SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import Literal

from decoder.contracts.errors import HvdError
from decoder.contracts.settings import KafkaSettings
from decoder.limited_log import TextLines
from learner.log_lines import JsonLines
from learner.settings import LearnerSettings


def main(
    run: Callable[[LearnerSettings, KafkaSettings, threading.Event], None] | None = None,
) -> int:
    """Exit status: 0 after a clean stop, 2 for settings that are not valid."""
    if run is None:
        from learner import loop  # late: an intake trains nothing, and torch and river take 330 MB

        run = loop.run
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = LearnerSettings.load()
        _log(settings.log)
        run(settings, KafkaSettings.load(), stop)
    except HvdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _log(form: Literal["text", "json"]) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("kafka").setLevel(logging.ERROR)  # its selector warns of every pause


if __name__ == "__main__":
    sys.exit(main())

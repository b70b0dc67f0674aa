"""One JSON object a line of the learner's log, with the message's arguments as fields.

``scope %s: version %d published`` has the fields ``scope`` and ``version`` beside the message. A
log collector can follow a policy from the learner to the workers by them. No line holds text of a
request; the names in it are pseudonyms.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from pythonjsonlogger.json import JsonFormatter

from decoder.contracts.masking import masked

FIELDS: Final = frozenset({"scope", "version", "number", "term", "request", "partition"})
_ARGUMENTS: Final = re.compile(r"(?:(\w+) )?%[-+#0 ]*\d*(?:\.\d+)?[sdrfg]")


class JsonLines(JsonFormatter):
    """Time, level, logger and message of each record, its fields, and its exception if any."""

    def __init__(self) -> None:
        super().__init__(
            "{asctime}{levelname}{name}{process}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        )

    def format(self, record: logging.LogRecord) -> str:
        """The line; passwords in addresses are masked."""
        return masked(super().format(record))

    def add_fields(
        self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]
    ) -> None:
        """Add the arguments that the message names. Mutates ``log_data``."""
        super().add_fields(log_data, record, message_dict)
        names = _ARGUMENTS.findall(record.msg) if isinstance(record.msg, str) else []
        given = record.args if isinstance(record.args, tuple) else ()
        if len(names) == len(given):
            fields = zip(names, given, strict=True)
            log_data.update({name: value for name, value in fields if name in FIELDS})

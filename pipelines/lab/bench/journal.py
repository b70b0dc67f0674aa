"""The file that a benchmark keeps its results in: settings on the first line, then a record a line.

A line is appended as soon as something is measured, so that an interrupted run has lost nothing and
the next one goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decoder.contracts.errors import SettingsError

Record = dict[str, Any]


class Journal:
    """A file of one run; ``problems`` says which of its lines could not be read."""

    def __init__(
        self,
        path: Path,
        contract: str,
        settings: Record,
        take: Callable[[Record], object],
        fresh: bool = False,
    ) -> None:
        """Read what ``path`` holds, unless ``fresh``: then it is deleted.

        Args:
            contract: names the format.
            settings: what two runs must share to be one, JSON-ready.
            take: is given each record that is there; what raises on it is a problem.

        Raises:
            SettingsError: it was measured with other settings, is something else, or cannot be
                written.
        """
        self.path, self.problems = path, list[str]()
        self.began = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fresh:
                path.unlink(missing_ok=True)
            with path.open("a+", encoding="utf-8", errors="replace") as stream:
                stream.seek(0)
                text = stream.read()
                if text and not text.endswith("\n"):
                    stream.write("\n")  # the last line was cut off by an interruption
        except OSError as error:
            raise SettingsError(f"results cannot be kept in {path}: {error}.") from error
        self._head: Record | None = {"contract": contract, "began": self.began}
        self._head["settings"] = json.loads(json.dumps(settings))
        head, *lines = text.splitlines() or [""]
        if head:
            self._open(head, self._head)
            self._head = None
        for number, line in enumerate(lines, start=2):
            try:
                if line.strip():
                    take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                self.problems.append(f"{path}:{number} skipped: the line was not written whole.")

    def add(self, record: Record) -> None:
        """Append ``record``, below the settings if it is the first.

        Raises:
            SettingsError: it cannot be written.
        """
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                for each in filter(None, (self._head, record)):
                    stream.write(json.dumps(each, separators=(",", ":")) + "\n")
        except OSError as error:
            raise SettingsError(f"results cannot be kept in {self.path}: {error}.") from error
        self._head = None

    def _open(self, line: str, mine: Record) -> None:
        try:
            head = json.loads(line)
            if head["contract"] != mine["contract"]:
                raise ValueError(head["contract"])
            old, new, self.began = dict(head["settings"]), mine["settings"], str(head["began"])
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"{self.path} is not a results file of this benchmark: delete it, or name another."
            ) from error
        if differing := sorted(k for k in {*old, *new} if old.get(k) != new.get(k)):
            raise SettingsError(
                f"{self.path} holds a run with another {', '.join(differing)}: name another "
                "place, or start anew with --fresh."
            )

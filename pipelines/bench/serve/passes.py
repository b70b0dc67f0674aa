"""What servers did, and the file that keeps it while a benchmark runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from decoder.contracts.errors import SettingsError
from pipelines.bench.serve.counters import Counters
from pipelines.bench.serve.load import Reply
from pipelines.bench.stats import over
from pipelines.reports import write_text


@dataclass(frozen=True)
class Level:
    """What one server did at one concurrency; ``counters`` and ``cpu_s`` grew during it."""

    concurrency: int
    wall_s: float
    replies: tuple[Reply, ...]
    counters: Counters
    cpu_s: float | None = None

    @property
    def answered(self) -> list[Reply]:
        """The replies that did not fail."""
        return [r for r in self.replies if not r.error]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(r.tokens) for r in self.replies)

    @property
    def rate(self) -> float:
        """Output tokens a second, all requests together, from the first one's sending to the last
        answer's end."""
        return self.tokens / self.wall_s

    @property
    def per_cpu_s(self) -> float | None:
        """Tokens for each second of processor time."""
        return over(self.tokens, self.cpu_s)


@dataclass(frozen=True)
class ServerRun:
    """One start of one server; ``policy`` is what the hybrid decided by, else empty."""

    round: int
    setup: str
    startup_s: float
    levels: tuple[Level, ...]
    policy: str = ""


_RUN: Final = TypeAdapter(ServerRun)


@dataclass(frozen=True)
class Journal:
    """A file with the setting on its first line and one finished server on each further line."""

    path: Path
    setting: dict[str, Any]

    def read(self) -> list[ServerRun]:
        """What is there.

        Raises:
            SettingsError: the file belongs to another setting, or is damaged.
        """
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        runs = []
        for number, line in enumerate(lines, 1):
            try:
                if number == 1:
                    self._compare(json.loads(line))
                else:
                    runs.append(_RUN.validate_json(line))
            except ValueError as error:  # JSON's and pydantic's errors are ValueErrors
                raise SettingsError(
                    f"{self.path}:{number} is not a measured server: delete the file, or choose "
                    "another --json."
                ) from error
        return runs

    def add(self, run: ServerRun) -> None:
        """Append one server.

        Raises:
            SettingsError: the file cannot be written.
        """
        kept = self.read()
        lines = [json.dumps(self.setting), *(_RUN.dump_json(r).decode() for r in [*kept, run])]
        write_text("\n".join(lines) + "\n", self.path)

    def _compare(self, other: dict[str, Any]) -> None:
        differing = [k for k, v in self.setting.items() if other.get(k) != v]
        if differing:
            raise SettingsError(
                f"{self.path} was measured in another setting ({', '.join(differing)} differ): "
                "choose another --json, or delete it."
            )

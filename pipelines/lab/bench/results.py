"""What ``hvd bench decode`` keeps of each measured prompt, in a file: settings on the first line,
then a prompt a line.

A line is appended as soon as something is measured, so that an interrupted run has lost nothing and
the next one goes on from there.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from decoder.contracts.errors import SettingsError

KEPT: Final = "hvd.bench.decode.prompts.v3"


class Cycle(NamedTuple):
    """One decoding cycle, as the engine's ``CycleRecord``: lengths in tokens, times in µs."""

    arm: str
    cache_len: int
    verified: int
    accepted: int
    draft_us: float
    verify_us: float


class Labelled(NamedTuple):
    """A draft: what was predicted of it and what became of it, at least so where ``censored``."""

    predicted: float
    accepted: int
    censored: bool = False


class Key(NamedTuple):
    """Names a measured prompt within a run; ``prompt`` is its id."""

    dataset: str
    template: str
    prompt: str


@dataclass(frozen=True)
class Outcome:
    """A prompt decoded by one method. The first token comes with the prefill, before any cycle.

    ``decode_us`` runs from the end of the prefill to the last token. ``drafts`` are all cache
    drafts that were proposed, chosen or not; ``model_drafts`` those that were verified.
    """

    method: str
    tokens: tuple[int, ...]
    cycles: tuple[Cycle, ...]
    prefill_us: float
    decode_us: float
    drafts: tuple[Labelled, ...] = ()
    model_drafts: tuple[Labelled, ...] = ()

    @property
    def decoded(self) -> int:
        """Tokens that the cycles committed: all but the first."""
        return max(0, len(self.tokens) - 1)

    @property
    def spent(self) -> tuple[float, float]:
        """Decoded tokens and their microseconds."""
        return self.decoded, self.decode_us


@dataclass(frozen=True)
class Measured:
    """A prompt and what every method made of it; ``cut`` of its tokens were left out of its
    middle."""

    key: Key
    family: str
    tokens: int
    cut: int
    outcomes: dict[str, Outcome]


_MEASURED: Final = TypeAdapter(Measured)


class Results:
    """Everything known of a run; prompts in its order, each whole."""

    def __init__(
        self, settings: dict[str, Any], path: Path | None = None, fresh: bool = False
    ) -> None:
        """Go on with what ``path`` holds, unless ``fresh``: then it is deleted; without one nothing
        is kept.

        Args:
            settings: what two runs must share to be one, JSON-ready.

        Raises:
            SettingsError: it was measured with other settings, is something else, or cannot be
                written.
        """
        self.settings, self.path = settings, path
        self.prompts: dict[Key, Measured] = {}
        self.problems: list[str] = []
        self.interrupted = self.out_of_time = False
        self.began = datetime.now(UTC).isoformat(timespec="seconds")
        self._append("", fresh)
        head, *lines = self._text().splitlines() or [""]
        self._is_new = not head
        if head:
            self._open(head)
        for number, line in enumerate(lines, start=2):
            try:
                if line.strip():
                    found = _MEASURED.validate_json(line)
                    self.prompts[found.key] = found
            except ValueError:
                self.problem(f"{path}:{number} skipped: the line was not written whole.")

    def add(self, measured: Measured) -> None:
        """Take in a prompt and keep it, below the settings if it is the first.

        Raises:
            SettingsError: it cannot be written.
        """
        self.prompts[measured.key] = measured
        head = {"contract": KEPT, "began": self.began, "settings": self.settings}
        line = _MEASURED.dump_json(measured).decode() + "\n"
        self._append((json.dumps(head) + "\n") * self._is_new + line)
        self._is_new = False

    def problem(self, sentence: str) -> None:
        """Take in what went wrong, once."""
        if sentence not in self.problems:
            self.problems.append(sentence)

    def _text(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="replace") if self.path else ""

    def _append(self, text: str, fresh: bool = False) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if fresh:
                self.path.unlink(missing_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                if not text and (before := self._text()) and not before.endswith("\n"):
                    text = "\n"  # the last line was cut off by an interruption
                stream.write(text)
        except OSError as error:
            raise SettingsError(f"results cannot be kept in {self.path}: {error}.") from error

    def _open(self, line: str) -> None:
        try:
            head = json.loads(line)
            if head["contract"] != KEPT:
                raise ValueError(head["contract"])
            old, self.began = dict(head["settings"]), str(head["began"])
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"{self.path} is not a results file of this benchmark: delete it, or name another."
            ) from error
        new = json.loads(json.dumps(self.settings))
        if differing := sorted(k for k in {*old, *new} if old.get(k) != new.get(k)):
            raise SettingsError(
                f"{self.path} holds a run with another {', '.join(differing)}: name another "
                "place, or start anew with --fresh."
            )

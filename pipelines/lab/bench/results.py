"""What ``hvd bench decode`` keeps of each measured prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from pipelines.lab.bench.journal import Journal, Record

KEPT: Final = "hvd.bench.decode.prompts.v2"


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
    standin_for: str
    tokens: int
    cut: int
    outcomes: dict[str, Outcome]


_MEASURED: Final = TypeAdapter(Measured)


class Results:
    """Everything known of a run; prompts in its order, each whole."""

    def __init__(
        self, settings: dict[str, Any], path: Path | None = None, fresh: bool = False
    ) -> None:
        """Go on with what ``path`` holds, unless ``fresh``; without one nothing is kept.

        Raises:
            SettingsError: see :class:`Journal`.
        """
        self.settings = settings
        self.prompts: dict[Key, Measured] = {}
        self.problems: list[str] = []
        self.interrupted = self.out_of_time = False
        self._journal = path and Journal(path, KEPT, settings, self._take, fresh)
        self.began = self._journal.began if self._journal else ""
        self.problems += self._journal.problems if self._journal else []

    def add(self, measured: Measured) -> None:
        """Take in a prompt and keep it."""
        self.prompts[measured.key] = measured
        if self._journal:
            self._journal.add(_MEASURED.dump_python(measured, mode="json"))

    def problem(self, sentence: str) -> None:
        """Take in what went wrong, once."""
        if sentence not in self.problems:
            self.problems.append(sentence)

    def _take(self, record: Record) -> None:
        found = _MEASURED.validate_python(record)
        self.prompts[found.key] = found

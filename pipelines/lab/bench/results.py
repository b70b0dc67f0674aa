"""What ``hvd bench decode`` knows of each measured prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple


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
    prompt: str


@dataclass(frozen=True)
class Outcome:
    """A prompt decoded by one method. The first token comes with the prefill, before any cycle.

    ``decode_us`` runs from the end of the prefill to the last token. ``drafts`` are all cache
    drafts that were proposed, chosen or not.
    """

    method: str
    tokens: tuple[int, ...]
    cycles: tuple[Cycle, ...]
    prefill_us: float
    decode_us: float
    drafts: tuple[Labelled, ...] = ()

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


@dataclass
class Results:
    """Everything known of a run; prompts in its order, each whole. ``settings`` are JSON-ready."""

    settings: dict[str, Any]
    prompts: dict[Key, Measured] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False
    out_of_time: bool = False
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def problem(self, sentence: str) -> None:
        """Take in what went wrong, once. Mutates."""
        if sentence not in self.problems:
            self.problems.append(sentence)

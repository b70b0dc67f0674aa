"""What ``hvd bench decode`` keeps of each measured prompt and each generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from decoder.policy.rule import ARMS
from pipelines.bench.journal import Journal, Record

CONTRACT: Final = "hvd.bench.decode.v1"


@dataclass(frozen=True, slots=True)
class Cycle:
    """One decoding cycle, as the engine's ``CycleRecord``: lengths in tokens, times in µs."""

    arm: str
    cache_len: int
    verified: int
    accepted: int
    draft_us: float
    verify_us: float


@dataclass(frozen=True, slots=True)
class Labelled:
    """A draft: what was predicted of it and what became of it.

    ``accepted`` is a lower bound where ``censored``.
    """

    predicted: float
    accepted: int
    censored: bool


class Key(NamedTuple):
    """Names a measured prompt within a run; ``prompt`` is its id."""

    dataset: str
    template: str
    prompt: str


@dataclass(frozen=True)
class Outcome:
    """One prompt decoded by one method. The first token comes with the prefill, before any cycle.

    ``decode_us`` runs from the end of the prefill to the last token. ``drafts`` are all cache
    drafts that were proposed, chosen or not; ``model_drafts`` those that were verified.
    """

    key: Key
    method: str
    tokens: tuple[int, ...]
    cycles: tuple[Cycle, ...]
    finish: str
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
class PromptFacts:
    """A measured prompt: lengths in tokens, ``cut`` of those left out of its middle."""

    key: Key
    family: str
    standin_for: str
    tokens: int
    cut: int


@dataclass
class Results:
    """Everything known of a run. ``outcomes`` is by prompt and then by method, in run order."""

    settings: dict[str, Any]
    began: str = ""
    prompts: dict[Key, PromptFacts] = field(default_factory=dict)
    outcomes: dict[Key, dict[str, Outcome]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False
    out_of_time: bool = False

    def add(self, outcome: Outcome) -> None:
        """Take in one generation; the last of a prompt and a method counts. Mutates the results."""
        self.outcomes.setdefault(outcome.key, {})[outcome.method] = outcome

    def whole(self) -> dict[Key, dict[str, Outcome]]:
        """Prompts that every method of the run has decoded: comparisons are over these."""
        wanted = set(self.settings["methods"])
        return {k: v for k, v in self.outcomes.items() if wanted <= set(v) and k in self.prompts}


class Store:
    """Results, and the journal that they are kept in."""

    def __init__(self, path: Path, settings: dict[str, Any], fresh: bool = False) -> None:
        """Go on with what ``path`` holds, unless ``fresh``.

        Raises:
            SettingsError: see :class:`Journal`.
        """
        self.results = Results(settings)
        self._journal = Journal(path, CONTRACT, settings, self._take, fresh)
        self.results.began = self._journal.began
        self.results.problems += self._journal.problems

    def prompt(self, facts: PromptFacts) -> None:
        """Keep a measured prompt."""
        self.results.prompts[facts.key] = facts
        self._journal.add({"kind": "prompt", **_flat(facts)})

    def outcome(self, outcome: Outcome) -> None:
        """Keep a generation."""
        self.results.add(outcome)
        record = {"kind": "generation", **_flat(outcome)}
        record["cycles"] = [
            [ARMS.index(c.arm), c.cache_len, c.verified, c.accepted, c.draft_us, c.verify_us]
            for c in outcome.cycles
        ]
        for name in ("drafts", "model_drafts"):
            record[name] = [[d.predicted, d.accepted, d.censored] for d in record[name]]
        self._journal.add(record)

    def problem(self, sentence: str) -> None:
        """Keep what went wrong, once."""
        if sentence not in self.results.problems:
            self.results.problems.append(sentence)
            self._journal.add({"kind": "problem", "sentence": sentence})

    def _take(self, record: Record) -> None:
        kind = record.pop("kind")
        if kind == "problem":
            self.results.problems.append(record["sentence"])
            return
        record["key"] = key = Key(*(record.pop(name) for name in Key._fields))
        if kind == "prompt":
            record.pop("structure", None)  # files of version 0.2 have it
            self.results.prompts[key] = PromptFacts(**record)
        elif kind == "generation":
            record["tokens"] = tuple(record["tokens"])
            record["cycles"] = tuple(Cycle(ARMS[arm], *rest) for arm, *rest in record["cycles"])
            for name in ("drafts", "model_drafts"):
                record[name] = tuple(Labelled(*row) for row in record.get(name, ()))
            self.results.add(Outcome(**record))


def _flat(kept: PromptFacts | Outcome) -> Record:
    record = dict(vars(kept))
    return {**record.pop("key")._asdict(), **record}

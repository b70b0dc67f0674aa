"""What a run keeps: one JSON line for its settings, each prompt and each generation.

Lines are appended as soon as a prompt is done, so that an interrupted run has lost nothing and the
next one goes on from there. A line written twice counts as its last version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import SettingsError
from decoder.policy.rule import ARMS

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


Key = tuple[str, str, str]
"""Dataset, template, prompt id."""


@dataclass(frozen=True)
class Outcome:
    """One prompt decoded by one method. The first token comes with the prefill, before any cycle.

    ``decode_us`` runs from the end of the prefill to the last token. ``drafts`` are all cache
    drafts that were proposed, chosen or not; ``model_drafts`` those that were verified.
    """

    dataset: str
    template: str
    prompt: str
    method: str
    tokens: tuple[int, ...]
    cycles: tuple[Cycle, ...]
    finish: str
    prefill_us: float
    decode_us: float
    drafts: tuple[Labelled, ...] = ()
    model_drafts: tuple[Labelled, ...] = ()

    @property
    def key(self) -> Key:
        """The prompt this belongs to."""
        return self.dataset, self.template, self.prompt

    @property
    def decoded(self) -> int:
        """Tokens that the cycles committed: all but the first."""
        return max(0, len(self.tokens) - 1)


@dataclass(frozen=True)
class PromptFacts:
    """A measured prompt: what it belongs to and how it is built (see ``structure``)."""

    dataset: str
    template: str
    prompt: str
    family: str
    standin_for: str
    tokens: int
    cut: int
    structure: Mapping[str, float]

    @property
    def key(self) -> Key:
        """Identity within a run."""
        return self.dataset, self.template, self.prompt


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
        """Take in one generation. Mutates the results."""
        self.outcomes.setdefault(outcome.key, {})[outcome.method] = outcome

    def whole(self) -> dict[Key, dict[str, Outcome]]:
        """Prompts that every method of the run has decoded: comparisons are over these."""
        wanted = set(self.settings["methods"])
        return {k: v for k, v in self.outcomes.items() if wanted <= set(v) and k in self.prompts}


def _line(kind: str, record: Mapping[str, Any]) -> str:
    return json.dumps({"kind": kind, **record}, separators=(",", ":")) + "\n"


def _outcome_record(outcome: Outcome) -> dict[str, Any]:
    record = {f.name: getattr(outcome, f.name) for f in fields(outcome)}
    record["cycles"] = [
        [ARMS.index(c.arm), c.cache_len, c.verified, c.accepted, c.draft_us, c.verify_us]
        for c in outcome.cycles
    ]
    for name in ("drafts", "model_drafts"):
        drafts = getattr(outcome, name)
        record[name] = [[d.predicted, d.accepted, d.censored] for d in drafts]
    return record


def _outcome(record: dict[str, Any]) -> Outcome:
    cycles = (Cycle(ARMS[arm], *rest) for arm, *rest in record.pop("cycles"))
    drafts, model_drafts = (
        tuple(Labelled(*row) for row in record.pop(name, ())) for name in ("drafts", "model_drafts")
    )
    tokens = tuple(record.pop("tokens"))
    return Outcome(
        **record, tokens=tokens, cycles=tuple(cycles), drafts=drafts, model_drafts=model_drafts
    )


class Store:
    """The file that a run's lines go to."""

    def __init__(
        self, path: Path, settings: dict[str, Any], began: str = "", fresh: bool = False
    ) -> None:
        """Open ``path``, going on with what is there unless ``fresh``.

        Args:
            settings: what two runs must share to be one, JSON-ready.
            began: date and time for the record of a new run.

        Raises:
            SettingsError: what is there was measured with other settings, or cannot be read.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fresh:
                path.unlink(missing_ok=True)
            kept = read(path) if path.exists() and path.stat().st_size else None
            if kept is not None and not path.read_bytes().endswith(b"\n"):
                with path.open("a", encoding="utf-8") as stream:
                    stream.write("\n")  # the last line was cut off by an interruption
        except OSError as error:
            raise SettingsError(f"results cannot be kept in {path}: {error}.") from error
        self.results = kept or Results(settings, began)
        if kept is None:
            self._append("run", {"contract": CONTRACT, "began": began, "settings": settings})
        elif kept.settings != settings:
            old = kept.settings
            differing = sorted(k for k in {*old, *settings} if old.get(k) != settings.get(k))
            raise SettingsError(
                f"{path} holds a run with another {', '.join(differing)}: name another folder with "
                "--out, or start it anew with --fresh."
            )

    def prompt(self, facts: PromptFacts) -> None:
        """Keep a measured prompt."""
        self.results.prompts[facts.key] = facts
        self._append("prompt", asdict(facts))

    def outcome(self, outcome: Outcome) -> None:
        """Keep a generation."""
        self.results.add(outcome)
        self._append("generation", _outcome_record(outcome))

    def problem(self, sentence: str) -> None:
        """Keep what went wrong, once."""
        if sentence not in self.results.problems:
            self.results.problems.append(sentence)
            self._append("problem", {"sentence": sentence})

    def _append(self, kind: str, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(_line(kind, record))


def read(path: Path) -> Results:
    """Everything that ``path`` holds; a line that cannot be read is a problem, not an error.

    Raises:
        SettingsError: it does not begin as a results file does.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        head = json.loads(lines[0])
        if head["kind"] != "run" or head["contract"] != CONTRACT:
            raise ValueError(head.get("contract"))
        results = Results(dict(head["settings"]), str(head["began"]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SettingsError(f"{path} is not a results file of 'hvd bench decode'.") from error
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            _take(results, json.loads(line))
        except (ValueError, KeyError, TypeError, IndexError):
            results.problems.append(f"{path}:{number} skipped: the line was not written whole.")
    return results


def _take(results: Results, record: dict[str, Any]) -> None:
    kind = record.pop("kind")
    if kind == "generation":
        results.add(_outcome(record))
    elif kind == "prompt":
        facts = PromptFacts(**record)
        results.prompts[facts.key] = facts
    elif kind == "problem":
        results.problems.append(record["sentence"])

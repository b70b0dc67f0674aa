"""The whole of ``hvd drift``: every policy on every scenario and seed, kept as it goes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from decoder.settings import WorkerSettings
from pipelines.drift import oracle
from pipelines.drift.columns import Columns
from pipelines.drift.learning import Learning
from pipelines.drift.measure import Run, figures
from pipelines.drift.results import Results, key_of
from pipelines.drift.scenario import Scenario, Segment
from pipelines.drift.stream import Conditions, Decoded, decode
from pipelines.drift.traffic import KINDS, Library, Traffic, traffic
from pipelines.progress import Step
from pipelines.replay.bundles import digest_of
from pipelines.replay.traces import Trace, read, tokenizer_digest

CONTEXT: Final = 8_192
"""Tokens that a prompt and its output may have: what is longer is mostly prompt to be indexed."""


@dataclass(frozen=True)
class Plan:
    """What to run. ``scale`` multiplies generations, those that are trained on included."""

    scenarios: Sequence[Scenario]
    seeds: Sequence[int]
    policies: Sequence[str]
    scale: float = 1.0


class Recordings:
    """Trace files of a folder, read when a scenario first asks for them."""

    def __init__(self, folder: Path, tokenizer: Any, token_classes: FloatArray, step: Step) -> None:
        """Look into ``folder``.

        Raises:
            TraceError: it holds no trace files.
        """
        self._paths = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
        if not self._paths:
            raise TraceError(f"no trace files (*.jsonl) in {folder}.")
        self._tokenizer, self._classes, self._step = tokenizer, token_classes, step
        self._read: dict[str, list[Trace]] = {}
        self.notices: list[str] = []

    def library(self, scenario: Scenario, model_len: int) -> Library:
        """Everything that ``scenario`` may ask for."""
        segments: list[Segment] = [scenario.known, *scenario.segments]
        kinds = {kind for segment in segments for kind in segment.kinds}
        stems = {stem for kind in kinds for stem in KINDS.get(kind, [kind])}
        return Library(
            {stem: self._traces(stem) for stem in sorted(stems & self._paths.keys())},
            self._classes,
            model_len,
        )

    def has(self, kind: str) -> bool:
        """Whether there is a file of ``kind``."""
        return not self._paths.keys().isdisjoint(KINDS.get(kind, [kind]))

    def _traces(self, stem: str) -> list[Trace]:
        if stem not in self._read:
            path = self._paths[stem]
            reading = read(
                path,
                self._tokenizer,
                CONTEXT,
                lambda done, whole: self._step(f"reading {path.name}", done, whole),
            )
            self.notices += [notice.text for notice in reading.notices if notice.reason != "long"]
            self._read[stem] = reading.traces
        return self._read[stem]

    @cached_property
    def digest(self) -> str:
        """Of the files' names and sizes and the tokenizer: a line added makes another study."""
        names = [f"{stem}:{path.stat().st_size}" for stem, path in self._paths.items()]
        text = "\n".join([*names, tokenizer_digest(self._tokenizer)])
        return hashlib.sha256(text.encode()).hexdigest()


class Study:
    """Runs a plan on recordings.

    Attributes:
        found: figures of the scenarios and seeds that are done.
        notices: scenarios left out, and why.
    """

    def __init__(
        self, plan: Plan, recordings: Recordings, results: Results[Run], first: Policy, step: Step
    ) -> None:
        self.found: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self._plan, self._recordings, self._results = plan, recordings, results
        self._first, self._step = first, step
        self._settings = WorkerSettings.load()
        self._first_digest = digest_of(first)

    def run(self) -> None:
        """Run what is not kept yet. Sets torch to one thread in this process."""
        torch.set_num_threads(1)
        plan = self._plan
        whole = len(plan.scenarios) * len(plan.seeds) * len(plan.policies)
        done = 0
        for each in plan.scenarios:
            scenario = each.scaled(plan.scale)
            for seed in plan.seeds:
                try:
                    self._one(scenario, seed, done, whole)
                except TraceError as error:
                    self.notices.append(f"scenario {scenario.name}, seed {seed}: left out, {error}")
                done += len(plan.policies)

    def _one(self, scenario: Scenario, seed: int, done: int, whole: int) -> None:
        library = self._recordings.library(scenario, self._settings.model_draft_tokens)
        sent = traffic(scenario, library, seed)
        columns = Columns(scenario, library, seed, self._settings, self._first, self._plan.scale)
        runs: dict[str, Run] = {}
        for place, name in enumerate(self._plan.policies):
            self._step(f"{scenario.name}, seed {seed}: {name}", done + place, whole)
            key = key_of(
                scenario.model_dump_json(),
                f"{seed} {self._plan.scale}",
                name,
                self._recordings.digest,
                self._settings.model_dump_json(include=SHAPING),
                self._first_digest if name in ("first", "adaptive") else "",
            )
            run = self._results.get(key)
            if run is None:
                run = ran(name, scenario, sent, columns, library)
                self._results.put(key, run)
            runs[name] = run
        self.found.append(figures(scenario, seed, sent, runs))


SHAPING: Final = {
    "model_draft_tokens", "suffix_max_depth", "suffix_max_draft", "suffix_max_factor",
    "suffix_max_offset", "suffix_min_prob",
}  # fmt: skip
"""Settings of a worker that a run depends on."""


def ran(name: str, scenario: Scenario, sent: Traffic, columns: Columns, library: Library) -> Run:
    """One policy on all requests of a scenario."""
    conditions = [Conditions(s.machine.costs, s.concurrency) for s in scenario.segments]
    if name == "oracle":
        return _kept(oracle.foresee(sent.requests, conditions, columns.settings))
    column = columns.column(name)
    learning = Learning.begun(column.policy) if column.learns else None
    decoded = decode(
        sent.requests,
        conditions,
        column.policy,
        column.worker,
        library.token_classes,
        learning.told if learning is not None else None,
    )
    return _kept(decoded, learning)


def _kept(decoded: Decoded, learning: Learning | None = None) -> Run:
    run = Run(
        decoded.tokens.tolist(),
        [round(us, 1) for us in decoded.us.tolist()],
        decoded.arms.sum(axis=0).tolist(),
    )
    if learning is None:
        return run
    return replace(run, alarms=learning.alarms, promotions=learning.promotions)

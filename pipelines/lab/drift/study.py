"""The whole of ``hvd drift``: every policy on every scenario and seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import TraceError
from decoder.core.payoff.token_classes import token_classes_of
from decoder.settings import WorkerSettings
from pipelines import machine
from pipelines.lab.drift.columns import LEARNS, Columns
from pipelines.lab.drift.measure import figures
from pipelines.lab.drift.scenario import Scenario
from pipelines.lab.drift.stream import Learning, Run, decode, foresee
from pipelines.lab.drift.traffic import KINDS, Library, traffic
from pipelines.lab.replay.traces import Trace, files_of, read
from pipelines.progress import Step

CONTEXT: Final = 8_192
"""Tokens that a prompt and its output may have: what is longer is mostly prompt to be indexed."""


class Recordings:
    """Trace files of a folder, read when a scenario first asks for them."""

    def __init__(self, traces: Path, tokenizer: Any, step: Step) -> None:
        """Look into ``traces``.

        Raises:
            TraceError: there are no trace files.
        """
        self._paths = {path.stem: path for path in files_of([traces])}
        self._tokenizer, self._step = tokenizer, step
        self._classes = token_classes_of(tokenizer)
        self._read: dict[str, list[Trace]] = {}
        self.notices: list[str] = []

    def library(self, scenario: Scenario, model_len: int) -> Library:
        """Everything that ``scenario`` may ask for."""
        kinds = {kind for each in (scenario.known, *scenario.segments) for kind in each.kinds}
        stems = {stem for kind in kinds for stem in KINDS.get(kind, [kind])}
        sets = {stem: self._traces(stem) for stem in sorted(stems & self._paths.keys())}
        return Library(sets, self._classes, model_len)

    def has(self, kind: str) -> bool:
        """Whether there is a file of ``kind``."""
        return not self._paths.keys().isdisjoint(KINDS.get(kind, [kind]))

    def _traces(self, stem: str) -> list[Trace]:
        if stem not in self._read:
            path = self._paths[stem]
            told = partial(self._step, f"reading {path.name}")
            reading = read(path, self._tokenizer, CONTEXT, told)
            self.notices += reading.notices
            self._read[stem] = reading.traces
        return self._read[stem]


def study(
    scenarios: Sequence[Scenario], seeds: Sequence[int], policies: Sequence[str],
    recordings: Recordings, first: Policy, step: Step,
) -> dict[str, Any]:  # fmt: skip
    """The figures, plain JSON; a scenario that cannot be run is a notice. Sets torch to one thread.

    Raises:
        TraceError: not one can be run.
    """
    torch.set_num_threads(1)
    found, notices = list[dict[str, Any]](), list[str]()
    pairs = list(itertools.product(scenarios, seeds))
    for done, (scenario, seed) in enumerate(pairs):
        name = f"scenario {scenario.name}, seed {seed}"
        told = partial(step, name, done, len(pairs))
        try:
            found.append(_one(scenario, seed, policies, recordings, first, told))
        except TraceError as error:
            notices.append(f"{name}: left out, {error}")
    if not found:
        raise TraceError(f"nothing was measured: {notices[-1]}")
    settings = {"seeds": list(seeds), "policies": list(policies), "machine": machine.description()}
    notices = [*recordings.notices, *notices]
    return {"scenarios": found, "settings": settings, "notices": notices}


def _one(
    scenario: Scenario, seed: int, policies: Sequence[str], recordings: Recordings, first: Policy,
    told: Callable[[], None],
) -> dict[str, Any]:  # fmt: skip
    settings = WorkerSettings.load()
    library = recordings.library(scenario, settings.model_draft_tokens)
    sent, costs = traffic(scenario, library, seed), [s.machine.costs for s in scenario.segments]
    columns, runs = Columns(scenario, library, seed, settings, first), dict[str, Run]()
    for name in policies:
        told()
        if name == "oracle":
            runs[name] = foresee(sent.requests, costs, columns.served)
            continue
        policy, worker = columns.column(name)
        learning = Learning.begun(policy) if name == LEARNS else None
        run = decode(
            sent.requests, costs, policy, worker, library.token_classes,
            learning.told if learning else None,
        )  # fmt: skip
        if learning:
            run = replace(run, alarms=learning.alarms, promotions=learning.promotions)
        runs[name] = run
    return figures(scenario, seed, sent, runs)

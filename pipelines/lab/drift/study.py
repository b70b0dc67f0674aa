"""The whole of ``hvd drift``: every policy on every scenario and seed.

===============  ==================================================================  =======
name             policy                                                              learns
===============  ==================================================================  =======
frozen           all features, survival by the rate rule, and what a worker adapts   no
first            the policy that any scope begins with                               no
adaptive         ``first``, with the learner                                         yes
payoff           the same, and what it trains is the paper's network                 yes
river-linear     an online linear regression of river                                itself
river-tree       a Hoeffding tree of river                                           itself
refit            as ``frozen``, trained on other traffic like that since the change  no
===============  ==================================================================  =======

``frozen`` was trained on the traffic before the change.

And how often the detector speaks where nothing changes: one kind of text is decoded once by the
first policy, and what its drafts told comes again and again, sessions drawn with replacement, each
under a name of its own, a few side by side, into the learner's own scope. Networks, challengers and
detector do all their work. A session drawn twice is known to the network that remembers it, which
favours the slow one, and so fewer alarms.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import SettingsError, TraceError
from decoder.core.payoff.token_classes import token_classes_of
from decoder.settings import WorkerSettings
from learner.training.rows import Rows
from pipelines import machine
from pipelines.lab.bench.methods import words
from pipelines.lab.drift.measure import LEARNS, figures
from pipelines.lab.drift.stream import Learning, Run, Worker, decode
from pipelines.lab.drift.traffic import (
    KINDS,
    SIDE_BY_SIDE,
    Library,
    Request,
    Scenario,
    Segment,
    lessons,
    traffic,
)
from pipelines.lab.replay.regressions import RIVALS
from pipelines.lab.replay.study import learned, taught
from pipelines.lab.replay.traces import files_of, read
from pipelines.replay.engine import Simulator, Trace
from pipelines.reports import Step

PAYOFF: Final = "payoff"
NAMES: Final = ("frozen", "first", "adaptive", PAYOFF, *RIVALS, "refit")
KNOWN: Final = 100
"""Generations that were there to train on before the change."""
OTHERS: Final = 200
"""Generations like those after the change that a refit is trained on."""


def named(policies: str) -> list[str]:
    """The policies between the commas, in the order of :data:`NAMES`; of none all.

    Raises:
        SettingsError: there is no such policy.
    """
    wanted = words(policies) or NAMES
    if unknown := sorted(set(wanted) - set(NAMES)):
        raise SettingsError(f"no policy {unknown[0]!r}: there are {', '.join(NAMES)}.")
    return [name for name in NAMES if name in wanted]


@dataclass(frozen=True)
class Columns:
    """The policies of one scenario and seed, each trained when it is asked for."""

    scenario: Scenario
    library: Library
    seed: int
    settings: WorkerSettings
    first: Policy

    @property
    def served(self) -> WorkerSettings:
        """Settings of the workers that serve."""
        factor = self.scenario.factor
        return self.settings.model_copy(update={"suffix_max_factor": factor} if factor else {})

    def column(self, name: str) -> tuple[Policy, Worker]:
        """The policy called ``name``, and how it is served.

        Raises:
            TraceError: there is too little to train it on.
        """
        ours = Worker(self.served)
        if name == "frozen":
            return self._survival(self._known(), self.settings), ours
        if name == "refit":
            traces = lessons(self.scenario.later, self.library, self.seed, OTHERS)
            return self._survival(traces, self.served), ours
        if name in RIVALS:
            return RIVALS[name].policy, replace(ours, rule=RIVALS[name].rule)
        return self.first, ours

    def _known(self) -> list[Trace]:
        return lessons([self.scenario.known], self.library, self.seed, KNOWN)

    def _survival(self, traces: Sequence[Trace], settings: WorkerSettings) -> Policy:
        simulator = Simulator(self.library.token_classes, settings)
        return learned(taught(simulator, traces), "drift")


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
        policy, worker = columns.column(name)
        learning = None
        if name in (LEARNS, PAYOFF):
            learning = Learning(policy, kind="payoff" if name == PAYOFF else "survival")
        served = learning.scope.champion if learning else policy
        run = decode(
            sent.requests, costs, served, worker, library.token_classes,
            learning.told if learning else None, learning.interleaver if learning else None,
        )  # fmt: skip
        if learning:
            run = replace(
                run, alarms=learning.alarms, promotions=learning.promotions,
                returns=learning.returns, comparisons=learning.ended,
            )  # fmt: skip
        runs[name] = run
    return figures(scenario, seed, sent, runs)


ALIKE: Final = 1_000
"""Generations of a kind, half from each side of the recordings: there are hardly more."""
LENGTH: Final = 250_000
"""Rows of a stream."""

ALARMS: Final = ("cache", "model")
"""Kinds of drafts of which the learner raises them."""

Sessions = Sequence[Sequence[Rows]]
"""Of each session the drafts of its requests, in their order."""


def sessions_of(kind: str, recordings: Recordings, first: Policy) -> Sessions:
    """What ``first`` meets on text of ``kind``.

    Raises:
        TraceError: there is none.
    """
    segment, settings = Segment(kinds=(kind,), generations=ALIKE // 2), WorkerSettings.load()
    scenario = Scenario(name="stationary", segments=(segment,))
    library = recordings.library(scenario, settings.model_draft_tokens)
    requests = traffic(scenario, library, 0).requests
    requests += [Request(trace, 0) for trace in lessons([segment], library, 0, ALIKE // 2)]
    found: dict[str, list[Rows]] = {}

    def told(index: int, rows: Rows) -> None:
        if len(rows):
            found.setdefault(requests[index].trace.session, []).append(rows)

    costs = [segment.machine.costs]
    decode(requests, costs, first, Worker(settings), library.token_classes, told)
    return list(found.values())


def resampled(sessions: Sessions, draw: np.random.Generator) -> Iterator[Rows]:
    """Requests without an end, as those of ``SIDE_BY_SIDE`` users whose sessions are drawn anew."""
    under_way: deque[Iterator[Rows]] = deque()
    while True:
        while len(under_way) < SIDE_BY_SIDE:
            under_way.append(iter(_renamed(sessions[int(draw.integers(len(sessions)))], draw)))
        session = under_way.popleft()
        request = next(session, None)
        if request is not None:
            yield request
            under_way.append(session)


def _renamed(session: Sequence[Rows], draw: np.random.Generator) -> list[Rows]:
    name, *requests = draw.integers(0, 2**64, 1 + len(session), np.uint64)
    return [
        replace(rows, session=np.full(len(rows), name), request=np.full(len(rows), request))
        for rows, request in zip(session, requests, strict=True)
    ]


def stream(
    kind: str, seed: int, sessions: Sessions, first: Policy, length: int, step: Step
) -> dict[str, Any]:
    """Feed at least ``length`` rows of ``sessions`` to a new scope; who wins is served.

    Returns:
        plain JSON: rows, alarms by kind of draft, and the learner's processor time a row in
        microseconds.
    """
    learning = Learning(first, "off")
    requests = resampled(sessions, np.random.default_rng([seed, len(sessions)]))
    done, spent, index = 0, 0.0, 0
    while done < length:
        rows = next(requests)
        began = time.process_time()
        learning.told(index, rows)
        spent += time.process_time() - began
        done, index = done + len(rows), index + 1
        step(f"rows of {kind}", done, length)
    return {
        "kind": kind,
        "seed": seed,
        "rows": done,
        **{arm: learning.scope.alarms[arm] for arm in ALARMS},
        "promotions": len(learning.promotions),
        "us_a_row": 1e6 * spent / done,
    }


def false_alarms(rows: int, recordings: Recordings, first: Policy, step: Step) -> dict[str, Any]:
    """Figures, plain JSON, of about ``rows`` rows in streams of ``LENGTH``, of each kind of text
    that is here in turn. Sets torch to one thread.

    Raises:
        TraceError: there are no recordings of any kind.
    """
    torch.set_num_threads(1)
    here = [kind for kind in KINDS if recordings.has(kind)]
    if not here:
        raise TraceError("no recordings of any kind are here: name a folder with --traces.")
    streams, found = -(-rows // LENGTH), list[dict[str, Any]]()
    for place, kind in enumerate(here[:streams]):
        step(f"decoding {kind}", 0, 1)
        held = sessions_of(kind, recordings, first)
        for seed in range(len(range(place, streams, len(here)))):
            found.append(stream(kind, seed, held, first, LENGTH, step))
    whole = sum(each["rows"] for each in found)
    alarms = {arm: sum(each[arm] for each in found) for arm in ALARMS}
    return {
        "rows": whole,
        "alarms": alarms,
        "per_ten_million": 1e7 * sum(alarms.values()) / whole,
        "us_a_row": sum(each["us_a_row"] * each["rows"] for each in found) / whole,
        "streams": found,
        "machine": machine.description(),
    }

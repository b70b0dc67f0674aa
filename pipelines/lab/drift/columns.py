"""The policies that are compared: each one's making, and how it is served.

===============  ==================================================================  =======
name             policy                                                              learns
===============  ==================================================================  =======
frozen           all features, survival by the rate rule, and what a worker adapts   no
counting         counted score against a threshold of 2: what a new scope had        no
first            the policy that any scope begins with                               no
adaptive         ``first``, with the learner                                         yes
refit            as ``frozen``, trained on other traffic like that since the change  no
oracle           hindsight
===============  ==================================================================  =======

``frozen`` was trained on the traffic before the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.contracts.errors import SettingsError
from decoder.settings import WHOLE_FACTOR, WorkerSettings
from pipelines.lab.bench.options import words
from pipelines.lab.drift.scenario import Scenario
from pipelines.lab.drift.stream import Worker
from pipelines.lab.drift.traffic import Library, lessons
from pipelines.lab.replay import training
from pipelines.lab.replay.engine import Simulator
from pipelines.lab.replay.traces import Trace

NAMES: Final = ("frozen", "counting", "first", "adaptive", "refit", "oracle")
LEARNS: Final = "adaptive"
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
        """The policy called ``name``, but for the oracle, which is none; and how it is served.

        Raises:
            TraceError: there is too little to train it on.
        """
        ours = Worker(self.served)
        if name == "frozen":
            return self._survival(self._known(), self.settings), ours
        if name == "counting":
            factor = {"suffix_max_factor": min(self.served.suffix_max_factor, WHOLE_FACTOR)}
            return frequency_policy("drift"), Worker(self.served.model_copy(update=factor))
        if name == "refit":
            traces = lessons(self.scenario.later, self.library, self.seed, OTHERS)
            return self._survival(traces, self.served), ours
        return self.first, ours

    def _known(self) -> list[Trace]:
        return lessons([self.scenario.known], self.library, self.seed, KNOWN)

    def _survival(self, traces: Sequence[Trace], settings: WorkerSettings) -> Policy:
        simulator = Simulator(self.library.token_classes, settings)
        return training.survival(training.taught(simulator, traces), "drift")

"""How far a first policy falls short of one that knows the text, and what it is worth at first.

On sessions of a set, decoded one request after another as a new deployment would: the first policy,
trained without that set; a refit, trained on other sessions of the very set; and counting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from rich.table import Table

from decoder.contracts.bundle import Policy
from decoder.engines.reference.method import Drafting
from pipelines.lab.first.make import SEED, Sample, counting, fit, rows_of, with_drafter, without
from pipelines.lab.replay.engine import Simulator, hybrid
from pipelines.lab.replay.split import some_sessions, split
from pipelines.lab.replay.traces import Trace
from pipelines.lab.replay.training import EPOCHS, teachers
from pipelines.progress import Step

REFIT: Final = 200
"""Generations that a refit learns from, or as many as the training side has."""
TESTED: Final = 200
"""Generations decoded, in whole sessions."""
EARLY: Final = 50
"""Requests in which a new scope has learned nothing yet."""
TRAINED: Final = 0.6
"""Share of the sessions that a refit learns from."""
TRAINED_ON: Final = 500
"""Outputs of each set that another tokenizer is trained on."""


@dataclass(frozen=True)
class Compared:
    """Rates on one set, tokens in the time of a plain step under nominal costs.

    ``early`` are those of the first :data:`EARLY` requests.
    """

    name: str
    generations: int
    left_out: bool  # of what the first policy was trained on; else it was never in it
    rates: dict[str, float]
    early: dict[str, float]

    @property
    def of_refit(self) -> float:
        """The first policy's rate over the refit's."""
        return self.rates["first"] / self.rates["refit"]

    @property
    def over_counting(self) -> float:
        """The first policy's rate over counting's, in the first requests of a new scope."""
        return self.early["first"] / self.early["counting"]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"of_refit": self.of_refit, "over_counting": self.over_counting}


def compare(
    name: str, traces: Sequence[Trace], first: Policy, left_out: bool, simulator: Simulator,
    accepts: float,
) -> Compared:  # fmt: skip
    """Decode test sessions of ``traces`` by the first policy, by a refit and by counting.

    Args:
        accepts: mean accepted length of model drafts where none was recorded; 0 for no drafter.

    Raises:
        TraceError: the set's other sessions are too few to refit on.
    """
    parts = split(traces, TRAINED, warm_up=0.0)
    drafter = accepts, accepts
    model: Drafting = "chain" if accepts else "none"
    by = [replace(teacher, model=model) for teacher in teachers()]
    refit = fit(rows_of(some_sessions(parts.train, REFIT), simulator, drafter, by), EPOCHS)
    tested, k = some_sessions(parts.test, TESTED), simulator.settings.model_draft_tokens
    asked = with_drafter(tested, drafter, k, SEED)
    compared = {"first": hybrid("first", first), "refit": hybrid("refit", refit),
                "counting": counting()}  # fmt: skip
    cycles = {
        each: simulator.decode(asked, replace(by, model=model))[0] for each, by in compared.items()
    }
    rates = {each: c.tally().rate for each, c in cycles.items()}
    early = {each: c.before(EARLY).tally().rate for each, c in cycles.items()}
    return Compared(name, len(asked), left_out, rates, early)


def check(
    policy: Policy, sets: Mapping[str, Sequence[Trace]], samples: Sequence[Sample],
    simulator: Simulator, accepts: float, step: Step,
) -> list[Compared]:  # fmt: skip
    """Compare a first policy with refits and with counting on every one of ``sets``: one that it
    was made of with a policy of the other ``samples``.

    Raises:
        TraceError: a set holds too little.
    """
    inside, found = {each.name for each in samples}, []
    for done, (name, traces) in enumerate(sets.items()):
        step(f"comparing on {name}", done, len(sets))
        first = without(samples, name) if name in inside else policy
        found.append(compare(name, traces, first, name in inside, simulator, accepts))
    return found


def own_tokenizer(known: Any, sets: Mapping[str, Sequence[Trace]], size: int) -> Any:
    """A tokenizer of ``size`` entries like ``known``, trained on outputs of ``sets``."""
    texts = (known.decode(trace.output) for each in sets.values() for trace in each[:TRAINED_ON])
    return known.train_new_from_iterator(texts, size, show_progress=False)


def figures(found: Sequence[Compared], **settings: Any) -> dict[str, Any]:
    """All figures of a check. JSON-ready."""
    made: dict[str, Any] = {"sets": [c.as_dict() for c in found], "settings": settings}
    for name in ("of_refit", "over_counting"):
        values = [getattr(c, name) for c in found]
        made[name] = {"mean": float(np.mean(values)), "least": min(values)}
    return made


def table(found: Sequence[Compared]) -> Table:
    """A check's figures, a row a set."""
    shown = Table(caption="Tokens in the time of a plain step, nominal costs. Early: 50 requests.")
    shown.add_column("set", overflow="fold", min_width=12)
    for heading in ("requests", "refit", "first", "of refit", "early", "over counting"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for c in found:
        rates = (c.rates["refit"], c.rates["first"], c.of_refit, c.early["first"], c.over_counting)
        shown.add_row(c.name, str(c.generations), *(f"{rate:.3f}" for rate in rates))
    means = figures(found)
    of_refit, over = (f"{means[name]['mean']:.3f}" for name in ("of_refit", "over_counting"))
    shown.add_row("mean", "", "", "", of_refit, "", over)
    return shown

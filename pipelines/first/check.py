"""How far a first policy falls short of one that knows the text, and what it is worth at first.

On sessions of a set, decoded one request after another as a new deployment would: the first policy,
trained without that set; a refit, trained on other sessions of the very set; and counting.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from decoder.contracts.bundle import Policy
from decoder.engines.reference.method import Drafting
from pipelines.first.make import SEED, counting, fit, rows_of, with_drafter
from pipelines.first.sets import TraceSet
from pipelines.replay.engine import Simulator, hybrid
from pipelines.replay.split import Shares, some_sessions, split
from pipelines.replay.training import EPOCHS, teachers

REFIT: Final = 200
"""Generations that a refit learns from, or as many as the training side has."""
TESTED: Final = 200
"""Generations decoded, in whole sessions."""
EARLY: Final = 50
"""Requests in which a new scope has learned nothing yet."""
SHARES: Final = Shares(train=0.6, warm_up=0.0)


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
    found: TraceSet, first: Policy, left_out: bool, simulator: Simulator, accepts: float
) -> Compared:
    """Decode test sessions of ``found`` by the first policy, by a refit and by counting.

    Args:
        accepts: mean accepted length of model drafts where none was recorded; 0 for no drafter.

    Raises:
        TraceError: the set's other sessions are too few to refit on.
    """
    parts = split(found.traces, SHARES)
    drafter = accepts, accepts
    model: Drafting = "chain" if accepts else "none"
    by = [replace(teacher, model=model) for teacher in teachers()]
    refit = fit(rows_of(some_sessions(parts.train, REFIT), simulator, drafter, by), EPOCHS)
    tested, k = some_sessions(parts.test, TESTED), simulator.settings.model_draft_tokens
    asked = with_drafter(tested, drafter, k, SEED)
    compared = {"first": hybrid("first", first), "refit": hybrid("refit", refit),
                "counting": counting()}  # fmt: skip
    cycles = {
        name: simulator.decode(asked, replace(each, model=model))[0]
        for name, each in compared.items()
    }
    return Compared(
        found.name,
        len(asked),
        left_out,
        {name: c.tally().rate for name, c in cycles.items()},
        {name: c.before(EARLY).tally().rate for name, c in cycles.items()},
    )

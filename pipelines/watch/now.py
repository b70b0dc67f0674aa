"""What a running service comes to, in four sentences: its worth, what is in force and why, what was
learned, what is wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

from decoder.contracts.bundle import FIRST
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.trial.effect import FEWEST
from pipelines.watch.ledger import LEARNED, Ledger
from pipelines.watch.uplift import ALL, NAMES, as_text, compared, is_bounded, uplifts

Sentence = dict[str, Any]
"""``text``, and where one link tells more its ``label`` and ``href``."""

SILENT_S: Final = 15.0
"""A status comes each second: whoever sends none for so long is away, or has ended."""
CLOSE: Final = 0.05
"""Half the width, as a share, at which an interval is narrow enough to stop waiting for."""


def sentences(ledger: Ledger, registry: str = "") -> list[Sentence]:
    """The four, of the worker seen last and its learner; ``registry`` is MLflow's address, if it
    has one."""
    worker = ledger.statuses[-1] if ledger.statuses else None
    learner = ledger.learner[-1] if ledger.learner else None
    trouble = "; ".join(_troubles(ledger, worker, learner))
    link = {"label": "the registry", "href": registry} if registry else {}
    return [
        {"text": _worth(ledger)},
        {"text": _in_force(ledger, worker)},
        {"text": _learned(learner), **link},
        {"text": f"Wrong now: {trouble}." if trouble else "Nothing is wrong."},
    ]


def _worth(ledger: Ledger) -> str:
    rounds = [r for r in list(ledger.rounds) if r.scope == ledger.scope]
    side = compared(rounds)[0]
    one = uplifts(rounds, ())[ALL][side]
    if not one.pairs:
        return f"What it is worth beside {NAMES[side]} cannot be told yet: no pair was played."
    spent = (rounds[-1].time - rounds[0].time) / 60.0
    if not is_bounded(one):
        more = spent / max(one.pairs - 1, 1) * (FEWEST - one.pairs)
        return f"What it is worth cannot be told yet: about {_minutes(more)} more of such traffic."
    told = f"It makes {as_text(one)} times the tokens a second of {NAMES[side]}"
    if not one.low <= 1.0 <= one.high:
        return f"{told}."
    # an interval shrinks as the root of what it rests on grows
    half = math.log(one.high / one.low) / 2.0
    more = spent * ((half / max(abs(math.log(one.ratio)), CLOSE)) ** 2 - 1.0)
    return f"{told}: whether it is faster cannot be told yet, about {_minutes(more)} more."


def _minutes(many: float) -> str:
    return f"{max(1, math.ceil(many))} minute{'s' if many > 1.0 else ''}"


def _in_force(ledger: Ledger, worker: WorkerStatus | None) -> str:
    if worker is None:
        return "No worker has said anything yet."
    since = ""
    if worker.policy_applied_at:
        since = f" since {datetime.fromtimestamp(worker.policy_applied_at):%H:%M:%S}"
    kept = [p.policy for p in ledger.published if p.policy]
    origin = {p.version: str(p.provenance.get("origin", "")) for p in kept}
    made = {LEARNED: "made by the learner", "person": "promoted by a person"}
    named = f"Policy version {worker.policy_version}"
    if not worker.publication or worker.policy_role == FIRST:
        named = "The policy that ships"
    elif said := made.get(origin.get(worker.policy_version, "")):
        named += f", {said},"
    if worker.fallback:
        return f"{named} is in force{since}, but '{worker.fallback}' decides: it is faster now."
    return f"{named} decides{since}."


def _learned(learner: LearnerStatus | None) -> str:
    if learner is None:
        return "No learner has said anything yet."
    told = (
        f"The learner took in {learner.events_consumed} events, tried {learner.candidates} "
        f"candidates and promoted {learner.promotions}"
    )
    return f"{told}; {learner.rollout_said}." if learner.rollout_said else f"{told}."


def _troubles(
    ledger: Ledger, worker: WorkerStatus | None, learner: LearnerStatus | None
) -> Iterator[str]:
    now = time.time()
    for name, last in (("worker", worker), ("learner", learner)):
        if last is None or now - last.time > SILENT_S:
            quiet = "" if last is None else f" for {now - last.time:.0f} seconds"
            yield f"the {name} has said nothing{quiet}"
    if worker is not None:
        if worker.faults:
            faults = f"{worker.faults} faults of the worker"
            yield f"{faults}, which decoded plainly in those steps: see its log"
        lost = {**worker.drops, **worker.events_refused, "left at its end": worker.events_failed}
        if told := ", ".join(f"{count} {why}" for why, count in lost.items() if count):
            yield f"events of the worker are lost ({told})"
    if learner is not None:
        if learner.registry_away_since:
            yield "the registry does not answer: nothing is registered or promoted meanwhile"
        if learner.faults:
            yield f"{learner.faults} records could not be learned from: see the learner's log"
        if told := ", ".join(f"{count} {why}" for why, count in learner.given_up.items() if count):
            yield f"registrations and moves were given up ({told})"
    if ledger.refused:
        yield f"{ledger.refused} records could not be read"

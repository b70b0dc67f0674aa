"""Records for tests: events and statuses with the fields that matter set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from decoder.contracts.bundle import CHAMPION, frequency_policy
from decoder.contracts.events import EventBatch, Origin, decode_batch
from decoder.contracts.features import NUM_FEATURES
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.trials import Block, Round
from pipelines.watch.ledger import Ledger, Phase
from tests.events import DraftEvent, encode_events

WORKER = "worker-under-test"
SCOPE = "0123456789abcdef"
ORIGIN = Origin(SCOPE, WORKER, "1f" * 8)
FASTER = {CHAMPION: 60.0, "plain": 40.0, "suffix": 55.0, "first": 60.0}
EVENTS = 480


def event(number: int, time: float, **changes: Any) -> DraftEvent:
    fields: dict[str, Any] = {"number": number, "time": time, "cycle": number, "position": number}
    fields |= {"request": "0" * 24, "tenant": "", "session": "", "choice": 0, "workload": "edits"}
    fields |= {"policy_version": 1, "publication": 1, "role": "champion"}
    fields |= {"side": "", "round": None}
    fields |= {"parameter": 2.0, "parameter_name": "threshold"}
    fields |= {"predicted": 3.0, "predicted_model": 1.0, "arm": "cache", "model_accepted": None}
    fields |= {"draft_len": 8, "drafted_len": 8, "verified_len": 8, "accepted": 5}
    fields |= {"label": "verified", "censored": "", "batch_size": 1, "step_tokens": 9}
    fields |= {"draft_us": 50.0, "step_us": 40_000.0, "share": 1.0}
    fields["features"] = np.zeros(NUM_FEATURES, np.float32)
    return DraftEvent(**fields | changes)


def worker_status(time: float, tokens: int, **changes: Any) -> WorkerStatus:
    return WorkerStatus(process=WORKER, scope=SCOPE, time=time, tokens=tokens, **changes)


def learner_status(time: float, consumed: int, **changes: Any) -> LearnerStatus:
    said = {"process": "learner", "scope": SCOPE, "events_consumed": consumed, **changes}
    return LearnerStatus(time=time, **said)


def batch(events: list[DraftEvent], origin: Origin = ORIGIN) -> EventBatch:
    """``events`` as they come off the topic."""
    return decode_batch(encode_events(events, origin, 0))


def rounds(count: int, began: float, every: float, rates: dict[str, float]) -> list[Round]:
    """Rounds ``every`` so many seconds in which each side makes about ``rates`` tokens a second."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        blocks = []
        for side, rate in rates.items():
            tokens = max(1, round(rate * (1.0 + 0.05 * rng.standard_normal())))
            numbers: dict[str, Any] = {"steps": 32, "requests": 3, "tokens": tokens}
            blocks.append(Block(side=side, us=1e6, cost_us=1e6, **numbers))
        facts = {"scope": SCOPE, "worker": WORKER, "life": ORIGIN.life, "number": number}
        facts["unit"] = round(10 * (began + every * (number + 1)))
        made.append(Round(time=began + every * (number + 1), blocks=tuple(blocks), **facts))
    return made


def recorded(
    lost: int = 0, faults: int = 0, version: int = 2, phase: str = "agentic", **rates: float
) -> Ledger:
    """Two minutes of a run; so many events were never learned from."""
    ledger = Ledger(WORKER)
    for second in range(121):
        status = {"events_made": 4 * second, "faults": faults, "policy_version": 1}
        if second >= 60:
            status |= {"policy_version": version, "policy_applied_at": 1060}
        ledger.add_status(worker_status(1000.0 + second, 30 * second, **status))
        ledger.add_status(learner_status(1000.0 + second, min(4 * second, EVENTS - lost)))
    arms = ("cache", "cache", "cache", "none")
    for i in range(EVENTS):
        served = {"policy_version": version, "predicted": 4.5} if i >= EVENTS // 2 else {}
        ledger.add_drafts(batch([event(i, 1000.0 + i / 4, arm=arms[i % 4], **served)]))
    start = replace(frequency_policy(SCOPE), version=1)
    ledger.add_policy(999.0, SCOPE, CHAMPION, start)
    learned = replace(start, version=2, provenance={"origin": "learner"})
    ledger.add_policy(1059.0, SCOPE, CHAMPION, learned)
    for one in rounds(60, 1000.0, 2.0, rates or FASTER):
        ledger.add_round(one)
    first = Phase(phase, ("edits", "tools"), phase, 1000.0, 1060.0)
    second = Phase("conversation", ("chat", "code"), "conversation", 1060.0, 1120.0)
    ledger.phases = [first, second]
    return ledger

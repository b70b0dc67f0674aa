"""What a worker decided by, what replay makes of the same text, and what the learner reads of the
worker's events are one, bit for bit: else a policy is learned for another place than its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.events import DECIMALS, DraftEvent, Origin, decode_batch
from decoder.core.guards.floor import Floor
from decoder.engines.reference.buckets import RuleLog
from decoder.engines.reference.recording import record
from decoder.engines.reference.session import Session
from decoder.policy.first import first_policy
from decoder.policy.rule import ARMS
from learner.rows import COLUMNS, Rows, from_batch, from_events, joined
from pipelines.lab.replay.engine import Simulator, hybrid
from pipelines.lab.replay.traces import Trace
from tests.engines.tiny import tiny_engine, tiny_prompt
from tests.pipelines.lab.replay.samples import token_classes

OF_THE_RUN = ("request", "session", "time", "step_us")
"""Columns that hold names and the clock."""
BY = hybrid("hybrid", first_policy("scope"))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The records of what a session's router writes into its ring, as a carrier makes them."""
    records: list[bytes] = []

    def put(log: RuleLog, rows: np.ndarray) -> None:
        assert log.ring is not None
        records.append(log.ring.record(rows, Origin("scope", "worker", "1f"), len(records)))

    monkeypatch.setattr(RuleLog, "put", put)
    return records


def in_order(events: Sequence[DraftEvent]) -> list[DraftEvent]:
    """Requests one after the other, by number of cycle."""
    began = list(dict.fromkeys(event.request for event in events))
    return sorted(events, key=lambda event: (began.index(event.request), event.cycle))


def differing(mine: Rows, other: Rows) -> list[str]:
    """Columns of which a bit differs."""
    told = [name for name in COLUMNS if name not in OF_THE_RUN]
    return [n for n in told if getattr(mine, n).tobytes() != getattr(other, n).tobytes()]


def test_a_served_run_its_replay_and_the_learners_rows_are_one(sent: list[bytes]) -> None:
    engine = tiny_engine(0)
    engine.token_classes = token_classes()
    session = Session(engine, BY, floor=Floor(True))
    session.router.pause = None  # it weighs this machine's clock
    traces = []
    # the first stops inside a model draft; the last three have outputs of others to copy from
    for seed, end in ((3, 4), (0, -1), (1, -1), (2, -1), (0, 5), (1, 5), (2, 5)):
        prompt = tiny_prompt(seed)
        output = session.generate(prompt, 60, stop_ids=frozenset({end})).tokens
        found = record(engine, prompt, output)
        traces.append(Trace(f"s{seed}", prompt, output, allowed=60, model_accepted=found))
    batches = [decode_batch(value) for value in sent]
    told = in_order([event for batch in batches for event in batch.events])
    assert (told[0].arm, told[0].model_accepted) == ("model", None)
    served, learned = from_events(session.sink), joined([from_batch(batch) for batch in batches])
    rounded = served.features.astype(np.float64).round(DECIMALS).astype(np.float32)
    assert differing(replace(served, features=rounded), learned) == []

    simulator = Simulator(engine.token_classes, engine.settings)
    cycles, replayed = simulator.decode(traces, BY, floor=Floor(True))
    assert differing(from_events(in_order(session.sink)), replayed) == []
    verified = cycles.verified > 0  # with no room for a draft there is no event
    columns = (cycles.position, cycles.arm, cycles.verified)
    rows = zip(*(column[verified].tolist() for column in columns), strict=True)
    chosen = [(e.position, ARMS.index(e.arm), e.verified_len) for e in told if e.verified_len]
    assert chosen == list(rows)

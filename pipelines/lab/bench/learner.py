"""``hvd bench learner``: events a second that a learner reads on one core, and its memory.

Records like a worker's pass through the learner's intake and scopes, without broker and registry:
decoding, admission, sampling, learning and evaluation. Times are processor time, which a busy
machine does not change; they exclude making the records.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from decoder.contracts.events import EventBatch, Origin, Source, encode_batch
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.contracts.fields import NUMBERS, STRINGS
from decoder.contracts.settings import KafkaSettings
from decoder.policy.rule import ARMS, CACHE, MODEL
from learner.ingest.dead_letters import DeadLetters
from learner.ingest.records import RecordReader, encode_rows
from learner.ingest.source import Fetched
from learner.scopes import Scopes
from learner.settings import LearnerSettings

RECORD: Final = 256  # events of a record, as a busy worker fills it
TEMPLATES: Final = 64
"""Records with events of their own; the others repeat these under other names and times."""
CYCLES: Final = 32  # cycles of a request
DRAFTS: Final = 0.5
"""Share of cycles with a cache draft. Only these have features, which cost more."""
PER_SECOND: Final = 50_000.0  # events a second by the records' timestamps
CHECKPOINTS: Final = (1_000_000, 5_000_000, 10_000_000)
"""Numbers of events after which memory is measured; growth after the first is a leak."""
SAMPLED: Final = 1 / 16  # share of the requests whose rows a separate intake forwards
BEGAN: Final = 1_700_000_000.0


def measure(
    events: int, scopes: int, progress: Callable[[int], None], intakes: int = 0
) -> dict[str, Any]:
    """Feed ``events`` events of ``scopes`` scopes to a learner. Uses a temporary folder, no network
    and no other process.

    Args:
        progress: called with the number of events so far.
        intakes: separate intakes, each of its own partition, that forward the rows of some of the
            requests to the learner.

    Returns:
        JSON-ready figures. ``rss_mb`` is the process's memory after so many events, and at the end.
        ``intake_events_per_s`` is the sum over separate intakes, each on its own core.
    """
    with tempfile.TemporaryDirectory() as folder:
        # no record is refused, so no broker is contacted
        dead = DeadLetters(KafkaSettings(bootstrap_servers="127.0.0.1:1"))
        shares = {f"scope{n}": SAMPLED for n in range(scopes)}
        separate = [RecordReader(dead, sample_rates=shares) for _ in range(intakes)]
        learner = _Learner(RecordReader(dead, relayed=bool(intakes)), Path(folder))
        count, relayed, rss = 0, [0.0] * intakes, dict[str, float]()
        for record in records(-(-events // RECORD), scopes, max(intakes, 1)):
            if count >= CHECKPOINTS[min(len(rss), len(CHECKPOINTS) - 1)]:
                rss[str(CHECKPOINTS[len(rss)])] = resident_mb()
            count += RECORD
            progress(count)
            given: Fetched | None = record
            if intakes:
                began = time.process_time()
                given = _forwarded(separate[record.partition], record)
                relayed[record.partition] += time.process_time() - began
            if given is not None:
                learner.read(given)
        return {
            "scopes": scopes,
            "intakes": intakes,
            "events": count,
            "events_per_s": count / learner.seconds,
            "intake_events_per_s": sum(count / intakes / each for each in relayed),
            "rss_mb": {**rss, "end": resident_mb()},
            "candidates": learner.candidates,
        }


class _Learner:
    """The learner's intake and scopes; every candidate becomes champion."""

    def __init__(self, intake: RecordReader, folder: Path) -> None:
        self._intake, self._scopes = intake, Scopes(LearnerSettings(state_dir=folder))
        self.seconds, self.candidates = 0.0, 0

    def read(self, record: Fetched) -> None:
        began = time.process_time()
        admitted = self._intake.read(record)
        assert admitted is not None, self._intake.refused
        scope = self._scopes.get(admitted.scope, admitted.events)
        scope.update(admitted.rows)
        won = scope.take_candidate()
        self.seconds += time.process_time() - began
        if won is not None:
            self.candidates += 1
            scope.promote(replace(won.policy, version=scope.version + 1))


def _forwarded(intake: RecordReader, record: Fetched) -> Fetched | None:
    """The record of training rows that a separate intake sends for ``record``."""
    admitted = intake.read(record)
    assert admitted is not None, intake.refused
    if not len(admitted.rows):
        return None
    source = Source(record.partition, record.offset, SAMPLED)
    return replace(record, value=encode_rows(admitted, source))


def records(count: int, scopes: int, partitions: int = 1) -> Iterator[Fetched]:
    """``count`` records of alternating workers, one for each scope on each partition."""
    draw = np.random.default_rng(0)
    pool = [_drawn(draw) for _ in range(TEMPLATES)]
    for number in range(count):
        sequence, worker = divmod(number, scopes * partitions)
        at, batch = BEGAN + number * RECORD / PER_SECOND, pool[number % TEMPLATES]
        requests = [f"{number:014x}{i // CYCLES:010x}" for i in range(RECORD)]
        batch = replace(
            batch,
            origin=Origin(f"scope{worker % scopes}", f"worker{worker}", f"{worker:08x}"),
            sequence=sequence,
            numbers={**batch.numbers, "time": np.full(RECORD, at)},
            names={**batch.names, "request": requests},
        )
        value = encode_batch(batch)
        yield Fetched(worker // scopes, number, int(at * 1e3), b"worker", value)


def _drawn(draw: np.random.Generator) -> EventBatch:
    """A record whose drafts survive or not depending on one feature."""
    index, features = np.arange(RECORD), draw.random((RECORD, NUM_FEATURES), np.float32)
    length, survives = draw.integers(4, 25, RECORD), draw.random(RECORD) < 0.4
    features[:, FEATURES.index("draft_len")] = length
    features[:, FEATURES.index("payoff_last")] = 8.0 * survives + draw.normal(size=RECORD) * 0.5
    drafted = draw.random(RECORD) < DRAFTS
    arm = np.where(drafted, draw.integers(3, size=RECORD), MODEL)
    verified = np.where(arm == CACHE, length, np.where(arm == MODEL, 3, 0))
    numbers: dict[str, Any] = {field.name: np.zeros(RECORD, field.dtype) for field in NUMBERS}
    numbers |= dict.fromkeys(("batch_size", "predicted", "predicted_model", "share"), index**0)
    numbers |= {"number": index, "cycle": index % CYCLES, "position": index % CYCLES}
    numbers |= {"drafted_len": verified, "verified_len": verified, "step_tokens": 1 + verified}
    numbers |= {"parameter": np.full(RECORD, 2.0), "draft_us": np.full(RECORD, 50.0)}
    numbers["step_us"] = 20_000.0 + 300.0 * (1 + verified) + 8_000.0 * (arm == MODEL)
    numbers["model_accepted"] = np.where(arm == MODEL, draw.integers(4, size=RECORD), -1)
    numbers["draft_len"] = length * drafted
    numbers["accepted"] = np.where(survives, length, draw.integers(2, size=RECORD)) * drafted
    names = {field.name: [""] * RECORD for field in STRINGS}
    names |= {"role": ["champion"] * RECORD, "parameter_name": ["rate"] * RECORD}
    names["arm"] = [ARMS[each] for each in arm]
    names["label"] = ["verified" if each else "" for each in drafted]
    return EventBatch(Origin("", "", ""), 0, numbers, names, features)


def resident_mb() -> float:
    """Resident memory of this process in megabytes; its peak where /proc is missing."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

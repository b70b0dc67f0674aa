"""What a learner takes in: events a second on one core, and memory.

Records as a worker writes them go through the learner's own intake and scopes, without a broker and
a registry: decoding, admission, sampling, learning and judging. Times are processor time, so that a
busy machine measures the same; making the records is not in them.
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

RECORD: Final = 256
"""Events of a record, as a busy worker fills it."""
TEMPLATES: Final = 64
"""Records whose events are drawn; the others hold these under other names and times."""
CYCLES: Final = 32
"""Of a request."""
DRAFTS: Final = 0.5
"""Share of cycles with a cache draft: only these have features, and cost more."""
PER_SECOND: Final = 50_000.0
"""Events a second by the records' own clock."""
LOOKS: Final = (1_000_000, 5_000_000, 10_000_000)
"""Events after which the memory is looked at: what grows from the first look on grows for ever."""
SAMPLED: Final = 1 / 16
"""Share of the requests whose lessons an intake apart sends on."""
BEGAN: Final = 1_700_000_000.0


def measure(
    events: int, scopes: int, progress: Callable[[int], None], intakes: int = 0
) -> dict[str, Any]:
    """Take in ``events`` events of ``scopes`` scopes in turns; ``progress`` hears how many are in.

    With ``intakes`` so many make lessons of a part of the requests before, each of its own
    partition and in time of its own: ``intake_events_per_s`` of all, each on a core.

    Starts no process, needs no network; writes to a temporary folder.

    Returns:
        for ``--json``. ``rss_mb`` is what the process holds after so many events, and at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        # nothing is refused, so nobody is asked for a broker
        dead = DeadLetters(KafkaSettings(bootstrap_servers="127.0.0.1:1"))
        shares = {f"scope{n}": SAMPLED for n in range(scopes)}
        before = [RecordReader(dead, sample_rates=shares) for _ in range(intakes)]
        intake = RecordReader(dead, relayed=bool(intakes))
        held = Scopes(LearnerSettings(state_dir=Path(folder)))
        spent, candidates, taken = 0.0, 0, 0
        relayed, rss = [0.0] * intakes, dict[str, float]()
        for record in records(-(-events // RECORD), scopes, max(intakes, 1)):
            if taken >= LOOKS[min(len(rss), len(LOOKS) - 1)]:
                rss[str(LOOKS[len(rss)])] = resident_mb()
            taken += RECORD
            progress(taken)
            given: Fetched | None = record
            if intakes:
                began = time.process_time()
                given = _lesson(before[record.partition], record)
                relayed[record.partition] += time.process_time() - began
            if given is None:
                continue
            began = time.process_time()
            admitted = intake.read(given)
            assert admitted is not None, intake.refused
            scope = held.get(admitted.scope, admitted.events)
            scope.update(admitted.rows)
            won = scope.take_candidate()
            spent += time.process_time() - began
            if won is not None:
                candidates += 1
                scope.promote(replace(won.policy, version=scope.version + 1))
        return {
            "scopes": scopes,
            "intakes": intakes,
            "events": taken,
            "events_per_s": taken / spent,
            "intake_events_per_s": sum(taken / intakes / each for each in relayed),
            "rss_mb": {**rss, "end": resident_mb()},
            "candidates": candidates,
        }


def _lesson(intake: RecordReader, record: Fetched) -> Fetched | None:
    """What an intake sends of ``record``."""
    taught = intake.read(record)
    assert taught is not None, intake.refused
    if not len(taught.rows):
        return None
    source = Source(record.partition, record.offset, SAMPLED)
    return replace(record, value=encode_rows(taught, source))


def records(count: int, scopes: int, partitions: int = 1) -> Iterator[Fetched]:
    """``count`` records of workers in turns, one of each scope on each partition."""
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
    """Cycles whose drafts survive or not as one of their features says, so that there is something
    to learn."""
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
    """Memory that this process holds, in megabytes; where none tells, the most it has had."""
    told = Path("/proc/self/statm")
    if told.exists():
        return int(told.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

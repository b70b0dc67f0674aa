"""Poison of every kind is set aside and counted; what follows it is learned from."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import Source
from decoder.contracts.features import FEATURES
from decoder.contracts.fields import LIMITS
from decoder.contracts.settings import KafkaSettings
from decoder.policy.first import first_policy
from learner.ingest import records
from learner.ingest.dead_letters import DeadLetters
from learner.ingest.records import RecordReader, decode_record, encode_rows
from learner.ingest.source import Fetched
from learner.scope import Scope
from learner.settings import LearnerSettings
from learner.training.rows import COLUMNS
from pipelines.machine import free_port
from tests.events import encode_events
from tests.learner.stream import ORIGIN, batches
from tests.learner.traffic import Traffic

EVENTS = Traffic(seed=3).events(8)
NOW_MS = 1_000
WIRE = json.loads(encode_events(EVENTS[:8], ORIGIN, 0))
DEEP = 50_000
WORST = [*(2**n for n in (31, 40, 53, 63)), 10**400, -1, -(2**40), 1e300, -1e300, 0, 1, "NaN"]
WORST += [None, [], {}]  # type: ignore[list-item]


class Kept(DeadLetters):
    """The real one, which also keeps what it was given; no broker is there to take it."""

    def __init__(self) -> None:
        super().__init__(KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}"))
        self._retry_at = float("inf")
        self.given: list[tuple[Fetched, EventRefused]] = []

    def send(self, record: Fetched, error: EventRefused) -> None:
        self.given.append((record, error))
        super().send(record, error)


@pytest.fixture
def intake() -> RecordReader:
    return RecordReader(Kept())


def fetched(value: bytes, offset: int = 0) -> Fetched:
    return Fetched(0, offset, NOW_MS, b"w", value)


def spoilt(part: str, name: str, value: Any, index: int = 3) -> bytes:
    record = json.loads(json.dumps(WIRE))
    record[part][name][index] = value
    return json.dumps(record).encode()


def poison() -> list[bytes]:
    """Every number of a record at its extremes, and a hundred records mutated at random."""
    numbers = [("columns", name) for name in (*LIMITS, "model_accepted")]
    features = [("features", name) for name in FEATURES]
    values = [spoilt(p, n, v) for p, n in numbers + features for v in WORST]
    draw = random.Random(0)
    whole = json.dumps(WIRE).encode()
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        values.append(bytes(data))
    bombs = [b"[" * DEEP + b"]" * DEEP, b'{"columns":' * DEEP + b"1" + b"}" * DEEP]
    return [*values, *bombs, b"", b"null", whole[:-1], b"\xff" * 100]


def test_extreme_numbers_are_learned_from_or_refused(intake: RecordReader) -> None:
    scope = Scope("s", LearnerSettings(buffer_events=500, min_events=50), first_policy("s"))
    bad = poison()
    for offset, value in enumerate(bad):
        sequenced = value.replace(b'"sequence": 0', b'"sequence": %d' % offset)
        admitted = intake.read(fetched(sequenced, offset))
        if admitted is not None:
            for name in COLUMNS:
                column = getattr(admitted.rows, name)
                if name not in ("rate", "model_accepted"):
                    assert np.isfinite(column).all(), name
            scope.update(admitted.rows)
    assert intake.refused.total() > 500
    assert set(intake.refused) <= {"malformed", "range", "contract", "schema"}
    told = [str(error) for _, error in intake.dead.given]  # type: ignore[attr-defined]
    assert any("draft_len outside 0..512" in each for each in told)
    assert intake.dead.failed == intake.refused.total()
    before = scope.total
    for number, value in enumerate(batches(EVENTS, size=40, first=len(bad))):
        admitted = intake.read(fetched(value, len(bad) + number))
        assert admitted is not None
        scope.update(admitted.rows)
    assert scope.total == before + len(EVENTS)
    assert scope.learners.trainer and np.isfinite(scope.learners.trainer.weights).all()
    assert all(np.isfinite(sums).all() for *_, sums in scope._clusters.open.values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"contract": "hvd.drafts.v3"}, "contract"), ({"schema_id": "of another"}, "schema"),
        ({"features": {}}, "schema"), ({"sequence": -1}, "range"), ({"rows": 9}, "malformed"),
    ],
)  # fmt: skip
def test_refusals_are_counted_by_reason(
    intake: RecordReader, change: dict[str, Any], reason: str
) -> None:
    assert intake.read(fetched(json.dumps({**WIRE, **change}).encode())) is None
    assert intake.refused == {reason: 1}


def test_a_duplicate_record_is_counted_and_not_learned_from(
    intake: RecordReader,
) -> None:
    first, second = batches(EVENTS[:40], size=20)
    admitted = [intake.read(fetched(value)) for value in (first, second, first)]
    assert [a is None for a in admitted] == [False, False, True]
    assert (intake.repeated, intake.sequences.duplicates) == (20, 1)


def test_records_of_another_feature_schema_are_counted_and_logged_once_and_no_dead_letters(
    intake: RecordReader, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(500):
        schema = f"of %s {number}" if number >= 40 else "of the next version"
        assert intake.read(fetched(json.dumps({**WIRE, "schema_id": schema}).encode())) is None
    assert intake.refused == {"schema": 500} and not intake.dead.given  # type: ignore[attr-defined]
    assert intake.read(fetched(b"no record")) is None
    assert len(intake.dead.given) == 1  # type: ignore[attr-defined]
    told = [r.getMessage() for r in caplog.records if "feature schema" in r.getMessage()]
    assert len([each for each in told if "of the next version" in each]) == 1
    assert len(told) < 30, "and not one for each that is made up"


def relayed(value: bytes, share: float = 1.0, offset: int = 7) -> bytes | None:
    """What an intake makes of a record of drafts."""
    lessons = decode_record(Fetched(2, offset, NOW_MS, b"w", value), {ORIGIN.scope: share}, 1e9)
    source = Source(2, offset, share)
    return encode_rows(lessons, source) if len(lessons.rows) else None


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_relayed_record_equals_the_rows_a_learner_would_decode(share: float) -> None:
    other = [e._replace(side="suffix", predicted=500.0) for e in EVENTS[:9]]
    (value,) = batches([*other, *EVENTS[9:]], size=len(EVENTS))
    own = decode_record(fetched(value), {ORIGIN.scope: share}, 1e9)
    assert own.foreign == 9 and own.predicted < 500.0, "drafts within other limits"
    wire = relayed(value, share)
    assert wire is not None and (len(own.rows) < len(EVENTS) - 9) == (share < 1.0)
    lesson = decode_record(fetched(wire), {}, 1e9)
    for name in COLUMNS:
        assert getattr(lesson.rows, name).tobytes() == getattr(own.rows, name).tobytes(), name
    assert (lesson.scope, lesson.batch.origin, lesson.batch.sequence) == (
        own.scope,
        own.batch.origin,
        own.batch.sequence,
    )
    assert lesson.drafts == len(own.rows) / share and lesson.batch.source == Source(2, 7, share)


def test_relayed_duplicates_are_recognised_across_gaps_and_restarts() -> None:
    sent = [relayed(value) for value in batches(EVENTS, size=10)][::3]  # the others teach nothing
    first = RecordReader(Kept(), relayed=True)
    assert all(first.read(fetched(value or b"", n)) for n, value in enumerate(sent[:4]))
    again = RecordReader(Kept(), first.sequences, relayed=True)
    admitted = [
        again.read(fetched(value or b"", 50 + n)) is not None for n, value in enumerate(sent)
    ]
    assert admitted == [False] * 4 + [True] * (len(sent) - 4)
    assert (again.sequences.duplicates, again.sequences.missing) == (4, 0)


def test_malformed_relayed_records_and_drafts_among_them_are_refused() -> None:
    intake = RecordReader(Kept(), relayed=True)
    wire = json.loads(relayed(encode_events(EVENTS[:8], ORIGIN, 0)) or b"")
    wrong: list[Any] = [-1, 2**70, 0.5, 1e-320, "1", None, [], {}]
    sources = [{**wire["source"], name: w} for name in wire["source"] for w in wrong if w != 0.5]
    bad = [json.dumps({**wire, "source": told}).encode() for told in [*sources, *wrong]]
    for offset, value in enumerate([*poison(), *bad]):
        assert intake.read(fetched(value, offset)) is None
    assert intake.read(fetched(json.dumps(wire).encode())) is not None
    assert RecordReader(Kept()).read(fetched(json.dumps(wire).encode())) is None, "nor the reverse"


@pytest.mark.parametrize("rows", [records.MAX_ROWS, records.MAX_ROWS + 1])
def test_a_record_with_too_many_rows_is_refused(intake: RecordReader, rows: int) -> None:
    """Compressed, it takes some bytes."""
    value = encode_events([EVENTS[0]] * rows, ORIGIN, 0)
    assert (intake.read(fetched(value)) is not None) == (rows <= records.MAX_ROWS)
    assert intake.refused == ({} if rows <= records.MAX_ROWS else {"range": 1})


def test_a_record_with_too_many_bytes_is_refused_unparsed(
    intake: RecordReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "decode_batch", None)
    assert intake.read(fetched(b" " * (records.MAX_BYTES + 1))) is None
    assert intake.refused == {"range": 1}


@pytest.mark.parametrize("stamp", [-(2**60), -1, 0, 1_700_000_000, 10**15, 2**60])
def test_timestamps_in_other_units_refuse_no_valid_event(intake: RecordReader, stamp: int) -> None:
    now, later = EVENTS[0]._replace(time=time.time()), EVENTS[0]._replace(time=4e9)
    for sequence, (event, admitted) in enumerate([(now, True), (later, False)]):
        value = encode_events([event], ORIGIN, sequence)
        assert (intake.read(Fetched(0, 0, stamp, b"w", value)) is not None) == admitted

"""Each event is in the export once, whatever was sent twice, lost or made up, and wherever it was
stopped."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from decoder.contracts.errors import BrokerError, SettingsError, TraceError
from decoder.contracts.events import COLUMNS
from decoder.contracts.features import FEATURES
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from pipelines import machine
from pipelines.cli import app
from pipelines.reports import atomic_write
from pipelines.telemetry import export as module
from pipelines.telemetry import reading, rows
from pipelines.telemetry.export import NOTE, export
from pipelines.telemetry.reading import moment
from pipelines.telemetry.rows import Seen
from tests.pipelines.telemetry.records import NOW, ONE, OTHER, produce, record, spread

EVENTS = [("one", n) for n in range(70)] + [("other", n) for n in range(30)]


def quiet(what: str, done: int, whole: int) -> None:
    pass


def lying_in(folder: Path) -> list[dict[str, Any]]:
    """All rows, the export's note checked against its files."""
    told = json.loads((folder / NOTE).read_text())
    assert sorted(p.name for p in folder.iterdir()) == sorted([NOTE, *told["files"]])
    rows = [row for name in told["files"] for row in pq.read_table(folder / name).to_pylist()]
    assert len(rows) == told["rows"]
    return rows


def numbers_in(folder: Path) -> list[tuple[str, int]]:
    return sorted((row["worker"], row["number"]) for row in lying_in(folder))


def test_each_event_is_there_once_and_the_rest_is_counted(
    filled: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", filled.bootstrap_servers)
    command = ["telemetry", "export", str(tmp_path / "out")]
    told = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert (told["rows_written"], told["files"], told["refused"]) == (100, 1, 4)
    assert numbers_in(tmp_path / "out") == EVENTS
    row = next(r for r in lying_in(tmp_path / "out") if (r["worker"], r["number"]) == ("one", 13))
    assert (row["life"], row["accepted"], row["arm"]) == (ONE.life, 5, "cache")
    assert row["workload"] == "chat" and row["model_accepted"] is None
    assert {*COLUMNS, *(f"feature_{name}" for name in FEATURES)} < set(row)
    shown = CliRunner().invoke(app, command).stderr
    assert "100 rows in 1 files" in shown and "15 rows came twice, 2 records missing" in shown


def test_run_again_it_adds_what_has_come_since(filled: KafkaSettings, tmp_path: Path) -> None:
    export(filled, tmp_path / "out", quiet)
    again = export(filled, tmp_path / "out", quiet)
    assert (again.note["rows"], again.note["files"]) == (100, ["drafts-00000.parquet"])
    produce(filled, [(2, record(OTHER, 3, 25)), (0, record(ONE, 7, 70))])
    found = export(filled, tmp_path / "out", quiet)
    further = [("one", n) for n in range(70, 80)] + [("other", n) for n in range(30, 35)]
    assert numbers_in(tmp_path / "out") == sorted(EVENTS + further)
    counts = found.intake.counts
    assert (counts.duplicates, counts.missing, len(found.note["files"])) == (20, 3, 2)


def one_by_one(records: Any) -> Any:
    """The same records, each by itself, as from a broker that has them not all at hand."""

    def of(*arguments: Any) -> Any:
        return ([record] for fetched in records(*arguments) for record in fetched)

    return of


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [FULL, SystemExit(), KeyboardInterrupt()])
@pytest.mark.parametrize("calls", range(4))
def test_a_full_disk_a_kill_or_ctrl_c_loses_nothing_and_writes_no_event_twice(
    filled: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    calls: int, error: BaseException,
) -> None:  # fmt: skip
    """At the first note already, in a file, and between a file and its note."""
    monkeypatch.setattr(module, "ROWS_A_FILE", 20)
    monkeypatch.setattr(module, "records", one_by_one(module.records))
    written: list[Path] = []

    def failing(path: Path, write: Any) -> None:
        written.append(path)
        if len(written) > calls:
            path.with_name(f"{path.name}.part").write_bytes(b"half a n")
            raise error
        atomic_write(path, write)

    with monkeypatch.context() as patched:
        patched.setattr(module, "atomic_write", failing)
        said = "Make room and run this again" if isinstance(error, OSError) else None
        with pytest.raises((TraceError, SystemExit, KeyboardInterrupt), match=said):
            export(filled, tmp_path / "out", quiet)
    counts = export(filled, tmp_path / "out", quiet).intake.counts
    assert numbers_in(tmp_path / "out") == EVENTS
    assert (counts.records, counts.duplicates, counts.missing) == (15, 15, 2)


def test_a_period_is_of_choices_and_stays_what_it_was(
    filled: KafkaSettings, tmp_path: Path
) -> None:
    began, ended = (f"{iso(NOW - 60.0 + number / 10)}" for number in (5, 12))
    export(filled, tmp_path / "out", quiet, (began, ended))
    assert numbers_in(tmp_path / "out") == [(w, n) for w in ("one", "other") for n in range(5, 12)]
    with pytest.raises(TraceError, match="another period"):
        export(filled, tmp_path / "out", quiet)
    assert export(filled, tmp_path / "out", quiet, (began, ended)).note["rows"] == 14
    hour = export(filled, tmp_path / "hour", quiet, ("1h", ""))
    assert hour.note["rows"] == 100
    assert export(filled, tmp_path / "hour", quiet, ("1h", "")).note["began"] == hour.note["began"]


def iso(at: float) -> str:
    return np.datetime64(round(at * 1000), "ms").item().isoformat() + "+00:00"


@pytest.mark.parametrize("records", [0, 20], ids=["shorter", "grown past what was read"])
def test_a_topic_that_was_made_anew_is_said(
    filled: KafkaSettings, tmp_path: Path, records: int
) -> None:
    export(filled, tmp_path / "out", quiet)
    spread(filled)
    produce(filled, [(p, record(ONE, n, 10 * n)) for n in range(records) for p in range(3)])
    with pytest.raises(BrokerError, match="made anew"):
        export(filled, tmp_path / "out", quiet)


def test_a_folder_of_something_else_is_left_alone_and_no_broker_is_said(tmp_path: Path) -> None:
    nowhere = KafkaSettings(bootstrap_servers=f"127.0.0.1:{machine.free_port()}")
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(TraceError, match="a folder of its own"):
        export(nowhere, tmp_path, quiet)
    (tmp_path / NOTE).write_text('{"format": "hvd.export.v9"}')
    with pytest.raises(TraceError, match=r"no note of an export: format 'hvd\.export\.v9'"):
        export(nowhere, tmp_path, quiet)
    with pytest.raises(BrokerError, match="start it, or let HVD_KAFKA_BOOTSTRAP_SERVERS name"):
        export(nowhere, tmp_path / "new", quiet)
    assert not (tmp_path / "new").exists()


def test_times_are_so_long_ago_or_of_a_day_and_what_is_none_is_said() -> None:
    found = [1e6 - moment(text, 1e6) for text in ("90s", "1.5m", "2h", "1d")]
    assert found == [90, 90, 7200, 86400] and moment("1970-01-02T00:00+00:00", 0.0) == 86400.0
    for text in ("", "yesterday", "10", "10 m", "-5m", "2026-13-01", "1e999d"):
        with pytest.raises(SettingsError, match="is no time: write 10m"):
            moment(text, NOW)


BATCHES = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8), max_size=12)


@given(first=BATCHES, then=BATCHES)
def test_numbers_are_new_as_a_set_of_them_says(
    first: list[list[int]], then: list[list[int]]
) -> None:
    seen, known = Seen(), set[int]()
    for part in (first, then):
        for numbers in part:
            fresh = seen.admit("life", np.array(numbers))
            told = [n for n, new in zip(numbers, fresh.tolist(), strict=True) if new]
            assert sorted(told) == sorted(set(numbers) - known)
            known |= set(numbers)
        runs = seen.runs()
        assert {n for low, high in runs.get("life", []) for n in range(low, high)} == known
        assert all(a[1] < b[0] for a, b in pairwise(runs.get("life", [])))
        seen = Seen(json.loads(json.dumps(runs)))


def test_of_made_up_lives_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LIVES", 50)
    seen = rows.Seen()
    for number in range(500):
        assert seen.admit("live", np.array([number])).all()
        assert seen.admit(f"made up {number}", np.array([0])).all()
    assert not seen.admit("live", np.array([7])).any() and len(seen.runs()) == 50


def test_records_that_were_not_asked_for_are_no_sign_of_those_that_were(
    empty: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing lies on the second partition, and the first one never rests."""
    monkeypatch.setattr(reading, "PATIENCE_S", 1.0)
    spread(empty)
    produce(empty, [(0, record(ONE, 0, 0))])
    quiet, came = threading.Event(), []

    def workers() -> None:
        for sequence in range(1, 60):
            if not quiet.wait(0.1):
                produce(empty, [(0, record(ONE, sequence, 10 * sequence))])

    with ThreadPoolExecutor(1) as threads, reading.reading(empty, "test") as consumer:
        writing = threads.submit(workers)
        try:
            with pytest.raises(BrokerError, match="do not come any more"):
                for fetched in reading.records(consumer, DRAFTS, {0: range(1), 1: range(1)}):
                    came += fetched
            assert writing.running(), "given up only once the workers rested"
        finally:
            quiet.set()
    assert [(r.partition, r.offset) for r in came] == [(0, 0)]

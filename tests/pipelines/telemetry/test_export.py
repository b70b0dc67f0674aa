"""Each record is in the export once, whatever was lost or made up, and wherever it was stopped."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from kafka import TopicPartition
from typer.testing import CliRunner

from decoder.contracts.errors import BrokerError, TraceError
from decoder.contracts.features import FEATURES
from decoder.contracts.fields import COLUMNS
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from decoder.kafka.clients import open_admin
from learner.state_dir import LOCK, lock
from pipelines import machine
from pipelines.cli import app
from pipelines.reports import atomic_write
from pipelines.telemetry import export as module
from pipelines.telemetry import reading
from pipelines.telemetry.export import NOTE, export
from tests.pipelines.telemetry.conftest import ONE, OTHER, produce, record, spread

EVENTS = [("one", n) for n in range(70)] + [("other", n) for n in range(30)]
TWICE = [("one", n) for n in (*range(10, 20), *range(35, 40))]
LYING = sorted(EVENTS + TWICE)


def quiet(what: str, done: int, whole: int) -> None:
    pass


def lying_in(folder: Path) -> list[dict[str, Any]]:
    """All rows, the export's note checked against its files."""
    told = json.loads((folder / NOTE).read_text())
    assert {p.name for p in folder.iterdir()} == {NOTE, LOCK, *told["files"]}
    rows = [row for name in told["files"] for row in pq.read_table(folder / name).to_pylist()]
    assert len(rows) == told["rows"]
    return rows


def numbers_in(folder: Path) -> list[tuple[str, int]]:
    return sorted((row["worker"], row["number"]) for row in lying_in(folder))


def test_each_record_is_there_once_and_what_is_none_is_counted(
    filled: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", filled.bootstrap_servers)
    command = ["telemetry", "export", str(tmp_path / "out")]
    told = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert (told["rows"], told["files"], told["records"], told["refused"]) == (115, 1, 15, 4)
    assert numbers_in(tmp_path / "out") == LYING
    row = next(r for r in lying_in(tmp_path / "out") if (r["worker"], r["number"]) == ("one", 13))
    assert (row["life"], row["accepted"], row["arm"]) == (ONE.life, 5, "cache")
    assert row["workload"] == "chat" and row["model_accepted"] is None
    assert {*COLUMNS, *(f"feature_{name}" for name in FEATURES)} < set(row)
    shown = CliRunner().invoke(app, command).stderr
    assert "115 rows in 1 file of" in shown and "15 records read, 4 refused" in shown


def test_run_again_it_adds_what_has_come_since(filled: KafkaSettings, tmp_path: Path) -> None:
    export(filled, tmp_path / "out", quiet)
    again = export(filled, tmp_path / "out", quiet)
    assert (again.rows, again.files) == (115, ["drafts-00000.parquet"])
    produce(filled, [(2, record(OTHER, 3, 25)), (0, record(ONE, 7, 70))])
    found = export(filled, tmp_path / "out", quiet)
    further = [("one", n) for n in range(70, 80)] + [("other", n) for n in range(25, 35)]
    assert numbers_in(tmp_path / "out") == sorted(LYING + further)
    assert (found.counts["records"], len(found.files)) == (17, 2)


def test_what_age_removed_between_two_exports_is_counted_once(
    filled: KafkaSettings, tmp_path: Path
) -> None:
    assert export(filled, tmp_path / "out", quiet).counts["removed"] == 0
    produce(filled, [(0, record(ONE, 7 + n, 70 + 10 * n)) for n in range(5)])
    with closing(open_admin(filled, "test", 60_000)) as admin:
        here = TopicPartition(DRAFTS.name, 0)
        unread = json.loads((tmp_path / "out" / NOTE).read_text())["offsets"]["0"]
        admin.delete_records({here: unread + 3})
    for _ in range(2):
        found = export(filled, tmp_path / "out", quiet)
        assert (found.counts["removed"], found.counts["records"]) == (3, 17)
    assert numbers_in(tmp_path / "out") == sorted(LYING + [("one", n) for n in range(100, 120)])


def test_two_exports_into_one_folder_do_not_write_over_each_other(
    filled: KafkaSettings, tmp_path: Path
) -> None:
    with lock(tmp_path), pytest.raises(TraceError, match="another export"):
        export(filled, tmp_path, quiet)
    (tmp_path / LOCK).unlink()
    (tmp_path / "somebody's").write_text("")
    with pytest.raises(TraceError, match="no export"):
        export(filled, tmp_path, quiet)
    assert [each.name for each in tmp_path.iterdir()] == ["somebody's"]


def one_by_one(records: Any) -> Any:
    """The same records, each by itself, as from a broker that has them not all at hand."""

    def of(*arguments: Any) -> Any:
        return ([record] for fetched in records(*arguments) for record in fetched)

    return of


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [FULL, SystemExit(), KeyboardInterrupt()])
@pytest.mark.parametrize("calls", range(4))
def test_a_full_disk_a_kill_or_ctrl_c_loses_nothing_and_writes_no_record_twice(
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
    assert export(filled, tmp_path / "out", quiet).counts["records"] == 15
    assert numbers_in(tmp_path / "out") == LYING


@pytest.mark.parametrize("records", [0, 20], ids=["shorter", "grown past what was read"])
def test_a_topic_that_was_made_anew_is_said(
    filled: KafkaSettings, tmp_path: Path, records: int
) -> None:
    export(filled, tmp_path / "out", quiet)
    spread(filled)
    produce(filled, [(p, record(ONE, n, 10 * n)) for n in range(records) for p in range(3)])
    with pytest.raises(BrokerError, match="was recreated"):
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
    assert [each.name for each in (tmp_path / "new").iterdir()] == [LOCK]


def test_records_that_were_not_asked_for_are_no_sign_of_those_that_were(
    empty: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing lies on the second partition, and the first one never rests."""
    spread(empty)
    produce(empty, [(0, record(ONE, 0, 0))])
    quiet, came = threading.Event(), []

    def workers() -> None:
        for sequence in itertools.count(1):
            if quiet.wait(0.1):
                break
            produce(empty, [(0, record(ONE, sequence, 10 * sequence))])

    with ThreadPoolExecutor(1) as threads, reading.reading(empty, "test") as consumer:
        writing = threads.submit(workers)
        try:
            with pytest.raises(BrokerError, match="stopped arriving"):
                for fetched in reading.records(consumer, DRAFTS, {0: range(1), 1: range(1)}):
                    came += fetched
                    monkeypatch.setattr(reading, "PATIENCE_S", 1.0)
            assert writing.running(), "given up only once the workers rested"
        finally:
            quiet.set()
    assert [(r.partition, r.offset) for r in came] == [(0, 0)]

"""A tenant is found wherever it is on the topics, and what can be deleted is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from decoder.contracts.errors import SettingsError
from decoder.contracts.identity import Pseudonyms
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DEAD, DRAFTS, LESSONS, TRIALS
from decoder.kafka.clients import close, open_producer
from pipelines.cli import app
from pipelines.telemetry.forget import Held, pseudonyms_of, sentence
from tests import raw_batches as raw
from tests.events import encode_events
from tests.pipelines.telemetry.conftest import ONE, events, lying, produce, record, spread

KEY = "of these tests, long enough"
NAMES = Pseudonyms(KEY.encode())
ACME = NAMES.of("tenant", "key:acme")


def of_acme(sequence: int, first: int) -> bytes:
    """Ten events, half of them the tenant's."""
    mixed = [e._replace(tenant=ACME if e.number % 2 else "") for e in events(first, 10)]
    return encode_events(mixed, ONE, sequence)


@pytest.fixture
def filled(empty: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> KafkaSettings:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", empty.bootstrap_servers)
    monkeypatch.setenv("HVD_WORKER_ID_KEY", KEY)
    spread(empty)
    produce(empty, [
        (0, record(ONE, 0, 0)), (0, of_acme(1, 10)), (0, record(ONE, 2, 20)),
        (1, record(ONE, 0, 30)), (2, of_acme(0, 40)), (2, of_acme(1, 50)),
    ])  # fmt: skip
    return empty


def asked(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["telemetry", "forget", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def held(told: dict[str, Any], topic: str) -> list[tuple[int, int, int]]:
    mine = [each for each in told["held"] if each["topic"] == topic]
    return [(each["partition"], each["records"], each["others"]) for each in mine]


def test_it_says_where_a_tenant_is_and_changes_nothing(filled: KafkaSettings) -> None:
    producer = open_producer(filled, "test")
    producer.send(TRIALS.name, json.dumps({"groups": [{"tenant": ACME}]}).encode())
    producer.send(DEAD.name, b"no record of " + ACME.encode())
    producer.send(LESSONS.name, of_acme(0, 10))
    producer.flush()
    close(producer)
    told = json.loads(asked("--tenant", "acme", "--json").stdout)
    assert ACME in told["pseudonyms"] and told["deleted"] is False
    assert held(told, DRAFTS.name) == [(0, 1, 1), (2, 2, 0)]
    assert [len(held(told, topic.name)) for topic in (TRIALS, DEAD, LESSONS)] == [1, 1, 1]
    assert all(each["gone_at"] > each["newest"] for each in told["held"])
    assert len(lying(filled)[DRAFTS.name]) == 6
    shown = asked("--tenant", ACME)
    assert "records hold it" in shown.stdout and "HVD_LEARNER_STATE_DIR" in shown.stderr


def test_records_up_to_its_last_are_deleted_if_that_is_asked_for(filled: KafkaSettings) -> None:
    command = ["telemetry", "forget", "--tenant", ACME, "--delete-records"]
    refused = CliRunner().invoke(app, command, input="n\n")
    assert refused.exit_code == 1 and "1 records of others" in refused.output
    assert len(lying(filled)[DRAFTS.name]) == 6
    assert json.loads(asked(*command[2:], "--yes", "--json").stdout)["deleted"]
    left = lying(filled)
    assert not any(ACME.encode() in (r.value or b"") for each in left.values() for r in each)
    assert sorted((r.partition, r.offset) for r in left[DRAFTS.name]) == [(0, 2), (1, 0)]
    assert f"Nothing of {ACME}" in asked("--tenant", ACME).stdout


@pytest.mark.parametrize("stamp", [-(2**60), 1_700_000_000, 2**62])
def test_rows_are_found_and_deleted_whatever_their_stamp(filled: KafkaSettings, stamp: int) -> None:
    assert raw.put(filled, DRAFTS.name, raw.sound([of_acme(3, 60)], "gzip", stamp)) == [0]
    shown = asked("--tenant", ACME, "--delete-records", "--yes")
    assert "Deleted" in shown.stderr and "records hold it" in shown.stdout
    told = sentence(Held(DRAFTS.name, 0, 1, 1, 0, 1.7e9, (2**63 - 1) / 1e3))
    assert told.endswith("; gone by: never"), "kept for longer than there are dates"
    assert not any(ACME.encode() in r.value for r in lying(filled)[DRAFTS.name])


def test_a_stamp_in_another_unit_hides_no_other_s_end(filled: KafkaSettings) -> None:
    ahead = int(time.time() * 1e6)  # microseconds, where milliseconds are due
    assert raw.put(filled, DRAFTS.name, raw.sound([of_acme(3, 60)], "gzip", ahead)) == [0]
    told = json.loads(asked("--tenant", "acme", "--json").stdout)
    (mine,) = (h for h in told["held"] if (h["topic"], h["partition"]) == (DRAFTS.name, 0))
    now = time.time()
    assert (mine["records"], mine["ahead"]) == (2, 1)
    assert now - 3_600 < mine["newest"] <= now < mine["gone_at"] < now + 10 * 365 * 86_400
    shown = asked("--tenant", "acme").stdout
    assert "gone by: 20" in shown and "the time of 1 lies ahead" in shown


def test_a_tenant_is_known_by_its_name_however_a_request_said_it_and_without_a_key_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HVD_WORKER_ID_KEY", KEY)
    assert {ACME, NAMES.of("tenant", f"key:{ACME}")} <= {*pseudonyms_of(ACME)}
    said = ("key:acme", "header:acme", "authorization:acme", "/named:acme")
    assert {NAMES.of("tenant", name) for name in said} <= {*pseudonyms_of("acme")}
    assert NAMES.of("tenant", "key:acme") not in pseudonyms_of("acm")
    monkeypatch.delenv("HVD_WORKER_ID_KEY")
    assert pseudonyms_of(ACME) == (ACME,)
    with pytest.raises(SettingsError, match="is no pseudonym") as refused:
        pseudonyms_of("acme")
    assert "acme" not in str(refused.value)  # it may be a key


@pytest.mark.usefixtures("filled")
def test_an_api_key_comes_by_standard_input_and_is_not_shown() -> None:
    command = ["telemetry", "forget", "--tenant", "-"]
    for given in ("acme", "acme\r\nand more\n"):
        done = CliRunner().invoke(app, command, input=given)
        assert done.exit_code == 0 and "records hold it" in done.stdout
        assert "acme" not in done.output
    nobody = CliRunner().invoke(app, command, input="\n")
    assert isinstance(nobody.exception, SettingsError)

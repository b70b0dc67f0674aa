"""Whatever lies on the policy topic, the feed hears the next policy."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decoder.admission import Admission
from decoder.contracts.bundle import Policy
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.signature import signed
from decoder.contracts.topics import POLICY, policy_key
from decoder.feed import PolicyFeed
from decoder.kafka.compacted import Compacted
from decoder.policy.probes import to_bytes
from pipelines.machine import free_port
from tests.conftest import random_policy, until
from tests.decoder.telemetry.broker import running, send

Publish = Callable[..., None]


@pytest.fixture
def publish(kafka: KafkaSettings) -> Publish:
    """Puts a record of a role, or of any key, onto the policy topic."""

    def put(key: str | bytes, value: bytes | None, headers: Any = ()) -> None:
        key = policy_key("scope", key) if isinstance(key, str) else key
        send(kafka, POLICY.name, value, key=key, headers=[*headers])

    return put


def bundle(version: int, publication: int, role: str = "champion", scope: str = "scope") -> bytes:
    policy = random_policy(version=version, scope=scope)
    return to_bytes(replace(policy, publication=publication, role=role))


def test_poison_is_counted_and_the_next_policy_heard(
    kafka: KafkaSettings, publish: Publish
) -> None:
    applied: list[Policy] = []
    desk = Admission("scope", applied.append)
    feed = PolicyFeed(kafka, "scope", desk)
    key = "champion"
    publish(key, bundle(1, 1))
    publish(key, bundle(2, 2))
    feed.start()
    until(lambda: len(applied) == 1)
    nested = b"[" * 200_000 + b"]" * 200_000
    for number, value in enumerate((b"\x05", nested, len(nested).to_bytes(8, "little") + nested)):
        publish(key, value)
        until(lambda n=number: desk.refusals["malformed"] == n + 1)
    publish(key, None)
    publish(b"scope/jester", b"?")
    publish(b"elsewhere/champion", b"?")
    publish(b"scope/trial", bundle(8, 1, "trial"))
    publish(key, bundle(1, 1))
    publish(b"any/champion", bundle(6, 9, scope="any"))
    publish(b"any/first", bundle(9, 1, "first", scope="any"))
    until(lambda: "first" in desk.held and desk.ignored.total() == 2)
    publish(key, bundle(3, 3))
    until(lambda: len(applied) == 2)
    feed.close()
    assert [p.version for p in applied] == [2, 3]  # of two at once only the newest is worth a swap
    assert {role: p.version for role, p in desk.held.items()} == {"trial": 8, "first": 9}
    assert desk.ignored == {"role": 1, "older": 1}


def test_a_trial_begins_and_ends_with_the_newest_record_of_its_key(
    kafka: KafkaSettings, publish: Publish
) -> None:
    desk = Admission("scope", lambda _: None)
    publish("trial", bundle(1, 1, "trial"))
    publish("trial", None)
    publish("champion", bundle(2, 1))
    feed = PolicyFeed(kafka, "scope", desk)
    feed.start()
    until(lambda: desk.swaps == 1)
    assert not desk.held, "it had ended before this worker came"
    publish("trial", bundle(3, 2, "trial"))
    until(lambda: "trial" in desk.held)
    publish("champion", bundle(4, 2))
    publish("champion", None)
    until(lambda: desk.swaps == 2)
    assert desk.held["trial"].version == 3 and desk.current is not None
    publish("trial", None)
    until(lambda: "trial" not in desk.held)
    feed.close()
    assert desk.current.version == 4


class Consumer:
    """In the place of Kafka's: each time it is ``asked`` it makes one of ``answers``."""

    def __init__(self, *answers: Callable[[], list[object]]) -> None:
        self.asked, self._answers = 0, answers

    def poll(self, timeout_ms: int) -> dict[object, list[object]]:
        assert not timeout_ms
        self.asked += 1
        return {None: self._answers[min(self.asked, len(self._answers)) - 1]()}

    def position(self, place: object) -> int:
        return self.asked

    def close(self) -> None:
        raise RuntimeError("not even that")


def feed_of(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch, end: int = 0, secret: str = ""
) -> tuple[PolicyFeed, Admission]:
    """A feed that reads ``consumer``, of whose records ``end`` were there first."""

    def connect(log: Compacted) -> None:
        if log._consumer is None:
            log._consumer, log._ends = consumer, {"place": end} if end else {}

    monkeypatch.setattr("decoder.feed.RETRY_S", 0.01)
    monkeypatch.setattr(Compacted, "_connect", connect)
    desk = Admission("scope", print)
    return PolicyFeed(KafkaSettings(policy_key=secret), "scope", desk), desk


def test_a_feed_survives_what_no_one_thought_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of these comes out of the client once; then it answers."""

    def fails(error: BaseException) -> Callable[[], list[object]]:
        def answer() -> list[object]:
            raise error

        return answer

    trouble = RecursionError("deep"), MemoryError(), AttributeError("gone"), OSError("away")
    consumer = Consumer(*map(fails, trouble), list)
    feed, _ = feed_of(consumer, monkeypatch)
    feed.start()
    until(lambda: consumer.asked > len(trouble))
    feed.close()
    said = [r for r in caplog.records if "the policy feed failed" in r.message]
    assert len(said) == 1, "said once a minute at most"


# a client that finds no broker leaves its sockets to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_topic_that_cannot_be_read_is_told_once_and_a_broker_that_is_away_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The exporter says that nobody answers; a topic that is not there concerns the feed alone."""
    monkeypatch.setattr("decoder.feed.RETRY_S", 0.01)
    tries, connect = list[Compacted](), Compacted._connect
    monkeypatch.setattr(Compacted, "_connect", lambda log: tries.append(log) or connect(log))
    port = free_port()
    feed = PolicyFeed(
        KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}"), "scope", Admission("scope", print)
    )
    feed.start()
    until(lambda: len(tries) > 1)
    assert not [r for r in caplog.records if r.name.startswith("decoder")]
    with running(tmp_path, port, topics=False):
        until(lambda: any(r.name.startswith("decoder") for r in caplog.records))
        before = len(tries)
        until(lambda: len(tries) > before + 5)
        feed.close()
    (told,) = (r for r in caplog.records if r.name.startswith("decoder"))
    assert told.levelno == logging.WARNING
    assert POLICY.name in told.getMessage() and "allowed" in told.getMessage()


@pytest.mark.parametrize("key", [b"scope/champion", b"scope/jester"])
@pytest.mark.parametrize("secret", ["", "0123456789abcdef"])
def test_of_a_flood_at_most_a_record_of_each_key_is_kept(
    monkeypatch: pytest.MonkeyPatch, key: bytes, secret: str
) -> None:
    consumer = Consumer(
        lambda: [SimpleNamespace(key=key, partition=0, value=bytes(100_000), headers=[])]
    )
    monkeypatch.setattr("decoder.kafka.compacted.MAX_OVERRUN_S", 0.05)
    feed, desk = feed_of(consumer, monkeypatch, 1 << 60, secret)
    tracemalloc.start()
    try:
        feed.start()
        until(lambda: consumer.asked > 500)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        feed.close()
    assert not feed._thread.is_alive()
    assert held < 20_000_000, "fifty million bytes are read"
    assert desk.refusals["signature"] > 400 if secret else not desk.refusals


def test_a_feed_that_finds_nothing_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker may answer an empty fetch at once; a reader that asked again would never sleep."""
    monkeypatch.setattr("decoder.feed.POLL_S", 600.0)
    consumer = Consumer(list)
    feed, _ = feed_of(consumer, monkeypatch)
    feed.start()
    until(lambda: consumer.asked)
    feed.close()
    assert consumer.asked == 1 and not feed._thread.is_alive()


def test_where_a_key_is_set_only_what_it_signed_is_taken(
    kafka: KafkaSettings, publish: Publish
) -> None:
    """Of all that lies there before a worker comes, a forgery of the same key is the newest."""
    secret = "0123456789abcdef"
    key, trial = policy_key("scope", "champion"), policy_key("scope", "trial")
    good, forged = bundle(1, 1), bundle(66, 99)
    proof, held = signed(secret, key, good), bundle(3, 1, "trial")
    publish(key, good, proof)
    publish(key, forged)
    publish(key, forged, proof)
    publish(key, forged, signed("another secret of theirs", key, forged))
    publish(trial, held, signed(secret, trial, held))
    publish(trial, None)  # nor does whoever lacks the key end a trial
    applied: list[Policy] = []
    desk = Admission("scope", applied.append)
    feed = PolicyFeed(kafka.model_copy(update={"policy_key": secret}), "scope", desk)
    feed.start()
    until(lambda: desk.refusals["signature"] == 4)
    later = bundle(2, 2)
    publish(key, later, signed(secret, key, later))
    until(lambda: len(applied) == 2)
    publish(key, good, proof)  # a replay is genuine, and its number is too low
    until(lambda: desk.ignored["older"] == 1)
    feed.close()
    assert [p.version for p in applied] == [1, 2] and desk.held["trial"].version == 3
    assert desk.refusals == {"signature": 4}

"""Nothing in the learner's loop waits for a server, and what others write is bounded a turn."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.errors import KafkaTimeoutError

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.kafka import clients
from decoder.kafka.compacted import Compacted
from learner import loop
from learner.background import Background
from learner.ingest import source as sources
from learner.ingest import workers
from learner.ingest.shares import LEAST
from learner.ingest.source import EventSource, Fetched
from learner.ingest.workers import Workers
from learner.loop import Learner
from learner.release import registrar
from learner.release.publish import PolicyPublisher
from learner.release.registry import Registry, Standing
from tests.conftest import random_policy, until
from tests.learner.conftest import Clock
from tests.learner.stage import EVENTS, WARNINGS, Stage, on_trial, won, work
from tests.learner.stream import SCOPE, batches, produce, settings_in, stop

pytestmark = WARNINGS
NOWHERE = KafkaSettings(bootstrap_servers="127.0.0.1:1")
WAIT: dict[Any, list[str]] = {
    clients: ["_open"], Compacted: ["read"], EventSource: ["_assign"], KafkaProducer: ["send"],
    PolicyPublisher: ["publish"],
}  # fmt: skip
"""What asks a server and may wait for its answer."""


def test_the_loop_asks_no_server_itself(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    turning, asked = threading.local(), dict[str, Counter[bool]]()

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            asked.setdefault(name, Counter())[hasattr(turning, "loop")] += 1
            return call(*arguments, **options)

        return made

    for place, names in WAIT.items():
        for name in names:
            monkeypatch.setattr(place, name, watched(name, getattr(place, name)))
    learner = stage.learner("auto")
    step = learner.step

    def turn() -> None:
        turning.loop = True
        step()
        del turning.loop

    monkeypatch.setattr(learner, "step", turn)
    produce(stage.kafka, [b"poison", *batches(EVENTS[200:400], first=20)])
    work(learner, lambda: learner.intake.refused.total() == 1)
    work(learner, lambda: learner.publisher.published.last(SCOPE) is not None)
    won(learner)
    work(learner, lambda: on_trial(learner) > 0)
    stop(learner)
    assert asked.keys() == {name for names in WAIT.values() for name in names}
    assert all(calls[False] and not calls[True] for calls in asked.values()), asked


def test_a_policy_topic_that_takes_nothing_is_waited_for_by_nobody_and_tried_once_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher, answer, tries = PolicyPublisher(NOWHERE), threading.Event(), list[bytes]()

    def refused(key: bytes, *_: object) -> None:
        tries.append(key)
        answer.wait()
        raise KafkaTimeoutError("too few replicas")

    monkeypatch.setattr(publisher.published, "read", lambda seconds=0.0: True)
    monkeypatch.setattr(publisher, "_send", refused)
    scopes = [f"s{number}" for number in range(50)]
    for scope in scopes:
        publisher.begin(scope, "champion", lambda: 1, random_policy(version=1, scope=scope))
        publisher.begin(scope, "trial", lambda: 1)
        assert publisher.waits(scope, "champion", 1) and publisher.waits(scope, "trial")
    answer.set()
    until(publisher._background.idle)
    assert not publisher.pending
    assert len(tries) == 1 and not publisher.acknowledged()
    assert publisher.waits("another", "champion", 7), "the broker is left alone for a while"
    publisher.close()


def test_what_is_published_is_ours_when_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, sent = PolicyPublisher(NOWHERE), list[tuple[bytes, bool]]()
    monkeypatch.setattr(publisher.published, "read", lambda seconds=0.0: True)
    monkeypatch.setattr(
        publisher, "_send", lambda key, value, *_: sent.append((key, value is not None))
    )
    monkeypatch.setattr(
        publisher, "_producer", SimpleNamespace(partitions_for=lambda topic: {0}, close=int)
    )
    for scope, term in {"ours": 3, "lost": 0}.items():
        made = random_policy(version=1, scope=scope)
        publisher.begin(scope, "champion", lambda term=term: term, made)
        publisher.begin(scope, "trial", lambda term=term: term)
    publisher.close()
    assert sent == [(b"ours/champion", True), (b"ours/trial", False)]
    assert [(p.scope, p.publication) for p in publisher.acknowledged()] == [("ours", 3_000_001)]


def test_a_registry_of_thousands_of_scopes_is_looked_at_in_parts(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(settings_in(tmp_path, registry), NOWHERE)
    names = [f"scope{number:05d}" for number in range(3 * loop.SLICE)]
    learner.standings = {name: Standing(name, champion=1) for name in names}
    learner._seen = learner.publisher.current = True
    seen, followed = Counter[str](), list[int]()

    def follow(standings: dict[str, Standing]) -> None:
        seen.update(standings.keys())
        followed.append(len(standings))

    monkeypatch.setattr(learner.rollouts, "follow", follow)
    monkeypatch.setattr(learner.publisher, "follow", lambda: None)
    due = {"champion": (1, 0.0)}
    monkeypatch.setattr(learner, "_due", lambda scope: due if scope in names[:4] else {})
    learner.registrar._unusable.add((names[3], 1))  # as of a release of other features
    for _ in range(6):
        learner._follow()
    assert seen.keys() == set(names) and max(followed) <= loop.SLICE + 3
    assert seen[names[0]] >= 4, "of what something is to be done about in every turn"
    assert learner._wanted().keys() == set(names[:3])


def fetched(offset: int) -> Fetched:
    return Fetched(0, offset, 0, None, b"")


def test_a_turn_ends_after_its_time_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(
        sources, "time", SimpleNamespace(monotonic=clock.monotonic, time=lambda: 0.0)
    )
    source = EventSource(NOWHERE, {})
    come = [[fetched(n) for n in range(5)], [fetched(5)]]
    monkeypatch.setattr(source, "poll", lambda timeout: come.pop(0) if come else [])
    turns: list[list[int]] = []
    while len(turns) < 6:
        turns.append([])
        for record in source.taken(0.0, 1.0):
            turns[-1].append(record.offset)
            assert source.offsets.get(0, 0) == record.offset, "only what was dealt with is read"
            if record.offset == 4 and turns.count([4]) == 1:
                break  # it is asked about, and comes again
            clock.now += 0.6
    assert turns == [[0, 1], [2, 3], [4], [4], [5], []]
    assert source.offsets == {0: 6} and not source.caught_up
    monkeypatch.setattr(source, "is_near_the_end", lambda: True)
    assert not list(source.taken(0.0, 1.0)) and source.caught_up, "nothing has to come for it"


def status(share: float, process: str = "holder", scope: str = "s") -> SimpleNamespace:
    told = LearnerStatus(process=process, scope=scope, time=1.0, holds_lease=True, share=share)
    return SimpleNamespace(value=told.model_dump_json().encode())


def test_who_calls_himself_a_holder_makes_nobody_learn_from_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = Workers(NOWHERE, "own")
    come: list[SimpleNamespace] = []

    def read(seconds: float) -> bool:
        while come:
            known._take(come.pop(0))
        return True

    monkeypatch.setattr(known._log, "read", read)

    def reading(*statuses: SimpleNamespace) -> dict[str, float]:
        come.extend(statuses)
        known._read(0.0)
        return dict(known.shares)

    forged = status(1e-9, "forged")
    assert reading(status(0.5)) == {"s": 0.5}
    for _ in range(3):  # of a holder that reports once a second, a reading may have nothing
        assert reading(forged, status(1e-9), status(0.1, "own")) == {"s": 0.5}
    assert reading(status(0.25), forged) == {"s": 0.5}
    for _ in range(workers.READINGS):
        last = reading(status(0.25), forged)
    assert last == {"s": 0.25}, "and follows the holder down"
    assert reading(status(1e-9, scope="nobody's"))["nobody's"] == LEAST
    for _ in range(workers.READINGS):
        last = reading()
    assert last == {}, "what nobody reports any more holds no longer"


def test_a_fleet_that_reports_faster_than_is_read_is_read_at_its_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the reader falls ever further behind."""

    class Broker:
        end = position_ = 0

        def poll(self, timeout_ms: int) -> dict[int, list[SimpleNamespace]]:
            first = self.position_
            self.position_ = min(first + 500, self.end)
            told = WorkerStatus(process="w", scope=f"s{self.end}", time=1.0).model_dump_json()
            return {0: [SimpleNamespace(value=told.encode())] * (self.position_ - first)}

        def seek(self, place: object, offset: int) -> None:
            self.position_ = offset

        def position(self, place: object) -> int:
            return self.position_

        def highwater(self, place: object) -> int:
            return self.end

    known, broker = Workers(NOWHERE), Broker()
    monkeypatch.setattr(known._log, "_connect", lambda: None)
    known._log._consumer, known._log._places = broker, [TopicPartition("t", 0)]
    for second in range(20):
        broker.end += 3 * workers.MOST
        known._read(0.0)
        assert broker.end - broker.position_ <= workers.MOST
        assert known.knows(f"s{broker.end}"), second
    assert known.begun


def test_a_broker_that_does_not_answer_keeps_no_reader_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, answer = EventSource(NOWHERE, {0: 5}), threading.Event()
    monkeypatch.setattr(source, "_assign", lambda: answer.wait() and source.offsets.clear())
    for _ in range(3):
        assert source.poll(0.0) == [] and source.offsets == {0: 5}
        assert source.lag() == 0 and not source.is_near_the_end()
    answer.set()
    until(lambda: not source.offsets, turn=lambda: source.poll(0.0))
    source.close()


def test_calls_are_made_in_their_order_and_one_that_fails_ends_none_after_it() -> None:
    made: list[int] = []
    gate, begun = threading.Event(), threading.Event()
    with closing(Background("test")) as background:
        background.offer(lambda: begun.set() or gate.wait())
        begun.wait()
        for n in (1, 2, 3):
            background.offer(lambda n=n: made.append(n // (n - 1)))
        assert background.waiting == 3 and not background.idle()
        gate.set()
        assert background.idle(60.0)
    assert made == [2, 1]


def test_who_was_closed_makes_the_calls_that_are_offered_later() -> None:
    made: list[int] = []
    background = Background("test")
    for turn in range(3):  # the first has not made any call before it is closed
        assert background.close() and background.idle()
        background.offer(lambda turn=turn: made.append(turn))
        assert background.idle(60.0)
    assert background.close() and made == [0, 1, 2]


def test_a_registry_that_takes_long_to_list_is_listed_less_often(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, rests = registrar.Registrar(registry, lambda scope: True), list[float]()
    spent = iter([0.0, 0.02, 1.0, 4.0])
    clock = SimpleNamespace(
        thread_time=lambda: next(spent), time=time.time, monotonic=time.monotonic
    )
    monkeypatch.setattr(registrar, "time", clock)
    for _ in range(2):
        desk._turn()
        rests.append(desk._rest_seconds)
    assert rests == pytest.approx([0.02 * registrar.RESTS, 3.0 * registrar.RESTS])

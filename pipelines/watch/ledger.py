"""What was seen of a running service: statuses, drafts, rounds, policies and phases; and a consumer
that writes what it reads of them into a ledger.

It joins no consumer group: looking on must not take records from anyone.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Self, TypeVar

from decoder.contracts.bundle import ANY_SCOPE, CHAMPION, FIRST, Policy, unpack
from decoder.contracts.errors import ContractError
from decoder.contracts.events import EventBatch, decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, WorkerStatus, decode_status
from decoder.contracts.topics import DRAFTS, POLICY, STATUS, TRIALS
from decoder.contracts.trials import MODEL, Round, decode_round
from decoder.kafka.clients import (
    AWAY,
    close,
    fetch,
    layout_of,
    listens,
    open_consumer,
    partitions_of,
)
from decoder.limited_log import LimitedLog

ARMS: Final = ("cache", "model", "none")
OWN: Final = ("", CHAMPION)
"""Sides of steps that the policy in force decided: outside of trials, and in its blocks of them."""
NUMBERS: Final = (
    *("number", "time", "policy_version", "draft_len", "predicted", "accepted"),
    *("verified_len", "model_accepted"),
)
KEPT_NUMBERS: Final = 100_000
"""Events whose numbers are remembered: a record that is sent twice comes within seconds."""

KEPT_PUBLICATIONS: Final = 256
AHEAD_S: Final = 60.0
"""Clocks of machines differ by less; what says it is of later than that would never grow old."""
LEARNED: Final = "learner"
"""Origin, in its provenance, of a policy that learning made."""


@dataclass(frozen=True)
class Foresight:
    """What a policy foresaw of ``drafts`` cache drafts, and what came: means of accepted tokens,
    and of how far it was ``off``."""

    drafts: int
    foreseen: float
    accepted: float
    off: float


Timed = TypeVar("Timed", WorkerStatus, LearnerStatus, Round)


@dataclass(frozen=True)
class Phase:
    """A stretch of traffic; ``ended`` is infinite while it lasts. Those of one ``kind`` are
    compared as one."""

    name: str
    workloads: tuple[str, ...]
    kind: str
    began: float  # seconds since the epoch
    ended: float = math.inf


@dataclass(frozen=True)
class Publication:
    """One record of the policy topic; ``policy`` None says that the role's policy is over."""

    time: float  # seconds since the epoch
    scope: str
    role: str
    policy: Policy | None


@dataclass
class Ledger:
    """Everything seen, in order of arrival; appended to by one thread, read by another.

    Of one ``worker``, or of all where it is "". What is ``keep_s`` older than the newest of its
    kind is forgotten, and what is :data:`AHEAD_S` ahead of now is not believed. ``refused`` counts
    records that could not be read, ``seen`` distinct draft events, of all sides.
    """

    worker: str = ""
    keep_s: float = math.inf
    statuses: list[WorkerStatus] = field(default_factory=list)
    learner: list[LearnerStatus] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    refused: int = 0
    seen: int = 0
    _published: list[Publication] = field(default_factory=list)
    _seconds: dict[int, Counter[Any]] = field(default_factory=dict)  # see sums
    _numbers: dict[tuple[str, int], None] = field(default_factory=dict)

    @property
    def scope(self) -> str:
        """That of the worker seen last; "" before any."""
        return self.statuses[-1].scope if self.statuses else ""

    @property
    def own_rounds(self) -> list[Round]:
        """Rounds of the scope."""
        return [r for r in list(self.rounds) if r.scope == self.scope]

    def add_drafts(self, batch: EventBatch) -> None:
        """Count the events of ``batch``, each once."""
        if not self._is_mine(batch.origin.worker, batch.origin.scope):
            return
        numbers = (batch.numbers[name].tolist() for name in NUMBERS)
        names = (batch.names[name] for name in ("arm", "side", "censored"))
        for event in zip(*numbers, *names, strict=True):
            number, at, version, length, foreseen, accepted, verified, model, *names_of = event
            arm, side, censored = names_of
            if (batch.origin.life, number) in self._numbers:
                continue
            self._numbers[batch.origin.life, number] = None
            self.seen += 1
            held = self._seconds.setdefault(int(at), Counter())
            if side == arm == MODEL and not math.isnan(model):
                held[MODEL, int(verified), int(model)] += 1
            if side in OWN:
                held[arm] += 1
                if length and not censored:
                    told = (1, foreseen, accepted, abs(foreseen - accepted))
                    held.update({(version, place): one for place, one in enumerate(told)})
        while len(self._numbers) > KEPT_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        if len(self._seconds) > 2 * self.keep_s:
            now = time.time()
            # neither too old nor of a time to come, which would never grow old
            self._seconds = {s: c for s, c in self._seconds.items() if abs(now - s) <= self.keep_s}

    def sums(self, began: float, ended: float) -> Counter[Any]:
        """What the policy in force decided between two times, in whole seconds: cycles by arm, and
        by version and place in a :class:`Foresight` what comes to its means."""
        found = Counter[Any]()
        for second, held in self._seconds.copy().items():
            if began <= second < ended:
                found.update(dict(held))
        return found

    def foresight(self, began: float, ended: float) -> dict[int, Foresight]:
        """By policy version, of its cache drafts between two times that were labelled to the end;
        in whole seconds."""
        sums = self.sums(began, ended)
        counts = {
            key[0]: n for key, n in sums.items() if isinstance(key, tuple) and key[1:] == (0,)
        }
        return {v: Foresight(n, *(sums[v, i] / n for i in (1, 2, 3))) for v, n in counts.items()}

    def acceptance(self, spans: Iterable[tuple[float, float]], length: int) -> list[float]:
        """The chance [length] that each token of a model draft was accepted, given that those
        before it were, in spans of time; of EAGLE3 decoding, which drafts wherever it decides. A
        place without any counts as one of two."""
        at_risk, accepted = [2] * length, [1] * length
        for began, ended in spans:
            for key, drafts in self.sums(began, ended).items():
                if isinstance(key, tuple) and key[0] == MODEL:
                    for place in range(min(key[1], key[2] + 1, length)):
                        at_risk[place] += drafts
                        accepted[place] += drafts * (place < key[2])
        return [right / all_ for right, all_ in zip(accepted, at_risk, strict=True)]

    def add_status(self, status: WorkerStatus | LearnerStatus) -> None:
        """Keep a worker's status, or one of the learner of its scope."""
        if isinstance(status, WorkerStatus):
            if not self.worker or status.process == self.worker:
                _append(self.statuses, status, self.keep_s)
        elif not self.statuses or status.scope in ("", self.scope):
            _append(self.learner, status, self.keep_s)

    def add_round(self, one: Round) -> None:
        """Keep a round of a trial."""
        if self._is_mine(one.worker, one.scope):
            _append(self.rounds, one, self.keep_s)

    def add_policy(self, at: float, scope: str, role: str, policy: Policy | None) -> None:
        """Keep that a policy was published ``at`` seconds since the epoch, or ended: None."""
        at = min(max(at, 0.0), time.time())  # whoever sends a record says when that was
        self._published.append(Publication(at, scope, role, policy))
        del self._published[:-KEPT_PUBLICATIONS]

    @property
    def published(self) -> list[Publication]:
        """The last that were published for the scope, in order."""
        return [p for p in list(self._published) if p.scope in (self.scope, ANY_SCOPE)]

    def _is_mine(self, worker: str, scope: str) -> bool:
        return (not self.worker or worker == self.worker) and self.scope in ("", scope)

    def policy_switches(self) -> list[tuple[float, int]]:
        """When each policy version came into force on the worker seen last, first to last, the one
        at the start included."""
        mine = [s for s in list(self.statuses) if s.process == self.statuses[-1].process]
        firsts = _first_of_each(mine, "policy_version")
        return [(s.policy_applied_at or s.time, s.policy_version) for s in firsts]

    def named(self, version: int) -> str:
        """``v3``; of version 0, which no registry holds, also what it is."""
        if version:
            return f"v{version}"
        is_first = any(s.policy_role == FIRST for s in list(self.statuses) if not s.policy_version)
        return "v0, the policy that ships" if is_first else "v0, nothing learned"

    def alarms(self) -> list[float]:
        """When the learner said that the traffic had changed, seconds since the epoch."""
        return sorted({s.last_drift_at for s in list(self.learner) if s.drifts})

    def rollout_moves(self) -> list[tuple[float, str]]:
        """What the learner did with policies on trial, and why, in its own words."""
        firsts = _first_of_each(list(self.learner), "rollout_said")
        return [(s.time, s.rollout_said) for s in firsts if s.rollout_said]

    def learned_versions(self) -> list[int]:
        """Versions that learning made and that came into force, in order of first use."""
        policies = [p.policy for p in self.published if p.policy]
        learned = {p.version for p in policies if p.provenance.get("origin") == LEARNED}
        versions = dict.fromkeys(version for _, version in self.policy_switches())
        return [version for version in versions if version in learned]

    @property
    def produced(self) -> int:
        """Events the worker made."""
        return self.statuses[-1].events_made if self.statuses else 0

    @property
    def consumed(self) -> int:
        """Distinct events the learner took in."""
        return self.learner[-1].events_consumed if self.learner else 0


def _first_of_each(statuses: list[Timed], name: str) -> list[Timed]:
    """The first of each run of statuses that say the same under ``name``."""
    return [next(group) for _, group in itertools.groupby(statuses, key=attrgetter(name))]


def _append(records: list[Timed], record: Timed, keep_s: float) -> None:
    oldest = record.time - keep_s
    is_stale = bool(records) and record.time < records[-1].time - keep_s
    if is_stale or record.time > time.time() + AHEAD_S:
        return
    records.append(record)
    if records[0].time < oldest:
        del records[: next(i for i, r in enumerate(records) if r.time >= oldest)]


FOLLOWED: Final = (DRAFTS, POLICY, STATUS, TRIALS)
POLL_S: Final = 0.25
PAUSE_S: Final = 5.0
_limited_log: Final = LimitedLog()


def ingest(ledger: Ledger, topic: str, key: bytes | None, value: bytes | None, at: float) -> None:
    """Write one record, of ``at`` in seconds since the epoch, into ``ledger``; one that cannot be
    read is counted. Never raises."""
    try:
        if topic == POLICY.name:
            scope, _, role = (key or b"").decode(errors="replace").partition("/")
            ledger.add_policy(at, scope, role, unpack(value)[0] if value else None)
        elif value and topic == DRAFTS.name:
            ledger.add_drafts(decode_batch(value))
        elif value and topic == STATUS.name:
            ledger.add_status(decode_status(value))
        elif value and topic == TRIALS.name:
            ledger.add_round(decode_round(value))
    except ContractError:
        ledger.refused += 1
    except Exception:  # noqa: BLE001 -- whatever it is, a page must not go stale
        ledger.refused += 1
        _limited_log.exception("a record was passed over: it cannot be shown")


def _topic_ids(consumer: Any) -> dict[Any, Any]:
    """The id of its topic by each partition there is."""
    layouts = [layout_of(consumer, topic.name) for topic in FOLLOWED]
    return {place: topic_id for topic_id, places in layouts for place in places}


class Observer:
    """Reads in a thread, while its block lasts.

    Policies are read from the beginning, statuses and rounds from ``since_s`` ago, drafts, which
    are many, from the end; all topics from the beginning where it is infinite, and again when a
    broker that was away comes back. Else it goes on where it was.
    """

    def __init__(self, kafka: KafkaSettings, ledger: Ledger, since_s: float = 0.0) -> None:
        self.kafka = kafka
        self.ledger = ledger
        self.since_s = since_s
        self._next: dict[tuple[Any, Any], int] = {}  # offset by partition and id of its topic
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="observer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(5.0)

    def _read(self) -> None:
        while not self._closing.is_set():
            try:
                if listens(self.kafka):  # a client that finds no broker leaves sockets open
                    consumer = open_consumer(self.kafka, "observer", bootstrap_timeout_ms=20_000)
                    try:
                        self._follow(consumer)
                    finally:
                        close(consumer)
            except AWAY:
                pass
            except Exception:  # noqa: BLE001 -- as above
                _limited_log.exception("the topics cannot be read: tried again")
            self._closing.wait(PAUSE_S)

    def _follow(self, consumer: Any) -> None:
        for topic in FOLLOWED:
            partitions_of(consumer, topic.name)
        places = _topic_ids(consumer)
        is_whole = math.isinf(self.since_s)
        consumer.assign(list(places))
        consumer.seek_to_end(*places)
        consumer.seek_to_beginning(*(p for p in places if is_whole or p.topic == POLICY.name))
        if not is_whole:
            past = [p for p in places if p.topic in (STATUS.name, TRIALS.name)]
            moment = int((time.time() - self.since_s) * 1000)
            for place, found in consumer.offsets_for_times(dict.fromkeys(past, moment)).items():
                if found is not None:
                    consumer.seek(place, found.offset)
        for known in () if is_whole else self._next.keys() & places.items():
            consumer.seek(known[0], self._next[known])
        while not self._closing.is_set():
            found = {known: consumer.position(known[0]) for known in places.items()}
            self._next |= {known: at for known, at in found.items() if at is not None}
            if (there := _topic_ids(consumer)) != places:
                places = there
                consumer.assign(list(places))
                for known in places.items():  # what is new from its beginning
                    consumer.seek(known[0], self._next.get(known, 0))
            records = fetch(consumer, 0)
            for record in records:
                seconds = record.timestamp / 1000.0
                ingest(self.ledger, record.topic, record.key, record.value, seconds)
            if not records:
                self._closing.wait(POLL_S)

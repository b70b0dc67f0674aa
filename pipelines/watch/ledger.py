"""Observations of a running service: statuses, drafts, rounds, policies and phases, and a consumer
that records them.

The consumer joins no group, so it takes no records from others.
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
"""Variants whose steps the serving policy decided: outside of trials, and in its own blocks."""
NUMBERS: Final = (
    *("number", "time", "policy_version", "draft_len", "predicted", "accepted"),
    *("verified_len", "model_accepted"),
)
KEPT_NUMBERS: Final = 100_000  # event numbers to remember; a repeated record arrives within seconds

KEPT_PUBLICATIONS: Final = 256
AHEAD_S: Final = 60.0
"""Machines' clocks differ by less. Records from further in the future would never expire."""
LEARNED: Final = "learner"  # origin, in its provenance, of a policy that the learner trained


@dataclass(frozen=True)
class Calibration:
    """Means over ``drafts`` cache drafts: ``predicted`` and ``accepted`` tokens, and the absolute
    ``error``."""

    drafts: int
    predicted: float
    accepted: float
    error: float


Timed = TypeVar("Timed", WorkerStatus, LearnerStatus, Round)


@dataclass(frozen=True)
class Phase:
    """A window of traffic; ``ended`` is infinite while it lasts. Phases of one ``kind`` are
    compared as one."""

    name: str
    workloads: tuple[str, ...]
    kind: str
    began: float  # seconds since the epoch
    ended: float = math.inf


@dataclass(frozen=True)
class Publication:
    """One record of the policy topic; ``policy`` is None if the role's policy was withdrawn."""

    time: float  # seconds since the epoch
    scope: str
    role: str
    policy: Policy | None


@dataclass
class Ledger:
    """All observations in order of arrival; written by one thread, read by another.

    They are of one ``worker``, or of all if it is "". Records ``keep_s`` older than the newest of
    their kind are dropped, and records :data:`AHEAD_S` in the future are ignored. ``refused``
    counts unreadable records, ``seen`` distinct draft events of all variants.
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
        """The scope of the worker seen last; "" before any."""
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
            number, at, version, length, predicted, accepted, verified, model, *names_of = event
            arm, side, censored = names_of
            if (batch.origin.life, number) in self._numbers:
                continue
            self._numbers[batch.origin.life, number] = None
            self.seen += 1
            counts = self._seconds.setdefault(int(at), Counter())
            if side == arm == MODEL and not math.isnan(model):
                counts[MODEL, int(verified), int(model)] += 1
            if side in OWN:
                counts[arm] += 1
                if length and not censored:
                    sums = (1, predicted, accepted, abs(predicted - accepted))
                    counts.update({(version, place): n for place, n in enumerate(sums)})
        while len(self._numbers) > KEPT_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        if len(self._seconds) > 2 * self.keep_s:
            now = time.time()
            # drop seconds that are too old, and future ones, which would never expire
            self._seconds = {s: c for s, c in self._seconds.items() if abs(now - s) <= self.keep_s}

    def sums(self, began: float, ended: float) -> Counter[Any]:
        """Counts of the serving policy's decisions between two times, in whole seconds: cycles by
        arm, and sums by (version, field) of :class:`Calibration`."""
        total = Counter[Any]()
        for second, counts in self._seconds.copy().items():
            if began <= second < ended:
                total.update(dict(counts))
        return total

    def calibration(self, began: float, ended: float) -> dict[int, Calibration]:
        """By policy version, over its cache drafts with complete labels between two times, in whole
        seconds."""
        sums = self.sums(began, ended)
        counts = {
            key[0]: n for key, n in sums.items() if isinstance(key, tuple) and key[1:] == (0,)
        }
        return {v: Calibration(n, *(sums[v, i] / n for i in (1, 2, 3))) for v, n in counts.items()}

    def acceptance(self, spans: Iterable[tuple[float, float]], length: int) -> list[float]:
        """The acceptance probability [length] of each token of a model draft, given those before
        it.

        It covers the given spans of time, under EAGLE3 decoding, which drafts wherever it decides.
        A position without observations counts as one of two.
        """
        at_risk, accepted = [2] * length, [1] * length
        for began, ended in spans:
            for key, drafts in self.sums(began, ended).items():
                if isinstance(key, tuple) and key[0] == MODEL:
                    for place in range(min(key[1], key[2] + 1, length)):
                        at_risk[place] += drafts
                        accepted[place] += drafts * (place < key[2])
        return [right / all_ for right, all_ in zip(accepted, at_risk, strict=True)]

    def add_status(self, status: WorkerStatus | LearnerStatus) -> None:
        """Record a worker's status, or one of its scope's learner."""
        if isinstance(status, WorkerStatus):
            if not self.worker or status.process == self.worker:
                _append(self.statuses, status, self.keep_s)
        elif not self.statuses or status.scope in ("", self.scope):
            _append(self.learner, status, self.keep_s)

    def add_round(self, one: Round) -> None:
        """Record a round of a trial."""
        if self._is_mine(one.worker, one.scope):
            _append(self.rounds, one, self.keep_s)

    def add_policy(self, at: float, scope: str, role: str, policy: Policy | None) -> None:
        """Record that a policy was published ``at`` seconds since the epoch, or withdrawn: None."""
        at = min(max(at, 0.0), time.time())  # the sender sets a record's time
        self._published.append(Publication(at, scope, role, policy))
        del self._published[:-KEPT_PUBLICATIONS]

    @property
    def published(self) -> list[Publication]:
        """The last publications for the scope, in order."""
        return [p for p in list(self._published) if p.scope in (self.scope, ANY_SCOPE)]

    def _is_mine(self, worker: str, scope: str) -> bool:
        return (not self.worker or worker == self.worker) and self.scope in ("", scope)

    def policy_switches(self) -> list[tuple[float, int]]:
        """When the worker seen last began to serve each policy version, including the first."""
        mine = [s for s in list(self.statuses) if s.process == self.statuses[-1].process]
        firsts = _first_of_each(mine, "policy_version")
        return [(s.policy_applied_at or s.time, s.policy_version) for s in firsts]

    def named(self, version: int) -> str:
        """``v3``; for version 0, which no registry holds, also what it is."""
        if version:
            return f"v{version}"
        is_first = any(s.policy_role == FIRST for s in list(self.statuses) if not s.policy_version)
        return "v0, the policy that ships" if is_first else "v0, nothing learned"

    def alarms(self) -> list[float]:
        """When the learner detected drift, seconds since the epoch."""
        return sorted({s.last_drift_at for s in list(self.learner) if s.drifts})

    def rollout_moves(self) -> list[tuple[float, str]]:
        """What the learner did with policies on trial, in its own words."""
        firsts = _first_of_each(list(self.learner), "rollout_said")
        return [(s.time, s.rollout_said) for s in firsts if s.rollout_said]

    def learned_versions(self) -> list[int]:
        """Versions that the learner trained and the worker served, in order of first use."""
        policies = [p.policy for p in self.published if p.policy]
        learned = {p.version for p in policies if p.provenance.get("origin") == LEARNED}
        versions = dict.fromkeys(version for _, version in self.policy_switches())
        return [version for version in versions if version in learned]

    @property
    def produced(self) -> int:
        """Events that the worker made."""
        return self.statuses[-1].events_made if self.statuses else 0

    @property
    def consumed(self) -> int:
        """Distinct events that the learner read."""
        return self.learner[-1].events_consumed if self.learner else 0


def _first_of_each(statuses: list[Timed], name: str) -> list[Timed]:
    """The first of each run of statuses with the same value of ``name``."""
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
    """Record one record in ``ledger``; an unreadable one is counted. Never raises.

    Args:
        at: the record's time, seconds since the epoch.
    """
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
        _limited_log.exception("a record was skipped: it cannot be shown")


def _topic_ids(consumer: Any) -> dict[Any, Any]:
    """The topic id of every partition."""
    layouts = [layout_of(consumer, topic.name) for topic in FOLLOWED]
    return {place: topic_id for topic_id, places in layouts for place in places}


class Observer:
    """Reads the topics in a thread while its block lasts.

    Policies are read from the beginning, statuses and rounds from ``since_s`` ago, drafts from the
    end. If ``since_s`` is infinite, all topics are read from the beginning, and again after a
    broker was away; otherwise reading continues where it stopped.
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
                if listens(self.kafka):  # without a broker the client would leak sockets
                    consumer = open_consumer(self.kafka, "observer", bootstrap_timeout_ms=20_000)
                    try:
                        self._follow(consumer)
                    finally:
                        close(consumer)
            except AWAY:
                pass
            except Exception:  # noqa: BLE001 -- as above
                _limited_log.exception("the topics cannot be read; retrying")
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
            for place, positions in consumer.offsets_for_times(dict.fromkeys(past, moment)).items():
                if positions is not None:
                    consumer.seek(place, positions.offset)
        for known in () if is_whole else self._next.keys() & places.items():
            consumer.seek(known[0], self._next[known])
        while not self._closing.is_set():
            positions = {known: consumer.position(known[0]) for known in places.items()}
            self._next |= {known: at for known, at in positions.items() if at is not None}
            if (current := _topic_ids(consumer)) != places:
                places = current
                consumer.assign(list(places))
                for known in places.items():  # new partitions from their beginning
                    consumer.seek(known[0], self._next.get(known, 0))
            records = fetch(consumer, 0)
            for record in records:
                seconds = record.timestamp / 1000.0
                ingest(self.ledger, record.topic, record.key, record.value, seconds)
            if not records:
                self._closing.wait(POLL_S)

"""Leases on scopes: one learner promotes and publishes for a scope.

Leases are records of a compacted topic, whose first partition all learners read in one order. A
learner claims a scope with the next term under the scope's key; the first claim in the log wins,
and its holder renews it. A holder counts ``TTL_SECONDS`` from when it *sent* a claim that it has
read back, others from when they *read* it, each by its own clock: so no two hold at once (Gray and
Cheriton 1989). Publication numbers begin with the term.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from decoder.contracts.bundle import LEAP, NUMBERS_A_TERM
from decoder.contracts.fields import NAME_LENGTH
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import LEASE
from decoder.kafka.clients import AWAY, close, log_error, open_producer
from decoder.kafka.compacted import Compacted
from decoder.limited_log import LimitedLog
from learner.background import Background

log = logging.getLogger(__name__)

TTL_SECONDS: Final = 20.0
"""A failed learner is replaced after this and a renewal: within half a minute."""
RENEW_SECONDS: Final = 4.0
LOOK_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 5.0
MARGIN_SECONDS: Final = 10.0
"""Time left of a lease when a publication begins: more than a publication may take."""
MAX_TERM: Final = 2**31  # keeps publication numbers within their bound
MAX_SCOPES: Final = 100_000
"""The most recently claimed: anybody may invent scopes, and living holders renew."""
BEATS: Final = 8  # claims whose sending time is remembered until they are read back


@dataclass(frozen=True)
class Claim:
    """A record of the topic; ``beat`` counts the records of its holder."""

    holder: str
    term: Annotated[int, Field(gt=0, le=MAX_TERM)]
    beat: Annotated[int, Field(ge=0, le=2**53)]
    released: bool = False


CLAIM: Final = TypeAdapter(Claim)


def read_claim(value: bytes | None) -> Claim | None:
    """Parse a record; None for an invalid one."""
    try:
        claim = CLAIM.validate_json(value or b"", strict=True)
    except ValidationError:
        return None
    return claim if len(claim.holder) <= NAME_LENGTH else None


def supersedes(claim: Claim, held: Claim | None) -> bool:
    """Whether ``claim``, read after ``held``, replaces it. The first claim of a term wins; a term
    far ahead is forged, and would leave no terms after it."""
    last = 0 if held is None else held.term
    if last < claim.term <= last + LEAP // NUMBERS_A_TERM:
        return True
    if held is None:
        return False
    same = (claim.term, claim.holder) == (held.term, held.holder)
    return same and claim.beat > held.beat


class Lease:
    """The leases of one learner, claimed and renewed on a thread: see :meth:`renew_in_background`.

    ``holder`` is the id of a learner that runs once at a time: see ``learner.state_dir``. ``ready``
    says whether all records that existed at first have been read.
    """

    def __init__(self, kafka: KafkaSettings, holder: str) -> None:
        self.holder = holder
        self.ready = False
        self._kafka = kafka
        self._topic = Compacted(kafka, LEASE, self._receive)
        self._producer: Any = None
        self._claims: dict[str, Claim] = {}
        self._read_at: dict[str, float] = {}
        self._terms: dict[str, int] = {}  # claimed by this process
        self._sent: dict[str, deque[tuple[int, float]]] = {}  # beat and monotonic time
        self._until: dict[str, tuple[float, int]] = {}  # monotonic end and term of our leases
        self._background = Background("lease")
        self._beat = 0
        self._own_read_at = time.monotonic()
        self._limited_log = LimitedLog()
        self._look_at = 0.0

    def renew_in_background(
        self, wanted: Callable[[], Mapping[str, int]], ours: Callable[[str], bool]
    ) -> None:
        """Start :meth:`renew` if due, without waiting. If no longer called, leases expire."""
        if self._background.idle() and time.monotonic() >= self._look_at:
            self._background.submit(partial(self.renew, wanted(), ours))

    def renew(
        self, wanted: Mapping[str, int], ours: Callable[[str], bool] = lambda scope: True
    ) -> None:
        """Read new records, then claim or renew scopes that are due.

        Args:
            wanted: by scope, the highest term known from elsewhere: a recreated topic has lost its
                own.
            ours: whether this learner may hold a scope; others are released.
        """
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        try:
            if self._topic.read():
                self.ready = True
                for scope, term in wanted.items():
                    self._claim_or_renew(scope, term)
                self._release(scope for scope in self._terms if not ours(scope))
        except AWAY:  # already logged
            self._look_at = time.monotonic() + RETRY_SECONDS

    def holds(self, scope: str, margin: float = 0.0) -> bool:
        """Whether this learner holds ``scope`` for ``margin`` more seconds. Thread-safe."""
        return self.term(scope, margin) > 0

    def term(self, scope: str, margin: float = 0.0) -> int:
        """The term of our lease on ``scope``, valid for ``margin`` more seconds; 0 without one.
        Thread-safe."""
        until, term = self._until.get(scope, (0.0, 0))
        return term if time.monotonic() + margin < until else 0

    def holder_of(self, scope: str) -> str:
        """The last known holder of ``scope``, or ""."""
        claim = self._claims.get(scope)
        return "" if claim is None or claim.released else claim.holder

    def close(self) -> None:
        """Release all leases, and disconnect."""
        if not self._background.close():
            return
        try:
            self._release(self._terms)
        except AWAY as error:
            log.debug("leases are left to expire: %s", error)
        self._topic.close()
        close(self._producer)

    def _release(self, scopes: Iterable[str]) -> None:
        for scope in filter(self.holds, scopes):
            self._write(scope, released=True)
            del self._until[scope]

    def _claim_or_renew(self, scope: str, known_term: int) -> None:
        now = time.monotonic()
        sent = self._sent.get(scope)
        if sent and now < sent[-1][1] + RENEW_SECONDS:
            return
        claim = self._claims.get(scope)
        if claim is None:
            self._terms[scope] = known_term + 1
        elif claim.term < known_term or not self.holds(scope, RENEW_SECONDS):
            # a lease that may expire before the renewal is read is claimed anew
            ours = claim.holder == self.holder  # also of the process before a restart
            if not (claim.released or ours or now >= self._read_at[scope] + TTL_SECONDS):
                return
            self._terms[scope] = max(claim.term, known_term) + 1
            self._until.pop(scope, None)
        self._write(scope)

    def _write(self, scope: str, released: bool = False) -> None:
        self._beat += 1
        claim = Claim(self.holder, self._terms[scope], self._beat, released)
        sent = self._sent.setdefault(scope, deque(maxlen=BEATS))
        sent.append((claim.beat, time.monotonic()))
        if len(sent) == BEATS and sent[0][1] > self._own_read_at:
            self._limited_log.warning(
                f"topic {LEASE.name} does not retain records: none of the last {BEATS} claims for "
                "scope %s was read back, and nothing is published without a lease. Check who else "
                "writes or deletes there, and run hvd doctor.", scope,
            )  # fmt: skip
        try:
            if self._producer is None:
                self._producer = open_producer(
                    self._kafka, "lease", bootstrap_timeout_ms=1_000,
                    max_block_ms=500, delivery_timeout_ms=4_000, request_timeout_ms=2_000,
                )  # fmt: skip
            future = self._producer.send(
                LEASE.name, value=CLAIM.dump_json(claim), key=scope.encode(), partition=0,
                headers=LEASE.headers,
            )  # fmt: skip
        except AWAY as error:
            self._log_refusal(error)
            raise
        future.add_errback(self._log_refusal)

    def _log_refusal(self, error: BaseException) -> None:
        log_error(self._limited_log, LEASE.name, "written", error)

    def _ends_at(self, scope: str, claim: Claim) -> float:
        """Monotonic end of our lease by ``claim``; 0 if it is none."""
        if claim.released or (claim.holder, claim.term) != (self.holder, self._terms.get(scope)):
            return 0.0
        sent = dict(self._sent[scope]).get(claim.beat)
        return 0.0 if sent is None else sent + TTL_SECONDS

    def _receive(self, record: Any) -> None:
        claim = read_claim(record.value)
        scope = (record.key or b"").decode(errors="replace")
        if claim is not None and claim.holder == self.holder:
            self._own_read_at = time.monotonic()
        before = self._claims.get(scope)
        if claim is None or len(scope) > NAME_LENGTH or not supersedes(claim, before):
            return
        if before is None or before.holder != claim.holder:
            log.info("scope %s: held by %s, term %d", scope, claim.holder, claim.term)
        self._claims.pop(scope, None)
        self._claims[scope] = claim
        self._read_at[scope] = time.monotonic()
        if len(self._claims) > MAX_SCOPES:
            oldest = next(iter(self._claims))
            for known in (self._claims, self._read_at, self._until):
                known.pop(oldest, None)
        self._until[scope] = self._ends_at(scope, claim), claim.term

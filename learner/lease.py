"""One learner a scope: leases on a compacted topic, in whose first partition all read one order.

Whoever wants a scope writes a claim with the next term under the scope's key; of several, the first
in the log has it. A holder renews. It holds for ``TTL_SECONDS`` from when it *sent* what it has
read back, others count from when they *read* it, each on a clock of its own: so no two hold at once
(leases of Gray and Cheriton, 1989). A term is also what a publication's number begins with.
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
"""A learner that was lost is replaced after this and a renewal: within half a minute."""
RENEW_SECONDS: Final = 4.0
LOOK_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 5.0
MARGIN_SECONDS: Final = 10.0
"""What must be left of a lease for a publication to begin: longer than one may be under way."""
LAST_TERM: Final = 2**31
"""Its publications have numbers within their bound."""
SCOPES: Final = 100_000
"""Whose leases are remembered, the ones heard of last: anybody may make scopes up, and whoever
lives renews his."""
BEATS: Final = 8
"""Renewals whose sending is remembered until they are read back."""


@dataclass(frozen=True)
class Claim:
    """A record of the topic: ``beat`` counts what its holder has written."""

    holder: str
    term: Annotated[int, Field(gt=0, le=LAST_TERM)]
    beat: Annotated[int, Field(ge=0, le=2**53)]
    released: bool = False


CLAIM: Final = TypeAdapter(Claim)


def read_claim(value: bytes | None) -> Claim | None:
    """A record's claim; None where it holds none, or one that nobody would remember."""
    try:
        claim = CLAIM.validate_json(value or b"", strict=True)
    except ValidationError:
        return None
    return claim if len(claim.holder) <= NAME_LENGTH else None


def counts(claim: Claim, held: Claim | None) -> bool:
    """Whether ``claim``, read after ``held``, takes its place: of one term the first stays, and a
    term that leaps is nobody's count: there would be none after it."""
    last = 0 if held is None else held.term
    if last < claim.term <= last + LEAP // NUMBERS_A_TERM:
        return True
    if held is None:
        return False
    same = (claim.term, claim.holder) == (held.term, held.holder)
    return same and claim.beat > held.beat


class Lease:
    """The leases of one learner, which a thread of its own claims and renews: see :meth:`keep`."""

    def __init__(self, kafka: KafkaSettings, holder: str) -> None:
        """``holder`` names a place that one process at a time can have: see ``learner.home``."""
        self.holder = holder
        self.known = False
        """Whether all that lay on the topic at first has been read."""
        self._kafka = kafka
        self._log = Compacted(kafka, LEASE, self._saw)
        self._producer: Any = None
        self._held: dict[str, Claim] = {}
        self._read_at: dict[str, float] = {}
        self._terms: dict[str, int] = {}  # claimed by this process
        self._sent: dict[str, deque[tuple[int, float]]] = {}  # beat, and when
        self._until: dict[str, tuple[float, int]] = {}  # by our clock, and the term, where ours
        self._background = Background("lease")
        self._beat = 0
        self._own_read_at = time.monotonic()
        self._limited_log = LimitedLog()
        self._look_at = 0.0

    def keep(self, wanted: Callable[[], Mapping[str, int]], ours: Callable[[str], bool]) -> None:
        """Have :meth:`turn` called, where it is time, with what is ``wanted`` now; waits for
        nothing. A learner that calls it no more loses its leases."""
        if self._background.idle() and time.monotonic() >= self._look_at:
            self._background.offer(partial(self.turn, wanted(), ours))

    def turn(
        self, wanted: Mapping[str, int], ours: Callable[[str], bool] = lambda scope: True
    ) -> None:
        """Read what was written, then claim or renew scopes as far as it is time.

        Args:
            wanted: by scope, the highest term that is known otherwise: a topic that was made anew
                has forgotten its own.
            ours: whether a scope is for us to hold; what is held and is not, is given up.
        """
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        try:
            if self._log.read():
                self.known = True
                for scope, known in wanted.items():
                    self._claim_or_renew(scope, known)
                self._give_up(scope for scope in self._terms if not ours(scope))
        except AWAY:  # the log has it
            self._look_at = time.monotonic() + RETRY_SECONDS

    def holds(self, scope: str, margin: float = 0.0) -> bool:
        """Whether ``scope`` is ours, and for ``margin`` seconds to come. Any thread may ask."""
        return self.term(scope, margin) > 0

    def term(self, scope: str, margin: float = 0.0) -> int:
        """The term under which ``scope`` is ours, and for ``margin`` seconds to come; 0 where it is
        not. Any thread may ask."""
        until, term = self._until.get(scope, (0.0, 0))
        return term if time.monotonic() + margin < until else 0

    def holder_of(self, scope: str) -> str:
        """Who holds ``scope`` for all that is known, or ""."""
        claim = self._held.get(scope)
        return "" if claim is None or claim.released else claim.holder

    def close(self) -> None:
        """Give up what is held, so that nobody waits for it, and leave the broker."""
        if not self._background.close():
            return
        try:
            self._give_up(self._terms)
        except AWAY as error:
            log.debug("leases run out by themselves: %s", error)
        self._log.close()
        close(self._producer)

    def _give_up(self, scopes: Iterable[str]) -> None:
        for scope in filter(self.holds, scopes):
            self._write(scope, released=True)
            del self._until[scope]

    def _claim_or_renew(self, scope: str, known: int) -> None:
        now = time.monotonic()
        sent = self._sent.get(scope)
        if sent and now < sent[-1][1] + RENEW_SECONDS:
            return
        claim = self._held.get(scope)
        if claim is None:
            self._terms[scope] = known + 1
        elif claim.term < known or not self.holds(scope, RENEW_SECONDS):
            # A term that may run out before it is renewed is not renewed: somebody else may claim.
            ours = claim.holder == self.holder  # of the process that was here before this one
            free = claim.released or ours or now >= self._read_at[scope] + TTL_SECONDS
            if not free:
                return
            self._terms[scope] = max(claim.term, known) + 1
            self._until.pop(scope, None)
        self._write(scope)

    def _write(self, scope: str, released: bool = False) -> None:
        self._beat += 1
        claim = Claim(self.holder, self._terms[scope], self._beat, released)
        sent = self._sent.setdefault(scope, deque(maxlen=BEATS))
        sent.append((claim.beat, time.monotonic()))
        if len(sent) == BEATS and sent[0][1] > self._own_read_at:
            self._limited_log.warning(
                f"topic {LEASE.name} does not keep what is written: of the last {BEATS} claims for "
                "scope %s none was read back, and without a lease nothing is published. See who "
                "else writes or deletes there, and let hvd doctor look at the topic.", scope,
            )  # fmt: skip
        try:
            if self._producer is None:
                self._producer = open_producer(
                    self._kafka, "lease", bootstrap_timeout_ms=1_000,
                    max_block_ms=500, delivery_timeout_ms=4_000, request_timeout_ms=2_000,
                )  # fmt: skip
            under_way = self._producer.send(
                LEASE.name, value=CLAIM.dump_json(claim), key=scope.encode(), partition=0,
                headers=LEASE.headers,
            )  # fmt: skip
        except AWAY as error:
            self._refused(error)
            raise
        under_way.add_errback(self._refused)

    def _refused(self, error: BaseException) -> None:
        log_error(self._limited_log, LEASE.name, "written", error)

    def _ends_at(self, scope: str, claim: Claim) -> float:
        """Until when ``claim`` is our lease; 0 where it is none."""
        if claim.released or (claim.holder, claim.term) != (self.holder, self._terms.get(scope)):
            return 0.0
        sent = dict(self._sent[scope]).get(claim.beat)
        return 0.0 if sent is None else sent + TTL_SECONDS

    def _saw(self, record: Any) -> None:
        claim = read_claim(record.value)
        scope = (record.key or b"").decode(errors="replace")
        if claim is not None and claim.holder == self.holder:
            self._own_read_at = time.monotonic()
        if claim is None or len(scope) > NAME_LENGTH or not counts(claim, self._held.get(scope)):
            return
        before = self._held.get(scope)
        if before is None or before.holder != claim.holder:
            log.info("scope %s: held by %s, term %d", scope, claim.holder, claim.term)
        self._held.pop(scope, None)
        self._held[scope] = claim
        self._read_at[scope] = time.monotonic()
        if len(self._held) > SCOPES:
            forgotten = next(iter(self._held))
            for known in (self._held, self._read_at, self._until):
                known.pop(forgotten, None)
        self._until[scope] = self._ends_at(scope, claim), claim.term

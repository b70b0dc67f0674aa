"""A thread that owns all requests to MLflow, so that the loop never waits for the server.

The loop hands over registrations and moves, asks for policies, and collects answers. What was
handed over waits, through outages and restarts, until it is settled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from queue import Empty, SimpleQueue
from typing import Final

from decoder.contracts.errors import HvdError, PolicyRefused, RegistryError
from decoder.limited_log import LimitedLog
from learner.release.registrations import (
    KEPT,
    LOST,
    ROLLED_BACK,
    Answer,
    Move,
    Moved,
    Registration,
    Settled,
    carry_out,
    operator_override,
)
from learner.release.registry import Registry, Standing, digest_of
from learner.release.registry.moves import last_of

log = logging.getLogger(__name__)

FOLLOW_SECONDS: Final = 3.0
"""How soon an alias that a person moved is noticed; one query of the registry a page of models."""
RETRY_SECONDS: Final = 15.0
RESTS: Final = 4.0
"""Times the processor's time that listing the models took: of ten thousand that is seconds, in
which the learner's loop stands still."""
TRIES: Final = 10
"""After so many a move is given up; a registration is counted as refused, and waits."""
LONGEST_PAUSE_SECONDS: Final = 600.0
"""Between two tries of a registration that MLflow refuses; the pause doubles with each."""
WAITING: Final = 64
"""Registrations kept, each some ten kilobytes: what waits stays."""
REST: Final = timedelta(hours=1)
"""Nothing is tried for so long after a champion was rolled back, nor a version again against the
same champion."""
CLOSE_SECONDS: Final = 5.0
"""For the request under way. One that is cut off is made again at the next start: no twin."""


class Registrar:
    """Uses ``registry`` in one thread, from :meth:`start` to :meth:`close`.

    That thread asks ``may`` whether it may write a scope, and ``busy`` whether a policy of a scope
    is being compared. ``by`` signs moves of aliases, ``trial`` says whether winners are tried
    first, ``keep`` is how many versions of a scope stay. ``away_since`` is when MLflow stopped
    answering, in seconds since the epoch, or 0. ``given_up`` counts what was handed over and not
    done, by reason: ``refused`` by MLflow ten times, ``crowded`` out by those that wait,
    ``unreadable`` policies, a ``person``'s word against it.
    """

    def __init__(
        self,
        registry: Registry,
        may: Callable[[str], bool],
        waiting: Iterable[Registration] = (),
        busy: Callable[[str], bool] = lambda scope: False,
        by: str = "learner",
        trial: bool = False,
        keep: int = 20,
    ) -> None:
        self.away_since = 0.0
        self.given_up: Counter[str] = Counter()
        self._registry = registry
        self._may = may
        self._busy = busy
        self._by, self._trial, self._keep = by, trial, keep
        self._waiting = OrderedDict((each.name, each) for each in waiting)
        self._failures: dict[tuple[str, str], tuple[int, float]] = {}
        """By scope and what is tried: how often it failed, and when it is tried again."""
        self._limited_log = LimitedLog()
        self._unusable: set[tuple[str, int]] = set()
        self._asked: set[tuple[str, int]] = set()
        self._moves: list[Move] = []  # a few of each scope that is compared
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._rest_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="hvd-registrar", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the request under way; what still waits stays in :meth:`waiting`."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def hand(self, registration: Registration) -> None:
        """Have it registered as soon as MLflow answers and the scope is ours.

        Where ``WAITING`` wait, a winner takes the place of a first policy, which is handed over
        again while its scope has no champion; what else comes is passed over.
        """
        key = registration.name
        with self._lock:
            if key not in self._waiting and len(self._waiting) >= WAITING:
                first = next((k for k, each in self._waiting.items() if not each.against), None)
                if first is None and registration.against:
                    self.given_up["crowded"] += 1
                    self._limited_log.warning("winners are passed over: %d wait", WAITING)
                if first is None or not registration.against:
                    return
                del self._waiting[first]
            self._waiting[key] = registration
        self._wake.set()

    def waiting(self) -> list[Registration]:
        """What is not settled, oldest first: it belongs into the checkpoint."""
        with self._lock:
            return list(self._waiting.values())

    def move(self, move: Move) -> None:
        """Have it carried out, after those before it, as soon as MLflow answers."""
        with self._lock:
            self._moves.append(move)
        self._wake.set()

    def ask(self, wanted: Iterable[tuple[str, int]]) -> None:
        """Have these versions (scope, version) loaded."""
        asked = set(wanted)
        with self._lock:
            fresh = not asked <= self._asked
            self._asked = asked
        if fresh:
            self._wake.set()

    def answers(self) -> list[Answer]:
        """What has been answered since the last call."""
        answers: list[Answer] = []
        while True:
            try:
                answers.append(self._answers.get_nowait())
            except Empty:
                return answers

    def _run(self) -> None:
        while not self._stopping.is_set():
            pause = FOLLOW_SECONDS
            try:
                self._turn()
                if self.away_since:
                    log.info("MLflow answers again")
                self.away_since = 0.0
            except RegistryError as error:
                pause = RETRY_SECONDS
                if not self.away_since:
                    self.away_since = time.time()
                    log.warning("%s; %d registrations wait", error, len(self._waiting))
            except Exception:  # a bug here must not leave a learner that never promotes again
                pause = RETRY_SECONDS
                log.exception("the registry's thread failed and goes on")
            self._stopping.wait(self._rest_seconds)
            self._wake.wait(pause)
            if pause == RETRY_SECONDS:
                self._stopping.wait(min(pause, 1.0))  # what is handed over must not hurry outages
            self._wake.clear()

    def _turn(self) -> None:
        began = time.thread_time()
        standings = self._registry.standings()  # raises when MLflow is away, and then all wait
        self._rest_seconds = RESTS * (time.thread_time() - began)
        with self._lock:
            moves, asked = list(self._moves), sorted(self._asked)
        for move in moves:
            if not self._stopping.is_set():
                self._carry_out(move)
        if moves:
            standings = self._registry.standings()
        now = time.monotonic()
        waiting = [r for r in self.waiting() if now >= self._failures.get(r.name, (0, now))[1]]
        ours = [r for r in waiting if self._is_due(r, standings)]
        for registration in ours:
            if not self._stopping.is_set():
                self._try(registration, standings)
        self._answers.put(self._registry.standings() if ours else standings)
        for scope, version in asked:
            if self._stopping.is_set():
                return
            self._load(scope, version)

    def _is_due(self, registration: Registration, standings: Mapping[str, Standing]) -> bool:
        """Whether it can be registered now.

        A candidate waits until its scope has a champion, while another is compared, and for a while
        after a roll-back, or two that are nearly alike would alternate. The first policy comes back
        without that. All wait behind a pin, or each winner meanwhile would become a version.
        """
        scope = registration.policy.scope
        standing = standings.get(scope, Standing(scope))
        if not self._may(scope) or standing.pinned is not None:
            return False
        if not registration.against:
            return True
        tries = self._trial and not registration.is_return
        return standing.served is not None and (not tries or self._may_try(standing))

    def _may_try(self, standing: Standing) -> bool:
        """Whether alias trial is nobody else's, and nothing is compared or was rolled back."""
        last, tried = (last_of(standing.tags, alias) for alias in ("champion", "trial"))
        ours = tried is not None and (tried.after, tried.by) == (standing.trial, self._by)
        rests = last is not None and last.why.startswith(ROLLED_BACK) and _is_recent(last.at)
        free = standing.trial in (None, standing.champion) or ours
        return free and not rests and not self._busy(standing.scope)

    def _carry_out(self, move: Move) -> None:
        """Move aliases, or try again at the next turn; after ``TRIES`` failures it is given up."""
        key = (move.scope, "a move of its aliases")
        try:
            ours = self._may(move.scope)
            done = carry_out(self._registry, move) if ours else Moved(move, LOST)
            self.given_up["person"] += ours and bool(done.refusal)
        except Exception as error:  # noqa: BLE001 -- as in _try
            if self._failed(key, error) < TRIES:
                return
            self._count(key, "refused", error, "is given up")
            done = Moved(move, str(error) or repr(error))
        self._failures.pop(key, None)
        with self._lock:
            self._moves.remove(move)
        self._answers.put(done)

    def _try(self, registration: Registration, standings: Mapping[str, Standing]) -> None:
        """Register it. One that MLflow refuses, as all are where writes are forbidden, waits longer
        after each failure and blocks no other."""
        scope, key = registration.policy.scope, registration.name
        try:
            settled = self._settled(registration, standings.get(scope, Standing(scope)))
        except PolicyRefused as error:
            self._count(key, "unreadable", error, "is given up")
        except Exception as error:  # noqa: BLE001 -- nor a bug that one scope's state brings out
            if self._failed(key, error) == TRIES:
                self._count(key, "refused", error, "waits, and is tried every ten minutes")
            return
        else:
            if settled is None:
                return
            self._answers.put(settled)
        self._failures.pop(key, None)
        with self._lock:
            if self._waiting.get(registration.name) is registration:
                del self._waiting[registration.name]

    def _failed(self, key: tuple[str, str], error: Exception) -> int:
        """Count a failure and schedule the next try; the number of failures in a row."""
        count = self._failures.get(key, (0, 0.0))[0] + 1
        pause = min(FOLLOW_SECONDS * 2.0 ** min(count - 1, 30), LONGEST_PAUSE_SECONDS)
        self._failures[key] = count, time.monotonic() + pause
        limited = self._limited_log
        say = limited.warning if isinstance(error, HvdError) else limited.exception
        say("MLflow refuses what is written: scope %s, %s: %s; tried again", *key, error)
        return count

    def _count(self, key: tuple[str, str], reason: str, error: Exception, then: str) -> None:
        """Count a request that is not carried out, and log what happens to it."""
        self.given_up[reason] += 1
        self._limited_log.warning(
            "scope %s: %s %s (%s): what is served stays; see to it that MLflow takes what the "
            "learner writes", *key, then, error,
        )  # fmt: skip

    def _settled(self, registration: Registration, standing: Standing) -> Settled | None:
        """Register it, and let it be champion or go on trial, unless a person's word stands against
        that; None where it is to wait, or the scope is another learner's by now."""
        scope, version = registration.policy.scope, None
        refusal, word = self._refusal(registration, standing), ""
        if not refusal:
            version = self._registry.register(
                registration.policy,
                registration.params,
                registration.metrics,
                registration.tags,
                registration.window,
            )
            # while nothing is compared, so that no former champion goes that may have to come back
            self._retire(scope)
            standing = self._registry.standing(scope)
            refusal = self._refusal(registration, standing)
            if refusal:
                self._registry.tag(scope, version, {"refusal": refusal})
            elif not self._may(scope):
                return None
            elif (
                self._trial
                and registration.against
                and not registration.is_return
                and not self._is_unusable(scope, standing.champion or 0)
            ):
                if not self._may_try(standing):
                    return None
                word = self._put_on_trial(registration, version, standing)
            else:
                refusal, word = self._promote(registration, version, standing), "is champion"
        self.given_up["person"] += bool(refusal and registration.against)
        what = "a candidate" if version is None else f"version {version}"
        log.info(
            "scope %s: %s %s", scope, what, f"left to a person: {refusal}" if refusal else word
        )
        return Settled(version, refusal)

    def _retire(self, scope: str) -> None:
        """Delete old versions; a store that refuses to delete must not keep back what has won."""
        try:
            retired = self._registry.retire(scope, self._keep)
        except RegistryError as error:
            self._limited_log.warning("versions are not retired: %s", error)
            return
        if retired:
            log.info("scope %s: versions %s are retired", scope, ", ".join(map(str, retired)))

    def _put_on_trial(self, registration: Registration, version: int, standing: Standing) -> str:
        """Let alias trial name it, unless it was compared with this champion a while ago: the
        offline gate, which found it better once, may do so every minute. What became of it."""
        scope, tags = standing.scope, self._registry.tags(standing.scope, version)
        for kind in ("trial", "watch"):
            with suppress(ValueError, TypeError):
                at = datetime.fromisoformat(tags.get(f"{kind}_at", ""))
                if tags.get(f"{kind}_against") == str(standing.champion) and _is_recent(at):
                    return f"is not tried now: on {kind} it was {tags.get(kind)} a while ago"
        if standing.champion == version:
            return "is champion"
        why = registration.tags.get("verdict", "")
        by = self._by
        named = self._registry.move_over(scope, "trial", standing.trial, version, by, why)
        return "goes on trial" if named == version else f"waits: version {named} is on trial"

    def _promote(self, registration: Registration, version: int, standing: Standing) -> str:
        """Let it be champion; why a person's word stands against it, or ""."""
        scope = standing.scope
        why = registration.tags.get("verdict", "the first of its scope")
        move = Move(scope, self._by, why, {}, over=standing.champion or 0, to=version)
        refusal = carry_out(self._registry, move).refusal
        if registration.tags.get("origin") == KEPT and not refusal:
            log.warning(
                "scope %s: MLflow had no champion any more: what is in force stays, and is "
                "version %d now; to serve another, promote it", scope, version,
            )  # fmt: skip
        return refusal

    def _refusal(self, registration: Registration, standing: Standing) -> str:
        """Why a person's word stands against its promotion; an unusable champion is none."""
        champion = standing.champion
        if not registration.against:
            return operator_override(standing, None)
        if standing.pinned is None and champion is not None:
            if self._is_unusable(standing.scope, champion):
                return ""
            digest = self._registry.digest(standing.scope, champion)
            if digest in (registration.against, digest_of(registration.policy)):
                return ""  # or it was made champion already, before we were cut off
        return operator_override(standing)

    def is_unreadable(self, scope: str, version: int) -> bool:
        """Whether it could not be read when it was asked for last. Any thread may ask."""
        return (scope, version) in self._unusable

    def _is_unusable(self, scope: str, version: int) -> bool:
        """Whether it could not be read, and cannot now: what keeps it may only have been away."""
        if (scope, version) in self._unusable:
            self._load(scope, version)
        return (scope, version) in self._unusable

    def _load(self, scope: str, version: int) -> None:
        try:
            policy = self._registry.load(scope, version)
        except RegistryError as error:
            if (scope, version) not in self._unusable:
                log.warning("%s; what is served stays until a candidate wins", error)
                self._unusable.add((scope, version))
            return
        self._unusable.discard((scope, version))
        with self._lock:
            self._asked.discard((scope, version))
        self._answers.put(policy)


def _is_recent(at: datetime) -> bool:
    """Whether it is no longer ago than :data:`REST`; a clock that was far ahead keeps nothing from
    trial."""
    return abs(datetime.now(UTC) - at) < REST

"""Registers policies in MLflow on a thread of its own, so that the loop never waits for the server.

The loop submits registrations and alias moves, requests policies, and collects answers. Submitted
requests survive outages and restarts.
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
    LEASE_LOST,
    RECOVERED,
    ROLLED_BACK,
    Answer,
    MoveRequest,
    MoveResult,
    Registered,
    Registration,
    move_aliases,
    operator_override,
)
from learner.release.registry import AliasState, Registry, digest_of
from learner.release.registry.moves import last_move

log = logging.getLogger(__name__)

FOLLOW_SECONDS: Final = 3.0  # interval of reading aliases: one query for a page of models
RETRY_SECONDS: Final = 15.0
PAUSE_FACTOR: Final = 4.0
"""Pause after listing models, in its processor time: ten thousand models take seconds, in which the
learner's loop stands still."""
MAX_TRIES: Final = 10
"""After so many failures a move is abandoned; a registration counts as refused, and waits."""
MAX_PAUSE_SECONDS: Final = 600.0
"""Between two tries of a registration that MLflow refuses; the pause doubles with each."""
MAX_PENDING: Final = 64
"""Registrations of some ten kilobytes each; pending ones are never displaced by new ones."""
COOLDOWN: Final = timedelta(hours=1)
"""No trials after a roll-back, and no second trial of a version against the same champion."""
CLOSE_SECONDS: Final = 5.0
"""For the request in progress. An interrupted one is repeated after the next start."""


class Registrar:
    """Uses ``registry`` on one thread, from :meth:`start` to :meth:`close`.

    The thread calls ``holds`` to learn whether it may write a scope, and ``busy`` whether a policy
    of a scope is on trial. ``by`` signs alias moves; ``trial``: candidates are tried first;
    ``keep`` is the number of versions to keep of a scope. ``away_since`` is when MLflow stopped
    answering, in seconds since the epoch, or 0. ``given_up`` counts abandoned requests by reason:
    ``refused`` by MLflow ten times, ``crowded`` out by pending ones, ``unreadable`` policies,
    overridden by a ``person``.
    """

    def __init__(
        self,
        registry: Registry,
        holds: Callable[[str], bool],
        pending: Iterable[Registration] = (),
        busy: Callable[[str], bool] = lambda scope: False,
        by: str = "learner",
        trial: bool = False,
        keep: int = 20,
    ) -> None:
        self.away_since = 0.0
        self.given_up: Counter[str] = Counter()
        self._registry = registry
        self._holds = holds
        self._busy = busy
        self._by, self._trial, self._keep = by, trial, keep
        self._pending = OrderedDict((each.key, each) for each in pending)
        self._failures: dict[tuple[str, str], tuple[int, float]] = {}
        """Number of failures and time of the next try, by scope and kind of request."""
        self._limited_log = LimitedLog()
        self._unusable: set[tuple[str, int]] = set()
        self._requested: set[tuple[str, int]] = set()
        self._moves: list[MoveRequest] = []  # a few of each scope with a comparison
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._pause_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="hvd-registrar", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the request in progress; others stay in :meth:`pending`."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def submit(self, registration: Registration) -> None:
        """Register it once MLflow answers and the scope is ours.

        If ``MAX_PENDING`` are pending, a candidate replaces an initial policy, which is submitted
        again while its scope has no champion; others are dropped.
        """
        key = registration.key
        with self._lock:
            if key not in self._pending and len(self._pending) >= MAX_PENDING:
                initial = next((k for k, each in self._pending.items() if not each.against), None)
                if initial is None and registration.against:
                    self.given_up["crowded"] += 1
                    self._limited_log.warning("candidates are dropped: %d wait", MAX_PENDING)
                if initial is None or not registration.against:
                    return
                del self._pending[initial]
            self._pending[key] = registration
        self._wake.set()

    def pending(self) -> list[Registration]:
        """Pending registrations, oldest first, for the checkpoint."""
        with self._lock:
            return list(self._pending.values())

    def move(self, request: MoveRequest) -> None:
        """Carry it out, after those before it, once MLflow answers."""
        with self._lock:
            self._moves.append(request)
        self._wake.set()

    def request(self, wanted: Iterable[tuple[str, int]]) -> None:
        """Load these (scope, version) policies."""
        requested = set(wanted)
        with self._lock:
            new = not requested <= self._requested
            self._requested = requested
        if new:
            self._wake.set()

    def answers(self) -> list[Answer]:
        """Answers since the last call."""
        answers: list[Answer] = []
        with suppress(Empty):
            while True:
                answers.append(self._answers.get_nowait())
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
                    log.warning("%s; %d registrations wait", error, len(self._pending))
            except Exception:  # otherwise the learner would never promote again
                pause = RETRY_SECONDS
                log.exception("the registry's thread failed and continues")
            self._stopping.wait(self._pause_seconds)
            self._wake.wait(pause)
            if pause == RETRY_SECONDS:
                self._stopping.wait(min(pause, 1.0))  # submissions must not speed up retries
            self._wake.clear()

    def _turn(self) -> None:
        began = time.thread_time()
        aliases = self._registry.alias_states()  # raises if MLflow is away
        self._pause_seconds = PAUSE_FACTOR * (time.thread_time() - began)
        with self._lock:
            moves, requested = list(self._moves), sorted(self._requested)
        for move in moves:
            if not self._stopping.is_set():
                self._move(move)
        if moves:
            aliases = self._registry.alias_states()
        now = time.monotonic()
        pending = [r for r in self.pending() if now >= self._failures.get(r.key, (0, now))[1]]
        due = [r for r in pending if self._is_due(r, aliases)]
        for registration in due:
            if not self._stopping.is_set():
                self._try(registration, aliases)
        self._answers.put(self._registry.alias_states() if due else aliases)
        for scope, version in requested:
            if self._stopping.is_set():
                return
            self._load(scope, version)

    def _is_due(self, registration: Registration, states: Mapping[str, AliasState]) -> bool:
        """Whether it can be registered now.

        A candidate waits for its scope's champion, for the end of a trial, and for a while after a
        roll-back, or two similar policies would alternate. A return of the first policy does not.
        All wait while a version is pinned, or each candidate would become a version.
        """
        scope = registration.policy.scope
        aliases = states.get(scope, AliasState(scope))
        if not self._holds(scope) or aliases.pinned is not None:
            return False
        if not registration.against:
            return True
        tries = self._trial and not registration.is_return
        return aliases.served is not None and (not tries or self._may_try(aliases))

    def _may_try(self, aliases: AliasState) -> bool:
        """Whether alias trial is free or ours, no trial is running, and none was rolled back."""
        last, tried = (last_move(aliases.tags, alias) for alias in ("champion", "trial"))
        ours = tried is not None and (tried.after, tried.by) == (aliases.trial, self._by)
        rests = last is not None and last.why.startswith(ROLLED_BACK) and _is_recent(last.at)
        free = aliases.trial in (None, aliases.champion) or ours
        return free and not rests and not self._busy(aliases.scope)

    def _move(self, request: MoveRequest) -> None:
        """Move aliases, or retry in the next turn; abandoned after ``MAX_TRIES`` failures."""
        key = (request.scope, "a move of its aliases")
        try:
            ours = self._holds(request.scope)
            refused = MoveResult(request, LEASE_LOST)
            result = move_aliases(self._registry, request) if ours else refused
            self.given_up["person"] += ours and bool(result.refusal)
        except Exception as error:  # noqa: BLE001 -- as in _try
            if self._record_failure(key, error) < MAX_TRIES:
                return
            self._give_up(key, "refused", error, "is given up")
            result = MoveResult(request, str(error) or repr(error))
        self._failures.pop(key, None)
        with self._lock:
            self._moves.remove(request)
        self._answers.put(result)

    def _try(self, registration: Registration, states: Mapping[str, AliasState]) -> None:
        """Register it. One that MLflow refuses, as all are where writes are forbidden, waits longer
        after each failure, and blocks no other."""
        scope, key = registration.policy.scope, registration.key
        try:
            result = self._register(registration, states.get(scope, AliasState(scope)))
        except PolicyRefused as error:
            self._give_up(key, "unreadable", error, "is given up")
        except Exception as error:  # noqa: BLE001 -- also a bug that one scope's state triggers
            if self._record_failure(key, error) == MAX_TRIES:
                self._give_up(key, "refused", error, "waits, and is tried every ten minutes")
            return
        else:
            if result is None:
                return
            self._answers.put(result)
        self._failures.pop(key, None)
        with self._lock:
            if self._pending.get(key) is registration:
                del self._pending[key]

    def _record_failure(self, key: tuple[str, str], error: Exception) -> int:
        """Schedule the next try; the number of failures in a row."""
        count = self._failures.get(key, (0, 0.0))[0] + 1
        pause = min(FOLLOW_SECONDS * 2.0 ** min(count - 1, 30), MAX_PAUSE_SECONDS)
        self._failures[key] = count, time.monotonic() + pause
        limited = self._limited_log
        write = limited.warning if isinstance(error, HvdError) else limited.exception
        write("MLflow refuses a write: scope %s, %s: %s; retrying", *key, error)
        return count

    def _give_up(self, key: tuple[str, str], reason: str, error: Exception, then: str) -> None:
        """Count and log a request that is not carried out."""
        self.given_up[reason] += 1
        self._limited_log.warning(
            "scope %s: %s %s (%s): the served policy stays; check that MLflow accepts the "
            "learner's writes", *key, then, error,
        )  # fmt: skip

    def _register(self, registration: Registration, aliases: AliasState) -> Registered | None:
        """Register it, and promote it or put it on trial, unless a person overrides that; None if
        it must wait, or the lease is lost."""
        scope, version = registration.policy.scope, None
        refusal, result = self._refusal(registration, aliases), ""
        if not refusal:
            version = self._registry.register(
                registration.policy, registration.params, registration.metrics, registration.tags,
                registration.window,
            )  # fmt: skip
            # no trial is running, so no former champion is deleted that may have to come back
            self._retire(scope)
            aliases = self._registry.alias_state(scope)
            refusal = self._refusal(registration, aliases)
            if refusal:
                self._registry.tag(scope, version, {"refusal": refusal})
            elif not self._holds(scope):
                return None
            elif (
                self._trial
                and registration.against
                and not registration.is_return
                and not self._is_unusable(scope, aliases.champion or 0)
            ):
                if not self._may_try(aliases):
                    return None
                result = self._put_on_trial(registration, version, aliases)
            else:
                refusal, result = self._promote(registration, version, aliases), "is champion"
        self.given_up["person"] += bool(refusal and registration.against)
        what = "a candidate" if version is None else f"version {version}"
        log.info(
            "scope %s: %s %s", scope, what, f"left to a person: {refusal}" if refusal else result
        )
        return Registered(version, refusal)

    def _retire(self, scope: str) -> None:
        """Delete old versions; a failure must not block a candidate."""
        try:
            retired = self._registry.retire(scope, self._keep)
        except RegistryError as error:
            self._limited_log.warning("versions are not retired: %s", error)
            return
        if retired:
            log.info("scope %s: versions %s are retired", scope, ", ".join(map(str, retired)))

    def _put_on_trial(self, registration: Registration, version: int, aliases: AliasState) -> str:
        """Move alias trial to it, unless it was compared with this champion recently: the gate,
        which it passed once, may pass it every minute. The result in words."""
        scope, tags = aliases.scope, self._registry.tags(aliases.scope, version)
        for kind in ("trial", "watch"):
            with suppress(ValueError, TypeError):
                at = datetime.fromisoformat(tags.get(f"{kind}_at", ""))
                if tags.get(f"{kind}_against") == str(aliases.champion) and _is_recent(at):
                    return f"is not tried now: on {kind} it was {tags.get(kind)} a while ago"
        if aliases.champion == version:
            return "is champion"
        why = registration.tags.get("verdict", "")
        trial = self._registry.move_from(scope, "trial", aliases.trial, version, self._by, why)
        return "goes on trial" if trial == version else f"waits: version {trial} is on trial"

    def _promote(self, registration: Registration, version: int, aliases: AliasState) -> str:
        """Make it champion; why a person overrides that, or ""."""
        scope = aliases.scope
        why = registration.tags.get("verdict", "the first of its scope")
        request = MoveRequest(scope, self._by, why, {}, over=aliases.champion or 0, to=version)
        refusal = move_aliases(self._registry, request).refusal
        if registration.tags.get("origin") == RECOVERED and not refusal:
            log.warning(
                "scope %s: MLflow had lost its champion: the policy in force stays, as version %d; "
                "to serve another, promote it", scope, version,
            )  # fmt: skip
        return refusal

    def _refusal(self, registration: Registration, aliases: AliasState) -> str:
        """Why a person overrides its promotion, or ""; an unusable champion is no override."""
        champion = aliases.champion
        if not registration.against:
            return operator_override(aliases, None)
        if aliases.pinned is None and champion is not None:
            if self._is_unusable(aliases.scope, champion):
                return ""
            digest = self._registry.digest(aliases.scope, champion)
            if digest in (registration.against, digest_of(registration.policy)):
                return ""  # the latter after an interrupted promotion
        return operator_override(aliases)

    def is_unreadable(self, scope: str, version: int) -> bool:
        """Whether loading it failed last time. Thread-safe."""
        return (scope, version) in self._unusable

    def _is_unusable(self, scope: str, version: int) -> bool:
        """Whether loading it failed, and still fails: its storage may only have been away."""
        if (scope, version) in self._unusable:
            self._load(scope, version)
        return (scope, version) in self._unusable

    def _load(self, scope: str, version: int) -> None:
        try:
            policy = self._registry.load(scope, version)
        except RegistryError as error:
            if (scope, version) not in self._unusable:
                log.warning("%s; the served policy stays until a candidate wins", error)
                self._unusable.add((scope, version))
            return
        self._unusable.discard((scope, version))
        with self._lock:
            self._requested.discard((scope, version))
        self._answers.put(policy)


def _is_recent(at: datetime) -> bool:
    """Whether it is less than :data:`COOLDOWN` ago; a clock far ahead blocks no trial."""
    return abs(datetime.now(UTC) - at) < COOLDOWN

"""The thread that talks to MLflow, so that no wait for it is a wait of the learner.

The learner hands over what is to be registered and asks for policies; it takes the answers when
they are there. What was handed over waits, through outages and restarts, until it is settled.
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
    person_s_word,
)
from learner.release.registry import Registry, Standing, digest_of
from learner.release.registry.moves import last_of

log = logging.getLogger(__name__)

FOLLOW_SECONDS: Final = 3.0
"""How soon an alias that a person moved is noticed; one query of the registry a page of models."""
RETRY_SECONDS: Final = 15.0
TRIES: Final = 10
WAITING: Final = 64
"""Registrations kept while MLflow is away, each some ten kilobytes; the oldest give way."""
REST: Final = timedelta(hours=1)
"""Nothing is tried for so long after a champion was rolled back, nor a version again against the
same champion."""
CLOSE_SECONDS: Final = 5.0
"""For the request under way. One that is cut off is made again at the next start: no twin."""


class Registrar:
    """Keeps ``registry`` to one thread between :meth:`start` and :meth:`close`.

    ``may`` is asked from that thread whether a scope is ours to write to, ``busy`` whether a policy
    of it is compared with the champion. Moves are signed ``by`` its name, winners go on ``trial``
    first, and so many versions of a scope it is to ``keep``. ``away_since`` is when MLflow stopped
    to answer, in seconds since the epoch, or 0. ``given_up`` counts what was handed over and not
    done, by reason: ``refused`` by MLflow, ``crowded`` out by later ones while MLflow was away,
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
        self._waiting = OrderedDict((each.key, each) for each in waiting)
        self._tries: Counter[tuple[str, str]] = Counter()  # by scope, and what is tried
        self._unusable: set[tuple[str, int]] = set()
        self._asked: set[tuple[str, int]] = set()
        self._moves: list[Move] = []  # a few of each scope that is compared
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
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
        """Have it registered as soon as MLflow answers and the scope is ours."""
        with self._lock:
            self._waiting[registration.key] = registration
            if len(self._waiting) > WAITING:
                (scope, _), _ = self._waiting.popitem(last=False)
                self.given_up["crowded"] += 1
                log.warning("scope %s: its candidate gives way, too many wait for MLflow", scope)
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
        found: list[Answer] = []
        while True:
            try:
                found.append(self._answers.get_nowait())
            except Empty:
                return found

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
                self._complain(error)
            except Exception:  # a bug here must not leave a learner that never promotes again
                pause = RETRY_SECONDS
                log.exception("the registry's thread failed and goes on")
            self._wake.wait(pause)
            if pause == RETRY_SECONDS:
                self._stopping.wait(min(pause, 1.0))  # what is handed over must not hurry outages
            self._wake.clear()

    def _turn(self) -> None:
        standings = self._registry.standings()  # raises when MLflow is away, and then all wait
        with self._lock:
            moves, asked = list(self._moves), sorted(self._asked)
        for move in moves:
            if not self._stopping.is_set():
                self._carry_out(move)
        if moves:
            standings = self._registry.standings()
        ours = [r for r in self.waiting() if self._is_due(r, standings)]
        for registration in ours:
            if not self._stopping.is_set():
                self._try(registration, standings)
        self._answers.put(self._registry.standings() if ours else standings)
        for scope, version in asked:
            if self._stopping.is_set():
                return
            self._load(scope, version)

    def _is_due(self, registration: Registration, standings: Mapping[str, Standing]) -> bool:
        """A candidate waits until the first policy it may have won over is registered itself, while
        another is compared with the champion, and for a while after one was rolled back: two that
        are nearly alike would else go to and fro. All wait while a person's pin stands, else each
        winner meanwhile would be a version."""
        scope = registration.policy.scope
        standing = standings.get(scope, Standing(scope))
        if not self._may(scope) or standing.pinned is not None:
            return False
        if not registration.against:
            return True
        return standing.served is not None and (not self._trial or self._may_try(standing))

    def _may_try(self, standing: Standing) -> bool:
        """Whether alias trial is nobody else's, and nothing is compared or was rolled back."""
        last, tried = (last_of(standing.tags, alias) for alias in ("champion", "trial"))
        ours = tried is not None and (tried.after, tried.by) == (standing.trial, self._by)
        rests = last is not None and last.why.startswith(ROLLED_BACK) and _is_recent(last.at)
        free = standing.trial in (None, standing.champion) or ours
        return free and not rests and not self._busy(standing.scope)

    def _carry_out(self, move: Move) -> None:
        """Do it, or try again at the next turn; one that MLflow refuses for good is given up."""
        key = (move.scope, "move")
        try:
            ours = self._may(move.scope)
            done = carry_out(self._registry, move) if ours else Moved(move, LOST)
            self.given_up["person"] += ours and bool(done.refusal)
        except Exception as error:  # noqa: BLE001 -- as in _try
            if self._again(key, "a move of its aliases", error):
                return
            done = Moved(move, str(error) or repr(error))
        self._tries.pop(key, None)
        with self._lock:
            self._moves.remove(move)
        self._answers.put(done)

    def _try(self, registration: Registration, standings: Mapping[str, Standing]) -> None:
        """Settle it. One that MLflow refuses while it answers others must not stay in their way."""
        scope = registration.policy.scope
        key = (scope, "a candidate" if registration.against else "its first policy")
        try:
            settled = self._settled(registration, standings.get(scope, Standing(scope)))
        except Exception as error:  # noqa: BLE001 -- nor a bug that one scope's state brings out
            if self._again(key, key[1], error):
                return
        else:
            if settled is None:
                return
            self._answers.put(settled)
        self._tries.pop(key, None)
        with self._lock:
            if self._waiting.get(registration.key) is registration:
                del self._waiting[registration.key]

    def _again(self, key: tuple[str, str], what: str, error: Exception) -> bool:
        """Whether what failed is tried again; else it is given up, counted and said."""
        unreadable = isinstance(error, PolicyRefused)
        self._tries[key] += 1
        if self._tries[key] < TRIES and not unreadable:
            ours = isinstance(error, HvdError)
            log.warning("%s; try %d of %d", error, self._tries[key], TRIES, exc_info=not ours)
            return True
        self.given_up["unreadable" if unreadable else "refused"] += 1
        log.error(
            "scope %s: %s is given up (%s): what is served stays, and the next winner is handed "
            "over; see to it that MLflow takes what the learner writes", key[0], what, error,
        )  # fmt: skip
        return False

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
            retired = self._registry.retire(scope, self._keep)
            if retired:
                log.info("scope %s: versions %s are retired", scope, ", ".join(map(str, retired)))
            standing = self._registry.standing(scope)
            refusal = self._refusal(registration, standing)
            if refusal:
                self._registry.tag(scope, version, {"refusal": refusal})
            elif not self._may(scope):
                return None
            elif (
                self._trial
                and registration.against
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
            return person_s_word(standing, None)
        if standing.pinned is None and champion is not None:
            if self._is_unusable(standing.scope, champion):
                return ""
            digest = self._registry.digest(standing.scope, champion)
            if digest in (registration.against, digest_of(registration.policy)):
                return ""  # or it was made champion already, before we were cut off
        return person_s_word(standing)

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

    def _complain(self, error: RegistryError) -> None:
        if not self.away_since:
            self.away_since = time.time()
            log.warning("%s; %d registrations wait, learning goes on", error, len(self._waiting))


def _is_recent(at: datetime) -> bool:
    """Whether it is no longer ago than :data:`REST`; a clock that was far ahead keeps nothing from
    trial."""
    return abs(datetime.now(UTC) - at) < REST

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
from queue import Empty, SimpleQueue
from typing import Final

from decoder.contracts.errors import PolicyRefused, RegistryError
from learner.moves import LOST, Move, Moved, carry_out
from learner.registrations import KEPT, Answer, Loaded, Registration, Rules, Seen, Settled
from learner.registry import Registry, Standing, digest_of

log = logging.getLogger(__name__)

FOLLOW_SECONDS: Final = 3.0
"""How soon an alias that a person moved is noticed; one query of the registry a page of models."""
RETRY_SECONDS: Final = 15.0
TRIES: Final = 10
WAITING: Final = 64
"""Registrations kept while MLflow is away, each some ten kilobytes; the oldest give way."""
CLOSE_SECONDS: Final = 5.0
"""For the request under way. One that is cut off is made again at the next start: no twin."""


class Registrar:
    """Keeps ``registry`` to one thread between :meth:`start` and :meth:`close`.

    ``may`` is asked from that thread whether a scope is ours to write to, ``busy`` whether a policy
    of it is compared with the champion. ``away_since`` is when MLflow stopped to answer, in seconds
    since the epoch, or 0. ``given_up`` counts what was handed over and not done, by reason:
    ``refused`` by MLflow, ``crowded`` out by later ones while MLflow was away, ``unreadable``
    policies, a ``person``'s word against it.
    """

    def __init__(
        self,
        registry: Registry,
        may: Callable[[str], bool],
        waiting: Iterable[Registration] = (),
        busy: Callable[[str], bool] = lambda scope: False,
        rules: Rules | None = None,
    ) -> None:
        self.away_since = 0.0
        self.given_up: Counter[str] = Counter()
        self._registry = registry
        self._may = may
        self._busy = busy
        self._rules = rules or Rules()
        self._waiting = OrderedDict((each.key, each) for each in waiting)
        self._tries: Counter[tuple[str, bool]] = Counter()  # of registrations
        self._move_tries: Counter[tuple[str, bool]] = Counter()
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
            moves = list(self._moves)
        for move in moves:
            if not self._stopping.is_set():
                self._carry_out(move)
        if moves:
            standings = self._registry.standings()
        ours = [r for r in self.waiting() if self._is_due(r, standings)]
        for registration in ours:
            if not self._stopping.is_set():
                self._try(registration, standings)
        self._answers.put(Seen(self._registry.standings() if ours else standings))
        with self._lock:
            asked = sorted(self._asked)
        for scope, version in asked:
            if self._stopping.is_set():
                return
            self._load(scope, version)

    def _is_due(self, registration: Registration, standings: Mapping[str, Standing]) -> bool:
        """A candidate waits until the first policy it may have won over is registered itself, and
        while another is compared with the champion; all wait while a person's pin stands, else each
        winner meanwhile would be a version."""
        scope = registration.policy.scope
        standing = standings.get(scope, Standing(scope))
        if not self._may(scope) or standing.pinned is not None:
            return False
        candidate = bool(registration.against)
        return not candidate or (standing.served is not None and not self._busy(scope))

    def _carry_out(self, move: Move) -> None:
        """Do it, or try again at the next turn; one that MLflow refuses for good is given up."""
        key = move.scope, move.to is not None
        try:
            ours = self._may(move.scope)
            done = carry_out(self._registry, move) if ours else Moved(move, LOST)
        except RegistryError as error:
            self._move_tries[key] += 1
            log.warning("%s; try %d of %d", error, self._move_tries[key], TRIES)
            if self._move_tries[key] < TRIES:
                return
            self._give_up("refused", move.scope, "a move of its aliases", error)
            done = Moved(move, str(error))
        else:
            self.given_up["person"] += ours and bool(done.refusal)
        self._move_tries.pop(key, None)
        with self._lock:
            self._moves.remove(move)
        self._answers.put(done)

    def _try(self, registration: Registration, standings: Mapping[str, Standing]) -> None:
        """Settle it. One that MLflow refuses while it answers others must not stay in their way."""
        scope = registration.policy.scope
        try:
            self._settle(registration, standings.get(scope, Standing(scope)))
        except PolicyRefused as error:
            self._give_up("unreadable", scope, "a policy that nobody could read", error)
            self._drop(registration)
        except RegistryError as error:
            self._tries[registration.key] += 1
            log.warning("%s; try %d of %d", error, self._tries[registration.key], TRIES)
            if self._tries[registration.key] < TRIES:
                return
            what = "a candidate" if registration.against else "its first policy"
            self._give_up("refused", scope, what, error)
            self._drop(registration)
        self._tries.pop(registration.key, None)

    def _give_up(self, reason: str, scope: str, what: str, error: Exception) -> None:
        self.given_up[reason] += 1
        log.error(
            "scope %s: %s is given up (%s): what is served stays, and the next winner is handed "
            "over; see to it that MLflow takes what the learner writes",
            scope, what, error,
        )  # fmt: skip

    def _drop(self, registration: Registration) -> None:
        with self._lock:
            if self._waiting.get(registration.key) is registration:
                del self._waiting[registration.key]

    def _settle(self, registration: Registration, standing: Standing) -> None:
        scope, version = registration.policy.scope, None
        refusal = self._refusal(registration, standing)
        if not refusal:
            version = self._registry.register(
                registration.policy,
                registration.params,
                registration.metrics,
                registration.tags,
                registration.window,
            )
            self._retire(scope)
            standing = self._registry.standing(scope)
            refusal = self._refusal(registration, standing)
            if refusal:
                self._registry.tag(scope, version, {"refusal": refusal})
        over = 0
        if version is not None and not refusal:
            if not self._may(scope):
                return  # whoever has the scope now judges for itself
            over = self._tried_against(registration, standing)
            if not over:
                why = registration.tags.get("verdict", "the first of its scope")
                move = Move(scope, self._rules.by, why, {}, over=standing.champion or 0, to=version)
                refusal = carry_out(self._registry, move).refusal
                if registration.tags.get("origin") == KEPT and not refusal:
                    log.warning(
                        "scope %s: MLflow had no champion any more: what is in force stays, and is "
                        "version %d now; to serve another, promote it", scope, version,
                    )  # fmt: skip
        self._drop(registration)
        self.given_up["person"] += bool(refusal and registration.against)
        self._answers.put(Settled(registration, version, refusal, over))

    def _tried_against(self, registration: Registration, standing: Standing) -> int:
        """The champion to compare it with before it is promoted; 0 where it is promoted at once."""
        champion = standing.champion
        if not self._rules.trial or not registration.against or champion is None:
            return 0
        return 0 if self._is_unusable(standing.scope, champion) else champion

    def _retire(self, scope: str) -> None:
        """While nothing of ``scope`` is compared, so that no former champion goes that may have to
        come back."""
        retired = self._registry.retire(scope, self._rules.keep)
        if retired:
            log.info("scope %s: versions %s are retired", scope, ", ".join(map(str, retired)))

    def _refusal(self, registration: Registration, standing: Standing) -> str:
        """Why a person's word stands against its promotion; an unusable champion is none."""
        scope = standing.scope
        if standing.pinned is not None:
            return f"version {standing.pinned} is pinned"
        if standing.champion is None:
            return "" if not registration.against else "there is no champion any more"
        if not registration.against:
            return f"version {standing.champion} is champion"
        if self._is_unusable(scope, standing.champion):
            return ""
        champion = self._registry.digest(scope, standing.champion)
        if champion in (registration.against, digest_of(registration.policy)):
            return ""  # or it was made champion already, before we were cut off
        return f"version {standing.champion} was made champion meanwhile"

    def _is_unusable(self, scope: str, version: int) -> bool:
        """Whether it could not be read before and cannot now: MLflow may only have been away."""
        if (scope, version) not in self._unusable:
            return False
        try:
            self._registry.load(scope, version)
        except RegistryError:
            return True
        return False

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
        self._answers.put(Loaded(policy))

    def _complain(self, error: RegistryError) -> None:
        if not self.away_since:
            self.away_since = time.time()
            log.warning("%s; %d registrations wait, learning goes on", error, len(self._waiting))

"""The faults that ``hvd chaos`` injects, the stack they are injected into, and an audit of its
topics."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from types import MappingProxyType
from typing import Final

from psutil import RLIMIT_FSIZE, NoSuchProcess, Process

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import ProcessError
from decoder.contracts.events import EventBatch
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.policy.probes import to_bytes
from pipelines.prompts import Prompt
from pipelines.stack import processes
from pipelines.stack.running import Stack
from pipelines.stack.up import PartState, supervise
from pipelines.watch.ledger import Ledger

PARTS: Final = ("broker", "registry", "learner", "worker")
LOOK_S: Final = 0.1
PATIENCE_S: Final = 600.0  # on busy cores vLLM takes minutes to start
ANSWERED_S: Final = 1.0  # within which a broker acknowledges
TAKEOVER_S: Final = 30.0  # within which another learner must take over a dead one's lease

IN_FLIGHT_S: Final = 0.5  # fetched records may be processed so much later


def adds_up(account: Mapping[str, int]) -> bool:
    """Whether made = delivered + in doubt + waiting + lost; events in doubt may be delivered."""
    missing = account["made"] - account["delivered"] - account["waiting"] - account["lost"]
    return 0 <= missing <= max(account["in doubt"], 0)


@dataclass
class TopicAudit(Ledger):
    """A ledger that tolerates repeated records, as when a broker comes back.

    ``numbers`` are each incarnation's events that were seen, ``made`` how many there are at least,
    ``last`` its last status, ``spoke`` when a process last reported (monotonic clock). ``excused``
    are incarnations whose broker may have lost events. ``faults`` must be empty.
    """

    numbers: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    made: Counter[str] = field(default_factory=Counter)
    last: dict[str, WorkerStatus] = field(default_factory=dict)
    spoke: dict[str, float] = field(default_factory=dict)
    publications: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    excused: set[str] = field(default_factory=set)
    _known: set[tuple[str, float]] = field(default_factory=set)

    def add_drafts(self, batch: EventBatch) -> None:
        """Record the events."""
        life, numbers = batch.origin.life, batch.numbers["number"].tolist()
        self.numbers[life].update(numbers)
        self.made[life] = max([self.made[life], *(number + 1 for number in numbers)])

    def add_status(self, status: WorkerStatus | LearnerStatus) -> None:
        """Record a status; a worker must not return to an earlier policy."""
        if (status.process, status.time) in self._known:
            return
        self._known.add((status.process, status.time))
        self.spoke[status.process] = time.monotonic()
        if isinstance(status, LearnerStatus):
            self.learner.append(status)
            return
        before = self.last.get(status.life, status)
        same_role = status.policy_role == before.policy_role
        if same_role and status.publication < before.publication:
            self.faults.append(f"a worker went back to publication {status.publication}")
        self.made[status.life] = max(self.made[status.life], status.events_made)
        self.last[status.life] = status
        self.statuses.append(status)

    def add_policy(self, at: float, scope: str, role: str, policy: Policy | None) -> None:
        """Check that a key's publications increase, and that a number names one policy."""
        if policy is None:
            return
        known = self.publications.setdefault((scope, role), {})
        digest, number = hashlib.sha256(to_bytes(policy)).hexdigest(), policy.publication
        if number not in known and number < max(known, default=0):
            self.faults.append(f"publication {number} of {scope}/{role} after {max(known)}")
        if known.setdefault(number, digest) != digest:
            self.faults.append(f"publication {number} of {scope}/{role} was given twice")

    @property
    def counts(self) -> dict[str, int]:
        """Distinct events: made, seen on the topic, and counted by a learner."""
        counted = max((status.events_consumed for status in self.learner), default=0)
        delivered = sum(map(len, self.numbers.values()))
        return {"made": self.made.total(), "delivered": delivered, "counted": counted}

    def contradictions(self) -> list[str]:
        """What is wrong with the records so far."""
        sentences = [f"{self.refused} records keep no contract"] if self.refused else []
        # a learner may have read events that a killed broker lost
        if self.counts["counted"] > self.counts["made"] and not self.excused:
            sentences.append(f"more events counted than made: {self.counts}")
        return sentences + [
            f"of {status.events_sent} events sent by {life} some are not on the topic"
            for life, status in list(self.last.items())
            if status.events_sent > len(self.numbers[life]) and life not in self.excused
        ]

    def has_spoken(self, moment: float, ending: str = "") -> bool:
        """Whether a process whose name has this ending reported well after ``moment``."""
        reports = dict(self.spoke).items()
        return any(at > moment + IN_FLIGHT_S and name.endswith(ending) for name, at in reports)

    def learner_of(self, pid: int) -> LearnerStatus | None:
        """The last status of the learner with that process id."""
        statuses = reversed(self.learner)
        return next((each for each in statuses if each.process.endswith(f"-{pid}")), None)

    def account(
        self, life: str, before: Mapping[str, int] = MappingProxyType({})
    ) -> dict[str, int]:
        """Where an incarnation's events are by its last status, less those of ``before``.
        ``delivered`` were seen; ``lost`` were dropped, refused, or left when it closed."""
        status = self.last.get(life) or WorkerStatus(process="", scope="", time=0.0)
        now = {
            "made": status.events_made,
            "delivered": len(self.numbers[life]),
            "in doubt": status.events_in_doubt,
            "waiting": status.queue_depth,
            "lost": status.events_dropped
            + status.events_failed
            + sum(status.events_refused.values()),
        }
        return {name: count - before.get(name, 0) for name, count in now.items()}


@dataclass
class Stage:
    """A stack supervised as by ``hvd up``, except for parts that are ``held`` down.

    ``answers`` are the right ones to ``prompts``, ``said`` the supervisor's messages, ``back`` the
    seconds until each affected part was seen working, ``draw`` the random numbers.
    """

    stack: Stack
    root: Path
    audit: TopicAudit
    watches: dict[str, PartState]
    prompts: list[Prompt]
    answers: list[tuple[int, ...]]
    draw: random.Random
    held: set[str] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    back: dict[str, float] = field(default_factory=dict)

    def within(self, seconds: float, condition: Callable[[], bool] = lambda: False) -> bool:
        """Wait for ``condition``; whether it became true within ``seconds``. Main thread only."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            for name in self.watches.keys() - self.held:
                supervise(self.watches[name], self.stack.children, self.said.append)
            time.sleep(LOOK_S)
        return True

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``.

        Raises:
            ProcessError: it did not become true in time.
        """
        if not self.within(PATIENCE_S, condition):
            raise ProcessError(f"timed out waiting for {what}; {'; '.join(self.said[-5:])}")

    def pid(self, name: str) -> int:
        """The process id of a part; 0 if it does not run or is not ready."""
        child = self.stack.children.get(name)
        serves = child is not None and child.is_alive and self.watches[name].serves_since
        return child.process.pid if child is not None and serves else 0

    def tree(self, name: str) -> list[Process]:
        """The part's processes, its leader first."""
        with suppress(NoSuchProcess):
            leader = Process(self.pid(name))
            return [leader, *leader.children(recursive=True)]
        return []

    @contextmanager
    def down(self, name: str, number: Signals = SIGKILL) -> Iterator[None]:
        """End a part, and do not restart it inside the block."""
        self.held.add(name)
        try:
            self.tree(name)[0].send_signal(number)
            self.stack.children[name].process.wait()
            yield
        finally:
            self.held.discard(name)

    @contextmanager
    def done_to(
        self, name: str, do: Callable[[Process], object], undo: Callable[[Process], object]
    ) -> Iterator[None]:
        """Apply ``do`` to all processes of a part, and ``undo`` after the block."""
        try:
            for process in self.tree(name):
                do(process)
            yield
        finally:
            for process in self.tree(name):
                with suppress(NoSuchProcess):
                    undo(process)


@dataclass(frozen=True)
class Fault:
    """A fault. ``hold`` injects it for ``seconds``. ``kills`` are the parts that it ends, ``hurts``
    other parts that must be seen working afterwards. ``drains``: the worker finishes its running
    requests, so none may fail."""

    name: str
    hold: Callable[[Stage], AbstractContextManager[None]]
    seconds: float = 0.0
    kills: tuple[str, ...] = ()
    hurts: tuple[str, ...] = ()
    drains: bool = False


_BOTH: Final = ("learner", "worker")


@contextmanager
def _sent(number: Signals, names: tuple[str, ...], stage: Stage) -> Iterator[None]:
    for leader in [stage.tree(name)[0] for name in names]:
        leader.send_signal(number)  # the restart ends its other processes
    yield


_FROZEN: Final = partial(Stage.done_to, do=Process.suspend, undo=Process.resume)
# A limit on file sizes acts like a full disk, with EFBIG instead of ENOSPC. Python ignores the
# signal that comes with it; other programs die.
_FULL: Final = partial(
    Stage.done_to,
    do=lambda process: process.rlimit(RLIMIT_FSIZE, (0, process.rlimit(RLIMIT_FSIZE)[1])),
    undo=lambda process: process.rlimit(RLIMIT_FSIZE, process.rlimit(RLIMIT_FSIZE)[1:] * 2),
)


@contextmanager
def _away(stage: Stage) -> Iterator[None]:
    """The broker ends with SIGTERM, so it saves what it acknowledged and losses show. The embedded
    one acknowledges for some 0.2 s after saving, so nobody sends meanwhile."""
    with ExitStack() as frozen:
        for name in _BOTH:
            frozen.enter_context(_FROZEN(stage, name=name))
        stage.within(ANSWERED_S)
        with stage.down("broker", SIGTERM):
            frozen.close()
            yield


@contextmanager
def _full_and_away(stage: Stage) -> Iterator[None]:
    with _FULL(stage, name="worker"), _away(stage):
        yield


@contextmanager
def _damaged(stage: Stage) -> Iterator[None]:
    folder, draw = stage.root / "learner", stage.draw
    with stage.down("learner"):
        for path in sorted(folder.glob("state.db*")):
            data = bytearray(path.read_bytes())
            for place in draw.choices(range(len(data)), k=8):
                data[place] ^= 0xFF
            path.write_bytes(data)
        yield


@contextmanager
def _second_learner(stage: Stage) -> Iterator[None]:
    """A second learner waits for the lease, and gets it while the first one is down."""
    part = stage.watches["learner"].part
    environment = {**(part.environment or {}), "HVD_LEARNER_STATE_DIR": str(stage.root / "second")}
    log = part.log.with_name("second.log")
    second = processes.start(replace(part, name="second learner", log=log, environment=environment))

    def holds(is_holder: bool) -> bool:
        status = stage.audit.learner_of(second.process.pid)
        return status is not None and bool(status.lease) and status.holds_lease is is_holder

    try:
        stage.until("the second learner to see the lease", lambda: holds(False))
        with stage.down("learner"):
            began = time.monotonic()
            if not stage.within(TAKEOVER_S, lambda: holds(True)):
                stage.audit.faults.append("no learner took the lease over in time")
            stage.back["second learner"] = round(time.monotonic() - began, 1)
        second.check()
        yield
    finally:
        processes.stop([second])


_GROUPS: Final = [*((name,) for name in PARTS), *itertools.combinations(PARTS, 2)]
FAULTS: Final = (
    *(
        Fault(f"{' and '.join(names)} killed", partial(_sent, SIGKILL, names), kills=names)
        for names in sorted(_GROUPS, key=lambda names: "worker" in names)
    ),
    Fault("broker away for 60 s", _away, 60.0, hurts=("broker", "learner")),
    Fault("broker frozen for 20 s", partial(_FROZEN, name="broker"), 20.0, hurts=("broker",)),
    Fault("learner frozen for 20 s", partial(_FROZEN, name="learner"), 20.0, hurts=("learner",)),
    Fault("disk full for the learner", partial(_FULL, name="learner"), 20.0, hurts=("learner",)),
    Fault("disk full for the worker, broker away", _full_and_away, 15.0, hurts=("broker",)),
    Fault("checkpoint damaged, learner killed", _damaged, kills=("learner",)),
    Fault("learner held back, a second one there", _second_learner, kills=("learner",)),
    Fault("learner and worker ended", partial(_sent, SIGTERM, _BOTH), kills=_BOTH, drains=True),
)  # ordered so that none hides another

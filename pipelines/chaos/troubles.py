"""What is done to the stack, and which parts have to be seen at work after it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Final

from learner.checkpoint import previous_of
from pipelines.chaos.stage import Stage
from pipelines.stack import processes

PARTS: Final = ("broker", "registry", "learner", "worker")
TAKEOVER_S: Final = 30.0  # in which another learner has to hold the lease of one that died

Hold = Callable[[Stage], AbstractContextManager[None]]


@dataclass(frozen=True)
class Trouble:
    """``hold`` makes it, for so many ``seconds``. ``kills`` are the parts that end by it, ``hurts``
    further ones that must be seen at work afterwards. ``drains``: the worker has time for what is
    under way, so that clients may be sent away and no request fails.
    """

    name: str
    hold: Hold
    seconds: float = 0.0
    kills: tuple[str, ...] = ()
    hurts: tuple[str, ...] = ()
    drains: bool = False


@contextmanager
def _sent(number: Signals, names: tuple[str, ...], stage: Stage) -> Iterator[None]:
    stage.send(number, *names)
    yield


def _away(stage: Stage) -> AbstractContextManager[None]:
    return stage.down("broker", SIGTERM)  # it saves what it acknowledged, so that losses show


@contextmanager
def _full_worker(stage: Stage) -> Iterator[None]:
    with stage.full("worker"), _away(stage):
        yield


@contextmanager
def _damaged(stage: Stage) -> Iterator[None]:
    newest, draw = stage.root / "learner" / "checkpoint.safetensors", stage.draw
    with stage.down("learner"):
        for path in filter(Path.exists, (newest, previous_of(newest))[: draw.randint(1, 2)]):
            data = bytearray(path.read_bytes())
            for place in draw.choices(range(len(data)), k=8):
                data[place] ^= 0xFF
            path.write_bytes(data)
        yield


@contextmanager
def _second_learner(stage: Stage) -> Iterator[None]:
    """It waits for the lease, and gets it while the first one is held back."""
    part = stage.watches["learner"].part
    environment = {**(part.environment or {}), "HVD_LEARNER_STATE_DIR": str(stage.root / "second")}
    log = part.log.with_name("second.log")
    second = processes.start("second learner", part.arguments, log, environment, part.niceness)

    def holds(is_holder: bool) -> bool:
        said = stage.audit.learner_of(second.process.pid)
        return said is not None and bool(said.lease) and said.holds_lease is is_holder

    try:
        stage.until("the second learner to know of the lease", lambda: holds(False))
        with stage.down("learner"):
            began = time.monotonic()
            if not stage.within(TAKEOVER_S, lambda: holds(True)):
                stage.audit.faults.append("nobody took the lease over in time")
            stage.back["second learner"] = round(time.monotonic() - began, 1)
        second.check()
        yield
    finally:
        processes.stop([second])


_GROUPS: Final = [*((name,) for name in PARTS), *itertools.combinations(PARTS, 2)]
_BOTH: Final = ("learner", "worker")
TROUBLES: Final = (
    *(
        Trouble(f"{' and '.join(names)} killed", partial(_sent, SIGKILL, names), kills=names)
        for names in sorted(_GROUPS, key=lambda names: "worker" in names)
    ),
    Trouble("broker away for 60 s", _away, 60.0, hurts=("broker", "learner")),
    Trouble("broker frozen for 20 s", lambda s: s.frozen("broker"), 20.0, hurts=("broker",)),
    Trouble("learner frozen for 20 s", lambda s: s.frozen("learner"), 20.0, hurts=("learner",)),
    Trouble("disk full for the learner", lambda s: s.full("learner"), 20.0, hurts=("learner",)),
    Trouble("disk full for the worker, broker away", _full_worker, 15.0, hurts=("broker",)),
    Trouble("checkpoint damaged, learner killed", _damaged, kills=("learner",)),
    Trouble("learner held back, a second one there", _second_learner, kills=("learner",)),
    Trouble("learner and worker ended", partial(_sent, SIGTERM, _BOTH), kills=_BOTH, drains=True),
)  # in an order in which none hides another

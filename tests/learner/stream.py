"""Records on a real broker, read and written as a worker and an onlooker would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from decoder.contracts.events import Origin
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, WorkerStatus, decode_status
from decoder.contracts.topics import DRAFTS, STATUS, Topic
from learner.checkpoint import pack, unpack
from learner.loop import Learner
from learner.release.registry import Registry
from learner.scope import Scope
from learner.settings import LearnerSettings
from tests.conftest import until
from tests.decoder.telemetry.broker import lying, send
from tests.events import DraftEvent, encode_events

SCOPE = "scope01"
ORIGIN = Origin(SCOPE, "w1", "1f" * 8)


def settings_in(folder: Path, registry: Registry, **changes: Any) -> LearnerSettings:
    values = {
        "mlflow_tracking_uri": registry.tracking_uri, "state_dir": folder / "learner",
        "buffer_events": 4000, "min_events": 400, "candidate_every": 200, "rollout": "off",
    }  # fmt: skip
    return LearnerSettings(**{**values, **changes})


def batches(
    events: Sequence[DraftEvent], size: int = 50, origin: Origin = ORIGIN, first: int = 0
) -> list[bytes]:
    cuts = range(0, len(events), size)
    return [
        encode_events(events[cut : cut + size], origin, first + i) for i, cut in enumerate(cuts)
    ]


def produce(
    kafka: KafkaSettings, values: Sequence[bytes], topic: Topic = DRAFTS, known: bool = True
) -> None:
    """Send ``values``; drafts as a worker that has said its status, unless it is not ``known``."""
    for scope in _scopes(values) if topic is DRAFTS and known else ():
        status = WorkerStatus(process="w", scope=scope, time=1.0)
        send(kafka, STATUS.name, status.model_dump_json().encode())
    send(kafka, topic.name, *values)


def _scopes(values: Sequence[bytes]) -> set[str]:
    found = set()
    for value in values:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            found.add(str(json.loads(value)["scope"]))
    return found


class _Unreadable(str):
    """The name of a header that is no UTF-8, which other clients can send."""

    def encode(self, *_: object) -> bytes:
        return b"\xff\xfe"


def produce_unreadable(kafka: KafkaSettings, topic: Topic = DRAFTS) -> None:
    """A record that kafka-python cannot unpack."""
    send(kafka, topic.name, b"", headers=[(_Unreadable("name"), b"")])


def consume(kafka: KafkaSettings, topic: Topic) -> list[Any]:
    return lying(kafka, topic.name)


def reported(kafka: KafkaSettings, learner: Learner) -> LearnerStatus:
    """The status that ``learner`` gives now, once it lies on the topic."""
    failed = -1

    def lies() -> bool:
        nonlocal failed
        if failed != learner.status.failed:  # at first, and where no broker took the last one
            failed = learner.status.failed
            learner._report()
        return learner.health.statuses[-1] in [
            decode_status(r.value) for r in consume(kafka, STATUS)
        ]

    until(lies, "a status")
    return learner.health.statuses[-1]


Connect = Callable[[LearnerSettings], Learner]


def step_until(learner: Learner, done: Callable[[], bool]) -> None:
    until(done, "the learner", turn=learner.step, pause=0.0)


def stop(learner: Learner) -> None:
    """As :func:`learner.loop.run` does."""
    learner.checkpoint()
    learner.close()


def plain(tree: Any) -> Any:
    """What was read of a file, arrays as their bytes: to be compared."""
    if isinstance(tree, dict):
        return {name: plain(each) for name, each in tree.items()}
    if isinstance(tree, list):
        return [plain(each) for each in tree]
    return (tree.dtype, tree.tobytes()) if isinstance(tree, np.ndarray) else tree


def kept(scope: Scope) -> Any:
    """All that a scope is, as files hold it."""
    rows = vars(scope.buffer.recent(scope.buffer.total))
    return plain(unpack(pack({**scope.snapshot(), "rows": dict(rows)})))

"""The stack under steady load: does anything grow?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import psutil

from pipelines.chaos.clients import asking
from pipelines.chaos.run import faults_of
from pipelines.chaos.stage import Stage

EVERY_S: Final = 10.0
SMALL: Final = 0.05  # of its level an hour: what is surely growing, but by less, is flat
SILENT: Final = "silent for s"
SILENT_S: Final = 30.0


def growth(values: Sequence[float], hours: float) -> dict[str, Any]:
    """Level of a figure, its change an hour, and the verdict: ``grows``, ``falls`` or ``flat``.

    By the second and the last quarter of ``values``, sampled evenly in so many ``hours``: it moves
    where their middle halves lie apart. Buffers, pools and caches fill in the first quarter.
    """
    _, early, _, late = (np.percentile(q, (25, 50, 75)) for q in np.array_split(values, 4))
    hourly = float(late[1] - early[1]) / (hours / 2)
    verdict = "grows" if late[0] > early[2] else "falls" if late[2] < early[0] else "flat"
    if abs(hourly) <= SMALL * max(abs(early[1]), 1.0):
        verdict = "flat"
    return {"level": round(float(late[1]), 1), "an hour": round(hourly, 1), "verdict": verdict}


def soak(stage: Stage, minutes: float, tell: Callable[[float], None]) -> dict[str, Any]:
    """Let clients ask for so long, and ``tell`` the seconds that have passed: how many
    ``requests``, ``figures`` with their growth, and ``faults``.
    """
    audit, samples, began = stage.audit, list[dict[str, float]](), time.monotonic()
    stage.until("worker and learner to speak", lambda: bool(audit.statuses and audit.learner))
    first = audit.counts
    with asking(stage.stack.api, stage.stack.model, stage.asked) as clients:
        while (passed := time.monotonic() - began) < 60.0 * minutes:
            tell(passed)
            stage.within(EVERY_S)
            samples.append(_sample(stage))
    values = {name: [each[name] for each in samples] for name in samples[0]}
    figures = [{"figure": name} | growth(each, minutes / 60.0) for name, each in values.items()]
    faults = [f"{each['figure']} grows" for each in figures if each["verdict"] == "grows"]
    faults += [f"{n} {max(v):.0f}" for n, v in values.items() if SILENT in n and max(v) > SILENT_S]
    faults += [f"no more events {name}" for name, n in audit.counts.items() if n <= first[name]]
    faults += [fault for seen in clients for each in seen for fault in faults_of(each, stage)]
    faults += [*stage.said, *audit.faults, *audit.contradictions()]
    return {"requests": sum(map(len, clients)), "figures": figures, "faults": faults}


def _sample(stage: Stage) -> dict[str, float]:
    worker, learner = stage.audit.statuses[-1], stage.audit.learner[-1]
    found: dict[str, float] = {
        f"worker: {SILENT}": time.monotonic() - stage.audit.spoke[worker.process],
        "worker: events waiting": worker.queue_depth + worker.events_spilled,
        f"learner: {SILENT}": time.monotonic() - stage.audit.spoke[learner.process],
        "learner: events behind": learner.lag_events,
    }
    for name in stage.watches:
        totals = np.zeros(3)
        for process in stage.tree(name):
            with suppress(psutil.Error), process.oneshot():
                mib = process.memory_info().rss / 2**20
                totals += process.num_fds(), process.num_threads(), mib
        figures = zip(("open files", "threads", "MiB resident"), totals.tolist(), strict=True)
        found |= {f"{name}: {what}": value for what, value in figures}
    return found

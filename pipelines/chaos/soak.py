"""The stack under steady load: does anything grow?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from pipelines import machine
from pipelines.chaos.run import Scene, clients
from pipelines.chaos.stage import Stage
from pipelines.chaos.troubles import PARTS

EVERY_S: Final = 10.0
WARM: Final = 0.25
"""Part of the run at its beginning that is not judged: buffers, pools and caches fill."""
SILENT_S: Final = 30.0
"""Workers and learners say how they are every few seconds."""
BLOCKS: Final = 10
"""Neighbouring samples are alike, so the line is drawn through means of so many stretches."""
STUDENT: Final = 2.306
"""97.5% of Student's distribution with ``BLOCKS`` - 2 degrees of freedom."""
SMALL: Final = 0.05
"""Of its level an hour: what is surely growing, but by less, is not called growth."""

Series = dict[str, list[float]]


@dataclass(frozen=True)
class Slope:
    """Change an hour of a figure at ``level``, with its 95% interval."""

    level: float
    hourly: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """``grows`` or ``falls`` where the interval says so and it is not small, else ``flat``."""
        floor = SMALL * max(abs(self.level), 1.0)
        if self.low > 0 and self.hourly > floor:
            return "grows"
        return "falls" if self.high < 0 and -self.hourly > floor else "flat"


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """Of a figure that was sampled at ``seconds``, without the warm-up.

    Raises:
        ValueError: fewer samples than two a stretch.
    """
    skipped = int(len(values) * WARM)
    x, y = np.array(seconds[skipped:]) / 3600.0, np.array(values[skipped:], float)
    if len(x) < 2 * BLOCKS:
        raise ValueError(f"{len(x)} samples are judged, at least {2 * BLOCKS} are needed")
    at, means = (np.array([part.mean() for part in np.array_split(a, BLOCKS)]) for a in (x, y))
    centred = at - at.mean()
    spread = float((centred**2).sum())
    hourly = float((centred * means).sum() / spread)
    left = means - means.mean() - hourly * centred
    wide = STUDENT * float(np.sqrt((left**2).sum() / (BLOCKS - 2) / spread))
    return Slope(float(y.mean()), hourly, hourly - wide, hourly + wide)


def soak(scene: Scene, minutes: float, tell: Callable[[float], None]) -> dict[str, Any]:
    """Let clients ask for so long; samples, slopes, and answers that were wrong.

    Args:
        tell: called with the seconds that have passed.
    """
    seconds: list[float] = []
    series: Series = {}
    heard, still = scene.heard, set[str]()
    with clients(scene) as asking:
        scene.stage.until(
            "worker and learner to speak", lambda: bool(heard.workers and heard.learners)
        )
        counted, distinct = heard.counted, heard.distinct
        began = time.monotonic()
        end = began + minutes * 60.0
        while time.monotonic() < end:
            scene.stage.wait(EVERY_S)
            seconds.append(time.monotonic() - began)
            for name, value in _sample(scene).items():
                series.setdefault(name, []).append(value)
            newest = {"worker": heard.workers[-1].time, "learner": heard.learners[-1].time}
            still |= silent(newest, time.time())
            still |= {f"client {i} ended" for i, c in enumerate(asking) if c.ended.is_set()}
            tell(seconds[-1])
    for what, before, now in (
        ("events on the topic", distinct, heard.distinct),
        ("events that the learner counted", counted, heard.counted),
    ):
        if now <= before:
            still.add(f"no more {what} than at the beginning")
    seen = [s for client in asking for s in client.seen if s.outcome != "stopped"]
    wrong = sum(s.outcome == "answered" and s.tokens != scene.answers[s.prompt] for s in seen)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.description(),
        "minutes": round(minutes, 1),
        "requests": len(seen),
        "errors": sum(s.outcome == "error" for s in seen),
        "wrong": wrong,
        "restarts": scene.stage.said,
        "faults": [*heard.faults, *sorted(still)],
        "seconds": seconds,
        "series": series,
    }


def silent(newest: Mapping[str, float], now: float) -> set[str]:
    """A fault for each part whose ``newest`` status (seconds since the epoch) is old ``now``."""
    return {
        f"the {name} said nothing for more than {SILENT_S:.0f} s"
        for name, at in newest.items()
        if now - at > SILENT_S
    }


def _sample(scene: Scene) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in PARTS:
        files = threads = memory = 0
        for process in scene.stage.tree(name):
            try:
                with process.oneshot():
                    files += process.num_fds()
                    threads += process.num_threads()
                    memory += process.memory_info().rss
            except psutil.Error:
                continue
        found |= {
            f"{name}: open files": files,
            f"{name}: threads": threads,
            f"{name}: MiB resident": memory / 2**20,
        }
    found["learner: events behind"] = scene.heard.learners[-1].lag_events
    found["worker: events waiting"] = scene.heard.workers[-1].queue_depth
    found["worker: KiB spilled"] = _bytes_under(scene.stage) / 1024
    return found


def _bytes_under(stage: Stage) -> int:
    def size(path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError:
            return 0

    return sum(size(path) for path in stage.spill.rglob("*"))


def slopes(found: Mapping[str, Any]) -> dict[str, Slope]:
    """By figure."""
    return {name: slope(found["seconds"], each) for name, each in found["series"].items()}


def faults_of(found: Mapping[str, Any]) -> list[str]:
    """What must not be: growth, wrong answers, errors, parts that ended."""
    grown = [name for name, each in slopes(found).items() if each.verdict == "grows"]
    return [
        *(f"{name} grows" for name in grown),
        *([f"{found['wrong']} wrong answers"] if found["wrong"] else []),
        *([f"{found['errors']} requests failed"] if found["errors"] else []),
        *found["restarts"],
        *found["faults"],
    ]

"""Prometheus metrics of a worker, from its status record.

The engine decodes in one process, and the API serves ``/metrics`` in another. Where
``PROMETHEUS_MULTIPROC_DIR`` names a folder before both start, as ``hvd serve`` does, these metrics
are on the API's page beside vLLM's own; without it they stay in the engine process. A thread writes
them once a second; a decoding cycle never does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

from prometheus_client import Counter, Gauge

from decoder.contracts.status import SideSums, WorkerStatus
from decoder.limited_log import LimitedLog
from decoder.telemetry import mapped

EVERY_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 1.0
FALLBACKS: Final = ("none", "cache", "model")

COUNTS: Final = (
    "requests_started", "requests_stopped", "tokens", "drafts_labelled", "events_made",
    "events_sent", "events_dropped", "events_failed", "events_in_doubt", "carrier_deaths",
    "fallbacks", "probes", "asleep", "undrafted", "cache_evicted", "cache_shed", "swaps", "faults",
)  # fmt: skip
COUNTS_BY: Final = {
    "cycles": "arm", "drafted": "arm", "accepted": "arm", "drops": "reason",
    "events_refused": "reason", "refusals": "reason", "left_out": "reason", "ignored": "reason",
}  # fmt: skip
"""Fields that hold counts by the value of a label."""
LEVELS: Final = (
    "policy_version", "publication", "threshold", "rate", "advantage", "queue_depth",
    "choose_us_p50", "own_us_p50", "exposed_us_p50", "cache_bytes", "draft_us",
    "policy_applied_at", "swap_ms_max",
)  # fmt: skip


def meaning_of(field: str) -> str:
    """What a field of a worker's status means."""
    return WorkerStatus.model_fields[field].description or ""


@cache
def _counter(name: str, meaning: str, label: str | None = None) -> Counter:
    return Counter(f"hvd_{name}", meaning, ["worker", *([label] if label else [])])


@cache
def _gauge(name: str, meaning: str, label: str | None = None) -> Gauge:
    labels = ["worker", *([label] if label else [])]
    return Gauge(f"hvd_{name}", meaning, labels, multiprocess_mode="mostrecent")


def publish(status: WorkerStatus, earlier: WorkerStatus | None) -> None:
    """Set the metrics to ``status``; counters grow by the difference to ``earlier``."""
    worker = status.process
    for name in COUNTS:
        grown = getattr(status, name) - (getattr(earlier, name) if earlier else 0)
        _counter(name, meaning_of(name)).labels(worker).inc(max(grown, 0))
    for name, label in COUNTS_BY.items():
        before: Mapping[str, int] = getattr(earlier, name) if earlier else {}
        for value, count in getattr(status, name).items():
            _counter(name, meaning_of(name), label).labels(worker, value).inc(
                max(count - before.get(value, 0), 0)
            )
    for name in LEVELS:
        _gauge(name, meaning_of(name)).labels(worker).set(getattr(status, name))
    _gauge("serving", "1 for the scope that the worker serves.", "scope").labels(
        worker, status.scope
    ).set(1)
    for side, sums in status.sides.items():
        past = earlier.sides.get(side, SideSums()) if earlier else SideSums()
        tokens = _counter("side_tokens", "Tokens of steps that a variant decided.", "side")
        tokens.labels(worker, side).inc(sums.tokens - past.tokens)
        seconds = _counter("side_seconds", "Seconds that these steps took.", "side")
        seconds.labels(worker, side).inc((sums.us - past.us) / 1e6)
    fallback = _gauge("fallback", "1 for the fixed arm that the no-regret floor serves.", "arm")
    for arm in FALLBACKS:
        fallback.labels(worker, arm).set(status.fallback == arm)


class MetricsPage:
    """The thread that publishes ``status()`` every ``every_s`` seconds, and at the end."""

    def __init__(self, status: Callable[[], WorkerStatus], every_s: float = EVERY_S) -> None:
        self._status, self._every_s = status, every_s
        self._limited_log = LimitedLog()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-metrics", daemon=True)

    def start(self) -> None:
        """Begin to publish."""
        mapped.install()
        self._thread.start()

    def close(self) -> None:
        """Publish once more and stop."""
        self._stopping.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        earlier = None
        while True:
            stopping = self._stopping.wait(self._every_s)
            try:
                status = self._status()
                before, earlier = earlier, status  # first, so a failure below counts nothing twice
                publish(status, before)
            except Exception:  # noqa: BLE001 -- the next round publishes again
                self._limited_log.exception("metrics were not published")
            if stopping:
                return

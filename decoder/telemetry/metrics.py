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

COUNTS: Final = {
    "requests_started": "Requests begun.",
    "requests_stopped": "Requests ended.",
    "tokens": "Tokens committed.",
    "drafts_labelled": "Cache drafts whose accepted length became known.",
    "events_made": "Draft events made, one a cycle.",
    "events_sent": "Draft events acknowledged by the broker.",
    "events_dropped": "Draft events that the worker dropped.",
    "events_failed": "Draft events left when the worker closed.",
    "events_in_doubt": "Draft events sent and never acknowledged.",
    "carrier_deaths": "Deaths of the process that carries events to the broker.",
    "fallbacks": "Times the no-regret floor replaced the policy by a fixed arm.",
    "probes": "Steps decided only to measure the model drafter, or a step without drafts.",
    "asleep": "Steps without a search for drafts, since none pays (paused).",
    "undrafted": "Model drafts chosen but not made.",
    "cache_evicted": "Pages of earlier outputs evicted from the suffix caches.",
    "cache_shed": "Pages of their own text that running requests lost, for want of memory.",
    "swaps": "Policies applied.",
    "faults": "Steps in which hybrid decoding failed and the worker decoded plainly.",
}
COUNTS_BY: Final = {
    "cycles": ("arm", "Decoding cycles."),
    "drafted": ("arm", "Draft tokens verified."),
    "accepted": ("arm", "Draft tokens accepted."),
    "drops": ("reason", "Draft events that the worker dropped, by reason."),
    "events_refused": ("reason", "Draft events that the broker refused for good."),
    "refusals": ("reason", "Policy bundles refused."),
    "left_out": ("reason", "Requests excluded from drafting."),
    "ignored": ("reason", "Policy bundles skipped: older, far too new, or of an unknown role."),
}
LEVELS: Final = {
    "policy_version": "Version of the serving policy.",
    "publication": "Number of its publication; 0: shipped with the worker.",
    "threshold": "Decision parameter of a threshold policy.",
    "rate": "Decision parameter of a survival policy, tokens a plain step.",
    "advantage": "Time of the best fixed arm over the policy's, recently; above 1 is ahead.",
    "queue_depth": "Draft events waiting, those in flight included.",
    "choose_us_p50": "Microseconds to propose, predict and decide for one step, median.",
    "own_us_p50": "Microseconds of all work of the router and its adapter in a step, median.",
    "exposed_us_p50": "Microseconds of that work that the engine waits for, median.",
    "cache_bytes": "Bytes of the suffix caches, at most.",
    "draft_us": "Microseconds the model drafter adds to a step.",
    "policy_applied_at": "When the serving policy was applied, seconds since the epoch.",
    "swap_ms_max": "Longest time from a bundle received to that bundle serving, milliseconds.",
}


@cache
def _counter(name: str, meaning: str, label: str | None) -> Counter:
    return Counter(f"hvd_{name}", meaning, ["worker", *([label] if label else [])])


@cache
def _gauge(name: str, meaning: str, label: str | None = None) -> Gauge:
    labels = ["worker", *([label] if label else [])]
    return Gauge(f"hvd_{name}", meaning, labels, multiprocess_mode="mostrecent")


def publish(status: WorkerStatus, earlier: WorkerStatus | None) -> None:
    """Set the metrics to ``status``; counters grow by the difference to ``earlier``."""
    worker = status.process
    for name, meaning in COUNTS.items():
        grown = getattr(status, name) - (getattr(earlier, name) if earlier else 0)
        _counter(name, meaning, None).labels(worker).inc(max(grown, 0))
    for name, (label, meaning) in COUNTS_BY.items():
        before: Mapping[str, int] = getattr(earlier, name) if earlier else {}
        for value, count in getattr(status, name).items():
            _counter(name, meaning, label).labels(worker, value).inc(
                max(count - before.get(value, 0), 0)
            )
    for name, meaning in LEVELS.items():
        _gauge(name, meaning).labels(worker).set(getattr(status, name))
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

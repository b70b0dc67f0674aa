"""A span of OpenTelemetry for each request that came with a trace, made when it has ended.

vLLM sets a tracer up in each of its processes where it is started with ``--otlp-traces-endpoint``;
what is made here goes out by it. Its own span of a request is made in another process, the one that
answers HTTP, under an id that is not known here: so both have the caller's span as their parent.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, Final

from decoder.complaints import Complaints
from decoder.telemetry.queue import EventQueue
from decoder.traced import Ended

log = logging.getLogger(__name__)

ENDPOINT_VARIABLE: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""What vLLM passes on to its processes where it sends spans."""
NAME: Final = "hvd.decode"
EVERY_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 2.0
ENDED: Final = 4_096
"""Requests that may wait for their span: what comes above is left out, and said."""


def is_on() -> bool:
    """Whether this process sends spans."""
    return bool(os.environ.get(ENDPOINT_VARIABLE))


class Spans:
    """The thread that makes spans of what was :meth:`put`; ``worker`` names it on them."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._queue = EventQueue(ENDED)
        self._dropped = 0
        self._complaints = Complaints()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-spans", daemon=True)

    def put(self, ended: Ended) -> None:
        """Take a request that ended. Never blocks or raises."""
        self._queue.put(ended)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Make spans of what is left, and stop."""
        self._stopping.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            log.warning("no spans are sent (%s): install the extra 'tracing', or unset %s.",
                        error, ENDPOINT_VARIABLE)  # fmt: skip
            return
        tracer = trace.get_tracer("hybrid-verified-decoding")
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(EVERY_S)
            for ended in self._queue.take(ENDED):
                try:
                    _make(tracer, ended, self._worker)
                except Exception:  # noqa: BLE001 -- the next request has a span all the same
                    self._complaints.exception("a request has no span")
            if self._queue.dropped > self._dropped:
                left_out, self._dropped = self._queue.dropped - self._dropped, self._queue.dropped
                self._complaints.warning("%d requests have no span: too many ended", left_out)


def _make(tracer: Any, ended: Ended, worker: str) -> None:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": ended.parent})
    span = tracer.start_span(NAME, context, start_time=int(ended.traced.began * 1e9))
    span.set_attributes(attributes_of(ended) | {"hvd.worker": worker})
    span.end(int(ended.at * 1e9))


def attributes_of(ended: Ended) -> dict[str, str | int | float]:
    """What a span says of a request: numbers, and names that telemetry knows."""
    traced = ended.traced
    cycles = max(traced.cycles.total(), 1)
    told: dict[str, str | int | float] = {
        "hvd.request": ended.request,
        "hvd.choice": ended.choice,
        "hvd.ended": ended.reason,
        "hvd.policy_version": traced.version,
        "hvd.publication": traced.publication,
        "hvd.decision_us_mean": round(traced.decided_us / cycles, 1),
    }
    for arm in ("none", "cache", "model"):
        told[f"hvd.cycles.{arm}"] = traced.cycles[arm]
    for arm in ("cache", "model", *(["graft"] if traced.drafted["graft"] else [])):
        told[f"hvd.drafted.{arm}"] = traced.drafted[arm]
        told[f"hvd.accepted.{arm}"] = traced.accepted[arm]
    return told

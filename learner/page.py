"""What a learner answers over HTTP: ``/metrics``, ``/health`` and ``/ready``.

``/health`` fails where the loop has not turned for :data:`STUCK_SECONDS`, so that a supervisor
starts the process again. Kafka or MLflow being away is no such reason. ``/ready`` holds from when
the topic was read to its end once and the leases are known, so that a rolling update waits for a
successor who can take over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from decoder.contracts.errors import SettingsError
from decoder.contracts.status import LearnerStatus
from learner.metrics import StatusCollector
from learner.settings import LearnerSettings

STUCK_SECONDS: Final = 120.0
"""A turn takes a second or two; one in which many records are worked off, ten."""
CLIENT_SECONDS: Final = 10.0
"""A client that sends nothing for so long is left."""
ANSWER_SECONDS: Final = 120.0
"""Time to take an answer whole: a page of megabytes may go through a slow tunnel."""


@dataclass
class Vitals:
    """How the loop is. Written by its thread, read by the page's.

    ``turned_at`` is when it last turned, by the monotonic clock; None while it waits for the
    broker. ``said`` are its newest status records, one a scope.
    """

    turned_at: float | None = None
    ready: bool = False
    said: Sequence[LearnerStatus] = ()

    def turned(self, ready: bool) -> None:
        """The loop has turned; ``ready`` once is ready. Mutates."""
        self.turned_at = time.monotonic()
        self.ready = self.ready or ready

    @property
    def ill(self) -> str:
        """Why the process is to be started again; "" where it is not."""
        stuck = 0.0 if self.turned_at is None else time.monotonic() - self.turned_at
        return f"the loop has not turned for {stuck:.0f} s" if stuck > STUCK_SECONDS else ""

    @property
    def unready(self) -> str:
        """Why this learner cannot take over yet; "" where it can."""
        if self.turned_at is None:
            return "the broker, or a topic, is waited for"
        return "" if self.ready else "the topics have not been read to their ends yet"


@contextmanager
def serving(settings: LearnerSettings, vitals: Vitals) -> Iterator[int | None]:
    """Answer on the port of the settings, if any, until the block ends; yields the port.

    Raises:
        SettingsError: the port cannot be had.
    """
    if settings.port is None:
        yield None
        return
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: vitals.said))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)

    def respond(host: str, path: str) -> tuple[int, str, str]:
        path = path.partition("?")[0]
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(registry).decode()
        wrong = {"/health": vitals.ill, "/ready": vitals.ill or vitals.unready}.get(path)
        if wrong is None:
            return 404, "text/plain", "there are /metrics, /health and /ready\n"
        return 503 if wrong else 200, "text/plain", f"{wrong or 'ok'}\n"

    try:
        server = ThreadingHTTPServer((settings.host, settings.port), handler(respond))
    except OSError as error:
        raise SettingsError(
            f"the learner's page cannot listen on {settings.host}:{settings.port} "
            f"({error.strerror}): choose others with HVD_LEARNER_HOST and HVD_LEARNER_PORT."
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="hvd-page", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def handler(respond: Callable[[str, str], tuple[int, str, str]]) -> type[BaseHTTPRequestHandler]:
    """Answers with the status, content type and text that ``respond`` makes of the host and the
    path that are asked for."""

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS

        def handle(self) -> None:
            """Answer; whoever asked and has gone meanwhile misses nothing."""
            with contextlib.suppress(OSError):
                super().handle()

        def do_GET(self) -> None:
            status, kind, text = respond(self.headers.get("Host", ""), self.path)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.connection.settimeout(ANSWER_SECONDS)
            self.wfile.write(body)
            self.connection.settimeout(CLIENT_SECONDS)

        def log_message(self, format: str, *args: Any) -> None:
            """Probes come every few seconds: nothing is said of them."""

    return Handler

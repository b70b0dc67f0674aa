"""HTTP server of the learner: ``/metrics``, ``/health`` and ``/ready``.

``/health`` fails after :data:`STUCK_SECONDS` without a turn of the loop, so that a supervisor
restarts the process; Kafka or MLflow being away is no such reason. ``/ready`` holds once the topic
has been read to its end and the leases are known: a rolling update waits until the successor can
take over.
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

STUCK_SECONDS: Final = 120.0  # a turn takes a second or two; one that processes many records, ten
CLIENT_SECONDS: Final = 10.0  # timeout of a client that sends nothing
ANSWER_SECONDS: Final = 120.0  # timeout of a client that receives megabytes through a slow tunnel


@dataclass
class Health:
    """Liveness and readiness, written by the loop's thread and read by the page's.

    ``turned_at`` is the monotonic time of the last turn; None while waiting for the broker.
    ``statuses`` are the newest status records, one a scope.
    """

    turned_at: float | None = None
    ready: bool = False
    statuses: Sequence[LearnerStatus] = ()

    def record_turn(self, ready: bool) -> None:
        """Record a turn of the loop; once ready, it stays so. Mutates."""
        self.turned_at = time.monotonic()
        self.ready = self.ready or ready

    @property
    def unhealthy(self) -> str:
        """Why the process must be restarted, or ""."""
        stuck = 0.0 if self.turned_at is None else time.monotonic() - self.turned_at
        return f"the loop has not turned for {stuck:.0f} s" if stuck > STUCK_SECONDS else ""

    @property
    def unready(self) -> str:
        """Why this learner cannot take over yet, or ""."""
        if self.turned_at is None:
            return "waiting for the broker, or a topic"
        return "" if self.ready else "the topics have not been read to their ends yet"


@contextmanager
def serve_page(settings: LearnerSettings, health: Health) -> Iterator[int | None]:
    """Serve on the port of the settings, if any, during the block; yields the port.

    Raises:
        SettingsError: the port is taken.
    """
    if settings.port is None:
        yield None
        return
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: health.statuses))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)

    def respond(host: str, path: str) -> tuple[int, str, str]:
        path = path.partition("?")[0]
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(registry).decode()
        unhealthy = health.unhealthy
        wrong = {"/health": unhealthy, "/ready": unhealthy or health.unready}.get(path)
        if wrong is None:
            return 404, "text/plain", "there are /metrics, /health and /ready\n"
        return 503 if wrong else 200, "text/plain", f"{wrong or 'ok'}\n"

    try:
        server = ThreadingHTTPServer((settings.host, settings.port), make_handler(respond))
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


def make_handler(
    respond: Callable[[str, str], tuple[int, str, str]],
) -> type[BaseHTTPRequestHandler]:
    """A handler that sends the status, content type and text of ``respond(host, path)``."""

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS

        def handle(self) -> None:
            """Respond, unless the client has gone."""
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
            """Log nothing: probes come every few seconds."""

    return Handler

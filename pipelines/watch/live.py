"""The page of a running service, served as it changes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from decoder.complaints import Complaints
from decoder.contracts.errors import ProcessError
from decoder.contracts.settings import KafkaSettings
from pipelines.watch.ledger import Ledger
from pipelines.watch.links import versions_at
from pipelines.watch.observer import Observer
from pipelines.watch.page import page, record

TITLE: Final = "Adaptive decoding, live"
HISTORY_S: Final = 3600.0
ASK_S: Final = 30.0
"""Between two questions to a registry that has no model of the scope yet."""
FRESH_S: Final = 4.0
"""Figures are computed anew no more often: however many look on, it costs a part of a core."""
HOSTS: Final = ("127.0.0.1", "localhost")
"""Names it is asked by. A page of a stranger whose name leads here asks by another."""


class _Figures:
    """The newest figures, computed when somebody asks."""

    def __init__(self, ledger: Ledger, tracking_uri: str) -> None:
        self._ledger = ledger
        self._tracking_uri = tracking_uri
        self._versions: tuple[str, str] = ("", "")  # a scope, and where its versions are
        self._asked = -ASK_S
        self._lock = threading.Lock()
        self._made = -FRESH_S
        self._record: dict[str, Any] = {}

    def now(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() - self._made >= FRESH_S:
                self._record = record(self._ledger, TITLE, versions=self._address())
                self._made = time.monotonic()
            return self._record

    def _address(self) -> str:
        scope, (known, address) = self._ledger.scope, self._versions
        if (scope != known or not address) and time.monotonic() - self._asked >= ASK_S:
            address = versions_at(self._tracking_uri, scope)
            self._versions, self._asked = (scope, address), time.monotonic()
        return address if scope == self._versions[0] else ""


def _answer_to(path: str, figures: _Figures) -> tuple[int, str, str]:
    """Status, type and text."""
    if path == "/":
        return 200, "text/html; charset=utf-8", page(figures.now(), live=True)
    if path == "/figures.json":
        return 200, "application/json", json.dumps(figures.now(), allow_nan=False)
    return 404, "text/plain", "There is / and /figures.json."


@contextmanager
def serving(kafka: KafkaSettings, port: int, tracking_uri: str = "") -> Iterator[str]:
    """Serve the page on 127.0.0.1; its address. It shows the last hour, and what comes.

    Neither a broker that is away nor a record that keeps no contract ends it. Whoever asks by
    another name than that of this machine is refused.

    Args:
        port: 0 for any that is free.
        tracking_uri: of the registry, so that versions are links; "" for none.

    Raises:
        ProcessError: the port is taken.
    """
    ledger = Ledger(keep_s=HISTORY_S)
    figures = _Figures(ledger, tracking_uri)
    complaints = Complaints()  # browsers ask every few seconds

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").partition(":")[0] not in HOSTS:
                self._answer(403, "text/plain", "Ask for http://127.0.0.1 and the port.")
                return
            try:
                self._answer(*_answer_to(self.path, figures))
            except Exception:  # noqa: BLE001 -- the next figures may be well again
                complaints.exception("the page's figures cannot be computed")
                self._answer(503, "text/plain", "The figures cannot be computed now: try again.")

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            with suppress(OSError):  # who asked has gone
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing: the terminal is somebody else's."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ProcessError(
            f"port {port} is taken, so the page cannot be served there: choose another."
        ) from error
    observer = Observer(kafka, ledger, HISTORY_S, patient=True)
    observer.start()
    thread = threading.Thread(target=server.serve_forever, name="page", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        observer.close()

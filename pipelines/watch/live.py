"""The page of a running service, served as it changes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from decoder.complaints import Complaints
from decoder.contracts.errors import ProcessError
from decoder.contracts.redacted import for_anybody
from decoder.contracts.settings import KafkaSettings
from pipelines.watch.ledger import Ledger
from pipelines.watch.now import sentences
from pipelines.watch.observer import Observer
from pipelines.watch.page import Record, record, render

TITLE: Final = "Adaptive decoding, live"
HISTORY_S: Final = 3600.0
FRESH_S: Final = 4.0
"""Figures are computed anew no more often: however many look on, it costs a part of a core."""
HOSTS: Final = ("127.0.0.1", "localhost")
"""Names it is asked by. A page of a stranger whose name leads here asks by another."""


@contextmanager
def serving(kafka: KafkaSettings, port: int, tracking_uri: str = "") -> Iterator[str]:
    """Serve the page on 127.0.0.1, at ``port`` or a free one; its address. It shows the last hour,
    and what comes, with a link to the registry at ``tracking_uri`` where that is a server.

    Neither a broker that is away nor a record that keeps no contract ends it. Whoever asks by
    another name than that of this machine is refused.

    Raises:
        ProcessError: the port is taken.
    """
    ledger = Ledger(keep_s=HISTORY_S)
    registry = for_anybody(tracking_uri) if tracking_uri.startswith("http") else ""
    complaints = Complaints()  # browsers ask every few seconds
    one_at_a_time = threading.Lock()

    @lru_cache(1)
    def figures(period: float) -> Record:
        return record(ledger, TITLE, sentences(ledger, registry))

    def respond(path: str) -> tuple[int, str, str]:
        if path not in ("/", "/figures.json"):
            return 404, "text/plain", "There is / and /figures.json."
        with one_at_a_time:
            now = figures(time.monotonic() // FRESH_S)
        if path == "/":
            return 200, "text/html; charset=utf-8", render(now, live=True)
        return 200, "application/json", json.dumps(now, allow_nan=False)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = 403, "text/plain", "Ask for http://127.0.0.1 and the port."
            try:
                if self.headers.get("Host", "").partition(":")[0] in HOSTS:
                    answer = respond(self.path)
            except Exception:  # noqa: BLE001 -- the next figures may be well again
                complaints.exception("the page's figures cannot be computed")
                answer = 503, "text/plain", "The figures cannot be computed now: try again."
            status, kind, text = answer
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
    observer = Observer(kafka, ledger, HISTORY_S)
    observer.start()
    threading.Thread(target=server.serve_forever, name="page", daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        observer.close()

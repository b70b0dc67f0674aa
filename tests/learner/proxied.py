"""A real ``mlflow server``, and a proxy before it that lets a test do things at a chosen call."""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pipelines.stack import processes
from pipelines.stack.running import registry_arguments, responds

SKIPPED = ("host", "connection", "transfer-encoding", "content-length")


@dataclass
class Proxy:
    """Passes calls on to ``port``; ``url`` is its own.

    ``calls`` and ``answered`` are the paths of those since :meth:`watch`, ``before`` is called with
    the number of each from 0, and may answer it in the server's stead with a status.
    """

    port: int
    url: str = ""
    calls: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    before: Callable[[int, str], int | None] = lambda number, path: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, before: Callable[[int, str], int | None]) -> None:
        """Count calls anew."""
        self.calls, self.answered, self.before = [], [], before


@contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    """A proxy before what listens on ``port``."""
    proxy = Proxy(port)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0].rpartition("/mlflow/")[2]
            with proxy.lock:
                number = len(proxy.calls)
                proxy.calls.append(path)
            status, headers, told = proxy.before(number, path), [], b"forbidden"
            if status is None:
                onward = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
                kept = {k: v for k, v in self.headers.items() if k.lower() not in SKIPPED}
                onward.request(self.command, self.path, body or None, kept)
                got = onward.getresponse()
                status, headers, told = got.status, got.getheaders(), got.read()
                onward.close()
            proxy.answered.append(path)
            self.send_response(status)
            for key, value in headers:
                if key.lower() not in SKIPPED:
                    self.send_header(key, value)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815 -- by http.server

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def mlflow_server(home: Path, port: int) -> Iterator[str]:
    """``mlflow server`` on SQLite in ``home``; its address."""
    url = f"http://127.0.0.1:{port}"
    child = processes.start(
        processes.Part(
            "mlflow", registry_arguments(port, home), home / "server.log",
            environment=os.environ | {
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                "MLFLOW_DISABLE_TELEMETRY": "true",
            },
        )
    )  # fmt: skip
    try:
        processes.wait_until(child, lambda: responds(f"{url}/health"), 300.0)
        yield url
    finally:
        processes.stop([child])

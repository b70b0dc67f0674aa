"""A worker without a model: ``python -m pipelines.lab.chaos.standin --port 8000``.

Router, suffix cache, telemetry and policy feed are a worker's own; the target is a function of the
prompt, a token a step, so that every answer is known and a start takes seconds.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import numpy as np

from decoder.contracts.features import TOKEN_CLASSES
from decoder.contracts.settings import KafkaSettings
from decoder.core.router import Committed, DraftRouter, RequestOptions
from decoder.settings import WorkerSettings
from decoder.worker import make_worker

STEP_S: Final = 0.01  # a request of 24 tokens is under way for a good while
_turn, _names = threading.Lock(), itertools.count()


def text_of(prompt: str, tokens: int) -> list[int]:
    """The answer to ``prompt``: phrases that all answers share, in an order of its own, so that a
    copy is right to the end of a phrase and then as it happens."""
    phrases = random.Random(prompt).choices(range(16), k=tokens)
    return [4 * phrase + i for phrase in phrases for i in range(4)][:tokens]


def decode(router: DraftRouter, prompt: str, text: list[int]) -> None:
    """Commit ``text`` by the router's cycle, of one request at a time: mutates ``router``."""
    name, read = f"r{next(_names)}", np.array(list(prompt.encode()[-64:]), np.int32)
    with _turn:
        router.start(name, read, RequestOptions(len(text), 1 << 20, workload="chaos"))
    for done, token in enumerate(text):
        with _turn:
            if done:
                router.choose([name])
                router.drafted([name], [0], 0)
                router.settle()
            time.sleep(STEP_S)
            told = Committed(name, [token], 0, len(read) + done + 1)
            router.observe([told], 1 if done else len(read))
    with _turn:
        router.stop(name, "length")


class Handler(BaseHTTPRequestHandler):
    """The two routes of the API that clients here ask; a stream comes in one piece."""

    router: DraftRouter

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: where the disk is full it would end the answer."""

    def do_GET(self) -> None:
        """It is well."""
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        """An answer."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = json.dumps(body["messages"])
        text = text_of(prompt, int(body["max_tokens"]))
        decode(self.router, prompt, text)
        self.do_GET()
        self.wfile.write(f"data: {json.dumps({'choices': [{'token_ids': text}]})}\n".encode())


def main(port: int) -> None:
    """Serve until SIGTERM; then answer what was asked, and send what is to be told."""
    classes = np.zeros((64, len(TOKEN_CLASSES)), np.float32)
    worker = make_worker(WorkerSettings.load(), KafkaSettings.load(), "standin", classes, False)
    Handler.router = worker.router
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = False  # closing it waits for them
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()
    server.server_close()
    worker.close()


if __name__ == "__main__":
    main(int(sys.argv[sys.argv.index("--port") + 1]))

"""A worker without a model: the project's own decoding cycle over texts that are known beforehand.

::

    python -m pipelines.chaos.standin --port 8000

Router, suffix cache, telemetry and policy feed are a worker's own; the target is a function of the
prompt, so that every answer is known and a start takes seconds. It proves what is around a model
(processes, topics, policies, counts), and says nothing about vLLM.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import random
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import numpy as np

from decoder.contracts.features import TOKEN_CLASSES
from decoder.contracts.settings import KafkaSettings
from decoder.labels import common_prefix
from decoder.router import Committed, DraftRouter, RequestOptions
from decoder.settings import WorkerSettings
from decoder.worker import make_worker

VOCABULARY: Final = 64
PHRASES: Final = 16
SCOPE: Final = "standin"
STEP_S: Final = 0.02
"""What a step of the target takes: a request of 24 tokens is under way for a good while."""
DRAIN_S: Final = 5.0


def text_of(prompt: str, tokens: int) -> list[int]:
    """The answer to ``prompt``: phrases that all answers share, in an order of its own, so that a
    copy is right to the end of a phrase and then as it happens."""
    shared, draw = random.Random(0), random.Random(prompt)
    phrases = [
        [shared.randrange(1, VOCABULARY) for _ in range(shared.randint(2, 7))]
        for _ in range(PHRASES)
    ]
    text: list[int] = []
    while len(text) < tokens:
        text += draw.choice(phrases)
    return text[:tokens]


@dataclass
class Asked:
    """A request: what it will answer, and how far it has come. ``out`` ends with None."""

    name: str
    prompt: list[int]
    text: list[int]
    done: int = 0
    out: queue.Queue[list[int] | None] = field(default_factory=queue.Queue)


def take_turns(router: DraftRouter, coming: queue.Queue[Asked]) -> None:
    """Decode for ever, all requests that are there in one step; for a thread of its own."""
    running: dict[str, Asked] = {}
    while True:
        while not running or not coming.empty():
            asked = coming.get()
            options = RequestOptions(len(asked.text), 1 << 20, opaque="", workload="chaos")
            router.start(asked.name, np.array(asked.prompt, np.int32), options)
            running[asked.name] = asked
            _commit(router, running, [(asked, asked.text[:1], 0)], len(asked.prompt))
        names = list(running)
        decisions = router.choose(names)
        drafts = [list(d.tokens) if d.arm == "cache" else [] for d in decisions]
        router.drafted(names, [len(draft) for draft in drafts], 0)
        router.settle()
        time.sleep(STEP_S)
        outcomes = []
        for name, draft in zip(names, drafts, strict=True):
            asked = running[name]
            rest = asked.text[asked.done :]
            taken = common_prefix(draft, rest)
            # what was drafted, and then the target's own: a wrong draft would be a wrong answer
            outcomes.append((asked, [*draft[:taken], *rest[taken : taken + 1]], len(draft)))
        _commit(router, running, outcomes, sum(1 + len(draft) for draft in drafts))


def _commit(
    router: DraftRouter,
    running: dict[str, Asked],
    outcomes: list[tuple[Asked, list[int], int]],
    step_tokens: int,
) -> None:
    told = [
        Committed(asked.name, tokens, verified, len(asked.prompt) + asked.done + len(tokens))
        for asked, tokens, verified in outcomes
    ]
    router.observe(told, step_tokens)
    for asked, tokens, _ in outcomes:
        asked.done += len(tokens)
        asked.out.put(tokens)
        if asked.done >= len(asked.text):
            router.stop(asked.name, "length")
            asked.out.put(None)
            del running[asked.name]


def handler(coming: queue.Queue[Asked], ending: threading.Event) -> type[BaseHTTPRequestHandler]:
    """The two routes of the API that clients here ask; nothing new once the worker is ending."""
    numbers = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a line a request is of no use."""

        def do_GET(self) -> None:
            if ending.is_set():
                self.send_error(503)
            elif self.path == "/health":
                self._whole({})
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if ending.is_set():
                self.send_error(503)
                return
            prompt = json.dumps(body["messages"])
            read = list(prompt.encode()[-64:])
            asked = Asked(f"r{next(numbers)}", read, text_of(prompt, int(body["max_tokens"])))
            coming.put(asked)
            made = iter(asked.out.get, None)
            if not body.get("stream"):
                tokens = [t for part in made for t in part or ()]
                self._whole({"choices": [{"token_ids": tokens, "finish_reason": "length"}]})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for part in made:
                self._event(json.dumps({"choices": [{"token_ids": part}]}))
            self._event(json.dumps({"choices": [{"finish_reason": "length"}]}))
            self._event("[DONE]")

        def _event(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())

        def _whole(self, answer: Mapping[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def main() -> None:
    """Serve until SIGTERM; then answer what was asked, and send what is to be told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    classes = np.zeros((VOCABULARY, len(TOKEN_CLASSES)), np.float32)
    worker = make_worker(
        WorkerSettings.load(), KafkaSettings.load(), SCOPE, classes, False,
        target="standin", drafter="none",
    )  # fmt: skip
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    coming: queue.Queue[Asked] = queue.Queue()
    threading.Thread(target=take_turns, args=(worker.router, coming), daemon=True).start()
    server = ThreadingHTTPServer(("127.0.0.1", port), handler(coming, ending))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ending.wait()
    counters, deadline = worker.router.counters, time.monotonic() + DRAIN_S
    while time.monotonic() < deadline:
        time.sleep(2 * STEP_S)  # for what has come and is not counted yet, or not read
        if coming.empty() and counters.started == counters.stopped:
            break
    server.shutdown()
    server.server_close()
    worker.close()


if __name__ == "__main__":
    main()

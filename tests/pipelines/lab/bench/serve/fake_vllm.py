"""A server that talks like vLLM's and decodes by a rule: the tests' stand-in for a real one.

``python -m tests.pipelines.lab.bench.serve.fake_vllm PORT [HABIT]``. The answer to a prompt is
``max_tokens`` ids that count up from the length of its messages, two and an x in each event, as if
every cycle accepted one drafted token. Habits: ``differ`` counts from one higher; ``refuse``
answers every request with status 400; ``refuse-long`` those of more than 20 characters;
``interrupt`` sends its parent a Ctrl-C at the first request of more than 20 characters; ``tire``
refuses all requests after the third; ``die`` ends at once. ``company:FOLDER`` goes before another
habit: told to end it sends its parent a SIGTERM and ends when two such servers have been told.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HABIT = sys.argv[2] if len(sys.argv) > 2 else ""
COMPANY = ""
if HABIT.startswith("company:"):
    COMPANY, HABIT = HABIT.removeprefix("company:").split(":")
LOCK = threading.Lock()
SENT = {"tokens": 0, "drafts": 0, "answers": 0}


def metrics() -> str:
    label = 'engine="0",model_name="m"'
    values = {
        "generation_tokens_total": SENT["tokens"],
        "spec_decode_num_drafts_total": SENT["drafts"],
        "spec_decode_num_accepted_tokens_total": SENT["drafts"],
    }
    lines = [f"vllm:{name}{{{label}}} {float(value)}" for name, value in values.items()]
    return "\n".join(["# HELP vllm:generation_tokens_total said", *lines]) + "\n"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        pages = {
            "/metrics": metrics(),
            "/server_info?config_format=json": json.dumps(
                {"vllm_config": {"scheduler_config": {"async_scheduling": True}}}
            ),
        }
        self.answer(200, pages.get(self.path, ""))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        length = sum(len(message["content"]) for message in asked["messages"])
        is_long = length > 20
        tired = HABIT == "tire" and SENT["answers"] >= 3
        if HABIT == "refuse" or (HABIT == "refuse-long" and is_long) or tired:
            return self.answer(400, "too long for me")
        if HABIT == "interrupt" and is_long:
            os.kill(os.getppid(), signal.SIGINT)
            threading.Event().wait()
        first = length + (HABIT == "differ")
        ids = list(range(first, first + asked["max_tokens"]))
        self.send_response(200)
        self.end_headers()
        for i in range(0, len(ids), 2):
            event = {"choices": [{"delta": {"content": "x"}, "token_ids": ids[i : i + 2]}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        with LOCK:
            SENT["tokens"] += len(ids)
            SENT["drafts"] += len(ids) // 2
            SENT["answers"] += 1
        self.wfile.write(b"data: [DONE]\n\n")
        return None


def end_in_company(*_: object) -> None:
    Path(COMPANY, str(os.getpid())).touch()
    os.kill(os.getppid(), signal.SIGTERM)
    while len([*Path(COMPANY).iterdir()]) < 2:
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    if COMPANY:
        signal.signal(signal.SIGTERM, end_in_company)
    if HABIT == "die":
        sys.exit("no weights to be found")
    print("(EngineCore pid=1) INFO 11-27 08:00:00 Using V2 Model Runner", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()

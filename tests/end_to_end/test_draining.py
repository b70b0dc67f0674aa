"""A worker that is told to end, by SIGTERM as a fleet does it, with a request under way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from pipelines import embedded, machine
from pipelines.stack.running import HVD
from tests.server import PATIENCE_S, serving

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 48


def test_the_answer_under_way_is_whole_and_the_next_client_may_try_elsewhere(
    tmp_path: Path,
) -> None:
    port = machine.free_port()
    environment = {
        **os.environ, "HVD_WORKER_TELEMETRY": "false", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    arguments = [*HVD, "serve", "--port", str(port), "--", "--shutdown-timeout=240"]
    log = tmp_path / "server.log"
    with serving(arguments, environment, port, log) as server:
        asked = {
            "model": embedded.SERVED_NAME,
            "messages": [{"role": "user", "content": "Count from one to two hundred."}],
            "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        tokens: list[int] = []
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S
        ) as stream:
            lines = stream.iter_lines()
            refused = None
            for line in lines:
                if line == "data: [DONE]":
                    break
                if line:
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        tokens += choice.get("token_ids") or ()
                if tokens and refused is None:
                    server.child.process.send_signal(signal.SIGTERM)
                    while refused is None or refused.status_code == 200:
                        refused = httpx.get(f"{server.url}/health", timeout=PATIENCE_S)
                    asked_late = httpx.post(
                        f"{server.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S
                    )
        assert refused is not None and refused.status_code == 503
        assert asked_late.status_code == 503 and asked_late.headers["retry-after"] == "1"
        assert len(tokens) == TOKENS
        server.child.process.wait(PATIENCE_S)
    assert "cannot schedule new futures" not in log.read_text(errors="replace")

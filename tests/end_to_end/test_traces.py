"""Through the real server: a caller's trace has vLLM's span of a request, and ours beside it."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import httpx
import pytest

from pipelines import embedded, machine
from pipelines.serve.command import METRICS_VARIABLE, ServeOptions, serve_command
from tests import conftest
from tests.otlp import receiving
from tests.server import serving

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = "A word of its own: lighthouse."
until = partial(conftest.until, seconds=60.0, turn=partial(time.sleep, 0.2))


def test_both_spans_are_children_of_the_callers(tmp_path: Path) -> None:
    with receiving() as (endpoint, spans):
        options = ServeOptions(
            str(embedded.ensure_model()),
            port=machine.free_port(),
            served_name=embedded.SERVED_NAME,
            extra=("--max-model-len", "512", "--otlp-traces-endpoint", endpoint),
        )
        environment = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "HVD_WORKER_TELEMETRY": "0",
            METRICS_VARIABLE: str(tmp_path),
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        arguments, environment = serve_command(
            options, environment, machine.cpu_flags(), on_cpu=True
        )
        with serving(arguments, environment, options.port, tmp_path / "log") as server:
            asked = {
                "model": embedded.SERVED_NAME,
                "messages": [{"role": "user", "content": PROMPT}],
                "max_tokens": 24,
                "temperature": 0,
            }
            url = f"{server.url}/v1/chat/completions"
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "Authorization": "Bearer its-key"}
            answer = httpx.post(url, json=asked, headers=headers, timeout=120).raise_for_status()
            httpx.post(url, json=asked, timeout=120).raise_for_status()  # without a trace
            wanted = {"llm_request", "hvd.decode"}
            until(lambda: wanted <= {s.name for s in spans if s.trace_id.hex() == TRACE})
    ours = [span for span in spans if span.name == "hvd.decode"]
    theirs = [s for s in spans if s.name == "llm_request" and s.trace_id.hex() == TRACE]
    assert len(ours) == len(theirs) == 1
    assert {s.parent_span_id.hex() for s in (*ours, *theirs)} == {SPAN}
    told = {each.key: each.value for each in ours[0].attributes}
    assert told["hvd.request"].string_value == answer.headers["x-hvd-request"]
    arms = ("none", "cache", "model")
    tokens = 1 + sum(told[f"hvd.cycles.{arm}"].int_value for arm in arms)
    tokens += sum(told[f"hvd.accepted.{arm}"].int_value for arm in arms[1:])
    left = answer.json()["usage"]["completion_tokens"] - tokens
    assert left in (0, 1), "a last token has no room for a draft: its step is no cycle"
    assert "lighthouse" not in str(ours) and "its-key" not in str(ours)

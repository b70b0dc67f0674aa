"""Through the real server: what one API key or salt wrote is in no draft of another's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from decoder.contracts.identity import Pseudonyms
from pipelines import embedded, machine
from pipelines.serve.command import METRICS_VARIABLE, ServeOptions, serve_command
from tests.server import Server, serving

pytestmark = [pytest.mark.engine, pytest.mark.long]

KEY = "0123456789abcdef0123456789abcdef"
KEYS = ("alice", "bob", "carol", "dora")
PROMPT = "Write a short story about a lighthouse keeper and the name of the ship that never came."


@dataclass
class Asked:
    """A server, and what its drafts showed."""

    server: Server
    drafts: Path

    def ask(self, key: str | None, **body: Any) -> httpx.Response:
        self.drafts.write_text("")
        headers = {"X-Request-Id": f"of {key}"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        asked = {
            "model": embedded.SERVED_NAME, "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 60, "temperature": 0, **body,
        }  # fmt: skip
        url = f"{self.server.url}/v1/chat/completions"
        return httpx.post(url, json=asked, headers=headers, timeout=300)

    def shown(self, key: str, **body: Any) -> int:
        """Tokens of others' text in the drafts of a request, added up over its steps."""
        self.ask(key, **body).raise_for_status()
        lines = self.drafts.read_text().split()
        assert lines, "a request that asked for no draft proves nothing"
        return sum(map(int, lines))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    home = tmp_path_factory.mktemp("tenants")
    options = ServeOptions(
        str(embedded.ensure_model()),
        port=machine.free_port(),
        served_name=embedded.SERVED_NAME,
        extra=("--max-model-len", "512", "--max-num-seqs", "4", "--api-key", *KEYS),
    )
    drafts = home / "drafts"
    environment = {
        **os.environ,
        "HVD_WORKER_ID_KEY": KEY,
        "HVD_WORKER_TELEMETRY": "0",
        "HVD_WORKER_FLOOR": "0",  # by the clock it may decide that nothing is drafted
        "SPIED_DRAFTS": str(drafts),
        METRICS_VARIABLE: str(home),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    arguments, environment = serve_command(options, environment, machine.cpu_flags(), on_cpu=True)
    at = arguments.index("-m")
    arguments[at : at + 2] = [str(Path(__file__).with_name("spied_server.py"))]
    with serving(arguments, environment, options.port, home / "log") as server:
        yield Asked(server, drafts)


def test_no_draft_shows_what_another_key_or_salt_wrote(asked: Asked) -> None:
    names = Pseudonyms(KEY.encode())
    asked.shown("alice")
    assert asked.shown("alice") > 0, "of one key, requests draft from each other's output"
    forged = {"hvd_tenant": names.of("tenant", "key:alice"), "hvd_seal": "0" * 32}
    assert asked.shown("bob", vllm_xargs=forged) == 0
    assert asked.shown("carol", cache_salt="a salt") == 0
    assert asked.shown("carol") == 0
    assert asked.shown("carol", cache_salt="another") == 0
    assert asked.shown("carol", cache_salt="a salt") > 0
    assert asked.shown("bob") > 0


def test_the_answer_names_the_request_as_telemetry_does(asked: Asked) -> None:
    told = asked.ask("dora", max_tokens=1).headers["X-HVD-Request"]
    assert told == Pseudonyms(KEY.encode()).of("request", "of dora")
    streamed = asked.ask("dora", max_tokens=3, stream=True)
    assert streamed.headers["X-HVD-Request"] == told and "data: [DONE]" in streamed.text


def test_what_vllm_refuses_it_still_refuses_itself(asked: Asked) -> None:
    assert asked.ask("mallory").status_code == asked.ask(None).status_code == 401
    assert asked.ask("dora", vllm_xargs="text").status_code == 400
    url = f"{asked.server.url}/v1/chat/completions"
    headers = {"Authorization": "Bearer dora", "Content-Type": "application/json"}
    for body in (b"{", b"", b"[]", b'{"a": ' + b"[" * 100_000):
        status = httpx.post(url, content=body, headers=headers, timeout=300).status_code
        assert 400 <= status < 500, (body[:20], status)
    body = b'{"model": "%s", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}'
    whole = body % embedded.SERVED_NAME.encode()
    parts = iter([whole[:20], whole[20:40], whole[40:]])  # sent in chunks, without a length
    assert httpx.post(url, content=parts, headers=headers, timeout=300).status_code == 200
    assert asked.server.lives()

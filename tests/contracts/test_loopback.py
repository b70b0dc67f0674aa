"""What is asked on this machine goes by no proxy, whatever the environment says."""

from __future__ import annotations

import ast
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from kafka.errors import KafkaConnectionError

import decoder
from decoder.contracts.errors import RegistryError
from decoder.contracts.loopback import is_loopback
from decoder.contracts.settings import KafkaSettings
from decoder.kafka.tokens import Tokens
from learner.proxies import exempt, proxy_of
from learner.release.registry import Registry
from pipelines import doctor, machine
from pipelines.stack.running import TRACKING_VARIABLE, responds

ROOT = Path(decoder.__file__).parents[1]
KINDS = ("http_proxy", "https_proxy", "all_proxy")


class Handler(http.server.BaseHTTPRequestHandler):
    """Says what its server says."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b'{"access_token": "t"}'
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_CONNECT = do_GET  # noqa: N815 -- the library's names

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Server(http.server.ThreadingHTTPServer):
    """Answers every request with ``status`` and an empty object, and keeps what it was asked."""

    def __init__(self, status: int) -> None:
        self.status, self.asked = status, list[str]()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(200) as served:
        yield served
        served.shutdown()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """What the environment names for every address."""
    with Server(503) as served:
        for name in KINDS:
            monkeypatch.setenv(name, served.url)
            monkeypatch.setenv(name.upper(), served.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "")  # set, so that what a client adds goes with the test
        yield served
        served.shutdown()


def test_which_addresses_are_of_this_machine() -> None:
    here = "127.0.0.1:5000", "127.8.9.1", "localhost", "LOCALHOST:1", "[::1]:80", "u:p@127.0.0.1"
    assert all(is_loopback(f"http://{host}/x") for host in here)
    there = "127.0.0.1.example.org", "example.org", "10.0.0.1", "[2001:db8::1]", "[::1", ""
    assert not any(is_loopback(f"http://{host}/x") for host in there)
    assert not is_loopback("sqlite:///127.0.0.1")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "a.org, 127.0.0.1"}, "a.org,127.0.0.1,localhost,::1"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,b,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_both_spellings_name_this_machine_beside_what_was_there(
    given: dict[str, str], wanted: str
) -> None:
    exempt(given)
    exempt(given)
    assert given == {"no_proxy": wanted, "NO_PROXY": wanted}


def test_a_server_of_this_machine_is_asked_itself_though_a_proxy_is_named(
    server: Server, proxy: Server
) -> None:
    assert responds(f"{server.url}/health")
    kafka = KafkaSettings(
        security_protocol="SASL_PLAINTEXT", sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_url=f"{server.url}/token",
        sasl_oauth_client_id="id", sasl_oauth_client_secret="s",
    )  # fmt: skip
    assert Tokens(kafka).token() == "t"
    Registry(server.url).standings()
    assert {path.partition("?")[0] for path in server.asked} >= {"/health", "/token"}
    assert len(server.asked) > 2 and not proxy.asked


@pytest.mark.parametrize("proxy_url", ["socks5://127.0.0.1:9", "nonsense://127.0.0.1:9"])
def test_a_proxy_that_nobody_can_speak_to_is_no_traceback(
    server: Server, proxy: Server, monkeypatch: pytest.MonkeyPatch, proxy_url: str
) -> None:
    for name in KINDS:
        monkeypatch.setenv(name, proxy_url)
        monkeypatch.setenv(name.upper(), proxy_url)
    assert responds(f"{server.url}/health")
    assert not responds("http://example.org/health")
    kafka = KafkaSettings(
        security_protocol="SASL_PLAINTEXT", sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_url="http://example.org/token",
        sasl_oauth_client_id="id", sasl_oauth_client_secret="s",
    )  # fmt: skip
    with pytest.raises(KafkaConnectionError, match="gives no token"):
        Tokens(kafka).token()
    monkeypatch.setenv(TRACKING_VARIABLE, "http://example.org")
    check = doctor.registry()
    assert not check.ok and proxy_url in check.found


def test_who_asks_a_registry_by_a_proxy_is_told_so_without_its_password(
    proxy: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = proxy.url.replace("//", "//***@")
    monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:hunter@"))
    with pytest.raises(RegistryError) as failed:
        Registry("http://mlflow.example.org:5000").standings()
    assert proxy.asked and shown in str(failed.value) and "hunter" not in str(failed.value)
    monkeypatch.setenv("no_proxy", "example.org")
    assert not proxy_of("http://mlflow.example.org:5000")
    assert proxy_of("http://mlflow.example.com:5000") and not proxy_of("sqlite:///x")


def test_every_client_of_ours_says_whether_it_goes_by_a_proxy() -> None:
    """httpx reads the environment unless it is told not to."""
    calls = [
        (file.relative_to(ROOT), call)
        for room in ("decoder", "learner", "pipelines")
        for file in (ROOT / room).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("httpx.")
    ]
    asking = [
        (f, c) for f, c in calls if c.func.attr in (*vars(httpx.Client), "Client", "AsyncClient")
    ]  # type: ignore[attr-defined]
    silent = [
        f"{file}:{call.lineno}"
        for file, call in asking
        if "trust_env" not in {keyword.arg for keyword in call.keywords}
    ]
    assert len(asking) >= 7 and not silent, silent


def test_a_free_port_is_none_that_a_proxy_answers_for(proxy: Server) -> None:
    assert not responds(f"http://127.0.0.1:{machine.free_port()}/health") and not proxy.asked

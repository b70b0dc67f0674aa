"""Whose a request is: what the middleware writes, and what the engine believes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from decoder.contracts.errors import SettingsError
from decoder.contracts.identity import Pseudonyms
from decoder.settings import WorkerSettings
from decoder.tenancy.identities import NAMES, SEAL, Identities, Identity
from decoder.tenancy.key import FILE_VARIABLE, VARIABLE, ensure_key, key_of
from decoder.tenancy.middleware import TenantMiddleware
from decoder.tenancy.shares import ALONE, owner_of
from pipelines.telemetry.forget import spellings

KEY = "0123456789abcdef0123456789abcdef"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hé \ud800 \U0001f600"}]}


@pytest.fixture(autouse=True)
def operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setenv("HVD_WORKER_TENANTS", "middleware")


class Server:
    """What stands inside the middleware: keeps what it was asked, answers in two parts."""

    def __init__(self) -> None:
        self.app = TenantMiddleware(self)
        self.scope: dict[str, Any] = {}
        self.body = b""
        self.reads = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope, self.body = dict(scope), b""
        if scope["type"] != "http":
            return
        more = self.reads
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.body = b"gone"
                return
            self.body += message["body"]
            more = message["more_body"]
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": False})

    def ask(
        self,
        body: bytes | dict[str, Any] = BODY,
        headers: Iterable[tuple[str, str]] = (),
        method: str = "POST",
        kind: str = "http",
        parts: int = 1,
        leaves: bool = False,
    ) -> list[dict[str, Any]]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = -(-len(raw) // parts) or 1
        chunks = [raw[i : i + size] for i in range(0, len(raw), size)] or [b""]
        messages = [
            {"type": "http.request", "body": c, "more_body": leaves or i + 1 < len(chunks)}
            for i, c in enumerate(chunks)
        ]
        coming = iter([*messages, {"type": "http.disconnect"}])
        sent: list[dict[str, Any]] = []
        self.asked = 0

        async def receive() -> dict[str, Any]:
            self.asked += 1
            return next(coming)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        usual = {"content-type": "application/json", "content-length": str(len(raw))}
        given = {name.lower() for name, _ in headers}
        listed = [*(each for each in usual.items() if each[0] not in given), *headers]
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in listed]
        scope = {"type": kind, "method": method, "path": "/v1/any", "headers": encoded}
        asyncio.run(self.app(scope, receive, send))
        return sent

    @property
    def seen(self) -> dict[str, Any]:
        """The body that came in."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    def of(self, *headers: tuple[str, str], **body: Any) -> Identity:
        """What the engine makes of a request with these headers, and more in its body."""
        self.ask({**BODY, **body}, headers)
        return self.identity()

    def identity(self, place: str = "vllm_xargs") -> Identity:
        """What the engine makes of it."""
        extra = self.seen[place] if place in self.seen else self.seen["sampling_params"][place]
        return Identities.load(WorkerSettings.load()).of(extra, "engine's own")


def bearer(key: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {key}"


def test_the_tenant_is_the_hash_of_the_whole_key_and_nothing_else_changes() -> None:
    server, long = Server(), "k" * 8000
    one = server.of(bearer(long + "a"))
    rest = {key: value for key, value in server.seen.items() if key != "vllm_xargs"}
    assert rest == BODY
    other = server.of(bearer(long + "b"), seed=3)
    assert one.tenant == Pseudonyms(KEY.encode()).of("tenant", f"key:{long}a")
    assert one.tenant != other.tenant and long not in json.dumps(server.seen)
    assert one.key == owner_of(one.key) == one.tenant


def test_every_way_of_saying_a_key_is_told_apart() -> None:
    server, mine = Server(), Server().of(bearer("a")).tenant
    others = {server.of(bearer("b")).tenant, server.of(("Authorization", "Basic a")).tenant}
    nobody = server.of(("X-Tenant", "a")).tenant  # no such header is set: anybody could send it
    assert nobody == server.of().tenant == "" and len({mine, nobody, *others}) == 4
    # one key is one tenant, whichever client library; what vLLM checks goes before all others
    for headers in (
        [("X-API-Key", "a")], [("x-api-key", "b"), ("authorization", "bEaReR a")],
        [bearer("a"), bearer("b")],
    ):  # fmt: skip
        assert server.of(*headers).tenant == mine


@pytest.mark.parametrize("name", ["a", "Zoë", "Basic YTpi", "Bearer a", " a ", "0" * 24, "a/b"])
def test_whoever_looks_for_a_tenant_by_its_name_knows_every_way_of_saying_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_WORKER_TENANT_HEADER", "X-Tenant")
    monkeypatch.setenv("HVD_WORKER_TENANTS", "client")
    server, names = Server(), Pseudonyms(KEY.encode())
    sought = {names.of("tenant", text) for text in spellings(name)}
    heard = name.encode().decode("latin-1")  # the bytes of a header that holds UTF-8
    for header in (
        bearer(heard),
        *((n, heard) for n in ("X-API-Key", "X-Tenant", "Authorization")),
    ):
        assert server.of(header).tenant in sought, header
    assert server.of(vllm_xargs={"hvd_tenant": name}).tenant in sought
    server.of(bearer(heard), vllm_xargs={"hvd_tenant": "wörd"})
    for part in (f"key:{name.strip()}/named:wörd", f"{name}/named:wörd"):
        exact = {names.of("tenant", text) for text in spellings(part)}
        assert server.identity().tenant in exact and not exact & sought  # the part, and no more


def test_a_clients_own_word_is_overwritten() -> None:
    server = Server()
    honest = server.of(bearer("a"))
    forged = dict(zip((*NAMES, SEAL), ["victim", "salt", "s", "r", "seal"], strict=True))
    kept = {"hvd_workload": "w", "hvd_speculate": "off", "other": [1, 2]}
    found = server.of(bearer("a"), ("x-request-id", "7"), vllm_xargs={**forged, **kept})
    assert (found.tenant, found.salt) == (honest.tenant, "")
    assert {key: server.seen["vllm_xargs"][key] for key in kept} == kept


def test_a_seal_is_good_for_what_it_sealed_alone() -> None:
    server, identities = Server(), Identities.load(WorkerSettings.load())
    server.ask(BODY, [bearer("a")])
    mine = server.seen["vllm_xargs"]
    server.ask({**BODY, "cache_salt": "s"}, [bearer("b")])
    theirs = server.seen["vllm_xargs"]
    for name in NAMES:
        mixed = {**mine, name: theirs[name] or "x"}
        assert identities.of(mixed, "r").key == ALONE, name
    for seal in ("", "é", 7, None, [mine[SEAL]], mine[SEAL][:-1]):
        assert identities.of({**mine, SEAL: seal}, "r").key == ALONE
    assert identities.of({**mine, "hvd_tenant": [mine["hvd_tenant"]]}, "r").key == ALONE
    assert identities.of(mine, "r").key != ALONE
    assert identities.refused == 4 + 6 + 1
    elsewhere = Identities(b"another key, of another process", "middleware")
    assert elsewhere.of(mine, "r").key == ALONE


@pytest.mark.parametrize("source", ["middleware", "client", "shared"])
def test_what_has_no_seal_counts_only_where_the_operator_says_so(source: Any) -> None:
    identities = Identities(KEY.encode(), source)
    named = identities.of({"hvd_tenant": "t" * 8000, "hvd_salt": "s"}, "r")
    other = identities.of({"hvd_tenant": "t" * 8000 + "u", "hvd_salt": "s"}, "r")
    nobody = identities.of(None, "r")
    if source == "middleware":
        assert named.key == other.key == nobody.key == ALONE
    elif source == "shared":
        assert named.key == other.key == nobody.key == ""
    else:
        assert len({named.key, other.key, nobody.key}) == 3
        assert "/" in named.key and nobody.key == ""
    assert nobody.request == Pseudonyms(KEY.encode()).of("request", "r")


def test_a_salt_parts_a_tenant_and_only_the_hash_of_it_travels() -> None:
    server, keys = Server(), []
    for salt in ({}, {"cache_salt": "secret salt"}, {"cache_salt": "other"}, {"cache_salt": 5}):
        keys.append(server.of(bearer("a"), **salt).key)
        assert "secret salt" not in json.dumps(server.seen["vllm_xargs"])
    assert keys[0] == keys[3] and len(set(keys)) == 3
    assert {owner_of(key) for key in keys} == {keys[0]}


def test_a_header_of_the_gateway_goes_before_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_WORKER_TENANT_HEADER", "X-Tenant")
    server = Server()
    acme = server.of(bearer("a"), ("x-tenant", "acme")).tenant
    assert server.of(bearer("b"), ("X-TENANT", "acme")).tenant == acme
    # without it the key says who it is, and is another
    assert server.of(bearer("acme")).tenant not in ("", acme)
    start, body = server.ask(BODY, [("X-Tenant", "forged"), ("X-Tenant", "acme")])
    assert start["status"] == 400 and b"came more than once" in body["body"]


def test_what_is_written_goes_where_a_token_route_reads_it_too() -> None:
    server = Server()
    params = {"max_tokens": 3, "extra_args": {"hvd_tenant": "forged", "mine": 1}}
    server.ask({"token_ids": [1, 2], "sampling_params": params}, [bearer("a")])
    assert server.identity("extra_args") == server.identity()
    assert server.seen["sampling_params"]["extra_args"]["mine"] == 1
    server.ask({"sampling_params": {"extra_args": None}}, [bearer("a")])
    assert server.identity("extra_args").tenant


def test_the_session_comes_from_a_header_or_the_body_and_is_the_tenants_own() -> None:
    server, sessions = Server(), []
    for key in "ab":
        spoken = server.of(bearer(key), vllm_xargs={"hvd_session": 17}).session
        assert server.of(bearer(key), ("X-HVD-Session", "17")).session == spoken != "17"
        sessions.append(spoken)
    assert len(set(sessions)) == 2


def test_the_requests_pseudonym_is_in_the_response() -> None:
    server = Server()
    start, *parts = server.ask(BODY, [("X-Request-Id", "i" * 8000)])
    told = dict(start["headers"])[b"x-hvd-request"].decode()
    assert told == server.identity().request == Pseudonyms(KEY.encode()).of("request", "i" * 8000)
    assert [part["body"] for part in parts] == [b"data: 1\n\n", b"data: 2\n\n"]
    assert server.of().request != server.of().request


@pytest.mark.parametrize("parts", [1, 2, 7, 200])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8-sig", "utf-16", "utf-32-le"])
def test_a_body_in_parts_is_one_in_every_encoding_that_vllm_understands(
    parts: int, encoding: str
) -> None:
    server = Server()
    server.ask(json.dumps(BODY).encode(encoding), [bearer("a")], parts=parts)
    assert server.identity().tenant and server.seen["messages"] == BODY["messages"]
    assert b"content-length" not in dict(server.scope["headers"])


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'{"vllm_xargs": {"hvd_tenant": "t"}', b'[{"vllm_xargs": {"hvd_tenant": "t"}}]',
        b'"text"', b"\xff\xfe\x00", b'{"a": ' + b"1" * 5000 + b"}",
        *(b'{"a": ' + b"[" * 200_000 + rest for rest in (b"", b"]" * 200_000 + b"}")),
    ],
)  # fmt: skip
def test_what_is_no_json_object_passes_as_it_is(body: bytes) -> None:
    server = Server()
    start, *_ = server.ask(body, [bearer("a")])
    assert start["status"] == 200 and server.body == body


def test_of_keys_that_come_twice_the_sealed_ones_are_all_there_is() -> None:
    server = Server()
    twice = b'{"vllm_xargs": {"hvd_tenant": "x"}, "vllm_xargs": {"hvd_tenant": "y", '
    twice += b'"hvd_seal": "1", "hvd_seal": "2"}, "cache_salt": "a", "cache_salt": "b"}'
    server.ask(twice, [bearer("a")])
    assert server.body.count(b"hvd_tenant") == server.body.count(b"hvd_seal") == 1
    found = server.identity()
    assert found.tenant and found.salt == Pseudonyms(KEY.encode()).of("salt", "b")


@pytest.mark.parametrize(
    "kind", ["multipart/form-data; boundary=x", "application/x-www-form-urlencoded"]
)
def test_a_form_is_not_held_up(kind: str) -> None:
    server = Server()
    form = b'vllm_xargs={"hvd_tenant": "t"}'
    start, *_ = server.ask(form, [("content-type", kind), bearer("a")], parts=3)
    assert server.body == form and server.asked == 3
    assert b"x-hvd-request" in dict(start["headers"])


@pytest.mark.parametrize(
    ("method", "kind"), [("GET", "http"), ("DELETE", "http"), ("", "websocket"), ("", "lifespan")]
)
def test_what_has_no_body_or_is_not_http_passes(method: str, kind: str) -> None:
    server = Server()
    server.ask(b"", method=method, kind=kind)
    assert (server.scope["method"], server.scope["type"]) == (method, kind)


def test_a_client_that_leaves_in_the_middle_is_gone() -> None:
    server = Server()
    assert server.ask(BODY, parts=3, leaves=True) == []
    assert server.body == b"gone"


def test_nothing_is_read_that_the_server_does_not_ask_for() -> None:
    """An unknown key is refused by vLLM, inside, before its body takes any memory."""
    server = Server()
    server.reads = False
    server.ask(BODY, [bearer("a")], parts=3)
    assert server.asked == 0


def test_unusable_settings_share_nothing_and_fail_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "short")
    server = Server()
    assert "take at least 16" in caplog.text
    server.ask({**BODY, "vllm_xargs": {"hvd_tenant": "forged"}}, [bearer("a")])
    assert SEAL not in server.seen["vllm_xargs"]
    engine = Identities(KEY.encode(), "middleware")
    assert engine.of(server.seen["vllm_xargs"], "r").key == ALONE


def test_the_key_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    assert key_of(WorkerSettings.load()) is None
    path = tmp_path / "key"
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    with pytest.raises(SettingsError, match="cannot be read"):
        key_of(WorkerSettings.load())
    path.write_text("\n")
    with pytest.raises(SettingsError, match="is empty"):
        key_of(WorkerSettings.load())
    path.write_text(f"{KEY}\n")
    assert key_of(WorkerSettings.load()) == KEY.encode()


def test_a_key_is_made_where_there_is_none_and_never_shown() -> None:
    environment: dict[str, str] = {}
    assert ensure_key(environment) and len(environment[VARIABLE]) == 64
    assert not ensure_key(environment)
    assert not ensure_key({FILE_VARIABLE: "/a/file"})
    assert KEY not in repr(WorkerSettings.load())

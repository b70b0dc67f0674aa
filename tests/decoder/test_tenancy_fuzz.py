"""Whatever a client sends, the middleware hands it on; whatever arrives, the engine reads it.

And of what a client wrote, nothing leaves as it was: not in what is sealed, not in a log.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoder.contracts.identity import is_pseudonym
from decoder.settings import WorkerSettings
from decoder.tenancy.identities import NAMES, SEAL, Identities
from decoder.tenancy.key import VARIABLE
from tests.decoder.test_tenancy import KEY, Server

OURS = (*NAMES, SEAL, "hvd_workload")
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["\ud800", "x" * 5000, 10**400, -(2**63), "NaN"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5) | st.sampled_from(OURS), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
BODIES = st.fixed_dictionaries(
    {}, optional={"vllm_xargs": JSON, "sampling_params": JSON, "cache_salt": JSON, "messages": JSON}
)
LATIN = st.text(st.characters(max_codepoint=255), max_size=20)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            ["Authorization", "x-api-key", "X-Request-Id", "X-HVD-Session", "X-Other", "Host"]
        ),
        LATIN | LATIN.map("Bearer {}".format),
    ),
    max_size=6,
)
FAST = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True, params=["middleware", "client", "shared"])
def operator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setenv("HVD_WORKER_TENANTS", request.param)


@FAST
@given(BODIES, HEADERS)
def test_any_object_is_handed_on_and_its_identity_read(
    body: dict[str, Any], headers: list[tuple[str, str]]
) -> None:
    server = Server()
    sent = server.ask(body, headers)
    assert sent[0]["type"] == "http.response.start"
    extra = server.seen.get("vllm_xargs")
    if isinstance(extra, dict):
        names = [extra[name] for name in NAMES]
        assert all(name == "" or is_pseudonym(name) for name in names)
        identity = server.identity()
        assert not identity.alone and identity.request
    else:  # which vLLM refuses
        assert repr(extra) == repr(body["vllm_xargs"]) and extra is not None


@FAST
@given(st.binary(max_size=200), HEADERS)
def test_any_bytes_are_handed_on_as_they_are(body: bytes, headers: list[tuple[str, str]]) -> None:
    server = Server()
    server.ask(body, headers)
    try:
        is_object = isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        is_object = False
    assert is_object or server.body == body


@FAST
@given(st.dictionaries(st.text(max_size=5) | st.sampled_from(OURS), JSON, max_size=6), st.text())
def test_the_engine_reads_whatever_arrives(extra: dict[str, Any], name: str) -> None:
    identity = Identities.load(WorkerSettings.load()).of(extra, name)
    told = (identity.tenant, identity.salt, identity.session, identity.request)
    assert all(each == "" or is_pseudonym(each) for each in told)
    assert len(identity.workload) <= 32


def test_nothing_that_a_client_wrote_is_in_a_seal_an_answer_or_a_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    mark = "Jane.Doe-4711"
    headers = [(name, f"of {mark}") for name in ("Authorization", "X-Request-Id", "X-HVD-Session")]
    extra = dict.fromkeys(OURS, mark)
    server = Server()
    text = [{"role": "user", "content": mark}]
    sent = server.ask({"messages": text, "cache_salt": mark, "vllm_xargs": extra}, headers)
    sealed = {name: value for name, value in server.seen["vllm_xargs"].items() if name in NAMES}
    identity = server.identity()
    assert len(sealed) == len(NAMES) and identity.workload
    Identities.load(WorkerSettings.load()).of({**extra, SEAL: mark}, mark)  # a made-up seal is told
    said = f"{sealed} {sent} {identity} {caplog.text}"
    assert not any(part in said for part in ("Jane", "Doe", "4711"))

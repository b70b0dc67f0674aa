"""What a request asks for is what vLLM and our middleware made of it, on every route."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from decoder.contracts.identity import DIGITS
from decoder.core.requests import RequestOptions
from decoder.engines.vllm.request_options import choice_of, options_of
from decoder.settings import WorkerSettings
from decoder.tenancy.identities import Identities, Source
from decoder.tenancy.key import VARIABLE
from pipelines.serve.command import MIDDLEWARE

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


def _options(
    parameters: Any, max_model_len: int, name: str = "chatcmpl-1", source: Source = "client"
) -> RequestOptions:
    return options_of(name, parameters, max_model_len, Identities(b"k" * 32, source))


@pytest.mark.parametrize(
    ("ignores", "ends"), [(False, {2, 0, 7}), (True, {7})], ids=["heeds", "ignores"]
)
def test_ignored_end_tokens_are_no_stop_ids(ignores: bool, ends: set[int]) -> None:
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=5, stop_token_ids=[7], ignore_eos=ignores)
    asked.update_from_generation_config({"eos_token_id": [2, 0]}, eos_token_id=2)
    assert _options(asked, 128).stop_ids == ends


def test_labels_from_a_client_are_hashed_and_speculation_can_be_switched_off() -> None:
    from vllm import SamplingParams

    extra = {"hvd_workload": "w" * 1000, "hvd_speculate": "OFF"}
    options = _options(SamplingParams(extra_args=extra), 128)
    assert len(options.workload) == DIGITS and not options.speculate
    assert _options(SamplingParams(extra_args={"hvd_workload": "chat"}), 128).workload == "chat"
    assert options.max_tokens <= 128 and _options(SamplingParams(), 128).speculate


def test_a_thinking_budget_disables_drafts_and_min_tokens_is_kept() -> None:
    from vllm import SamplingParams

    assert not _options(SamplingParams(thinking_token_budget=0), 128).speculate
    assert _options(SamplingParams(max_tokens=9, min_tokens=7), 128).min_tokens == 7


def test_no_name_that_a_client_chose_reaches_telemetry() -> None:
    from vllm import SamplingParams

    secret = "secret " * 1000
    extra = {"hvd_tenant": secret, "hvd_session": secret, "hvd_workload": secret}
    asked = SamplingParams(extra_args=extra)
    first, second = (_options(asked, 128, f"{i}_chatcmpl-{secret}-8f2e") for i in (0, 1))
    assert first.opaque == second.opaque and (first.choice, second.choice) == (0, 1)
    names = (first.opaque, first.tenant, first.session, first.workload)
    assert {len(name) for name in names} == {DIGITS} and len(set(names)) == 4
    assert "secret" not in repr(first) and first.key == second.key != ""


def test_identity_comes_from_the_seal_or_from_the_configured_source() -> None:
    from vllm import SamplingParams

    identities = Identities(b"k" * 32, "middleware")
    whose = identities.make("an api key", "salt", "a session", "req-1")
    sealed = SamplingParams(extra_args=identities.sealed(whose))
    options = _options(sealed, 128, "1_chatcmpl-req-1-8f2e", "middleware")
    told = (options.tenant, options.session, options.opaque, options.key, options.choice)
    assert told == (whose.tenant, whose.session, whose.request, whose.key, 1)
    client = SamplingParams(extra_args={"hvd_tenant": "somebody"})
    assert _options(client, 128, source="client").key != _options(client, 128, source="shared").key
    assert _options(SamplingParams(), 128, source="shared").tenant == ""


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("chatcmpl-8f2e", (0, "chatcmpl-8f2e")), ("12_cmpl-8f2e-0", (12, "cmpl-8f2e-0")),
        ("x_1", (0, "x_1")), ("99999_x", (0, "99999_x")), ("_", (0, "_")), ("", (0, "")),
    ],
)  # fmt: skip
def test_choices_of_one_request_are_numbered(name: str, choice: tuple[int, str]) -> None:
    assert choice_of(name) == choice


@pytest.mark.parametrize("module", ["decoder.engines.vllm.plugin", "pipelines.cli"])
def test_modules_imported_before_vllm_do_not_import_llvmlite(module: str) -> None:
    """vLLM's CPU worker looks through every module for kernels and fails on llvmlite's."""
    code = f"import sys, {module}; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


KEY = "0123456789abcdef0123456789abcdef"
FORGED = {"hvd_tenant": "victim", "hvd_seal": "0" * 32}
MESSAGES = [{"role": "user", "content": "a"}]
BODY: dict[str, Any] = {
    "model": "m", "prompt": "a", "input": "a", "token_ids": [1], "max_tokens": 4,
    "cache_salt": "salt", "vllm_xargs": FORGED,
    "sampling_params": {"max_tokens": 4, "extra_args": FORGED},
}  # fmt: skip
OPTIONS = {"vllm_xargs", "sampling_params"}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's own server with the middleware, before an engine is behind it."""
    level = logging.root.level
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setenv("HVD_WORKER_TENANTS", "middleware")
    arguments = ["--model", "m", "--middleware", MIDDLEWARE, "--api-key", "a", "b"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    yield build_app(arguments, ("generate", "render"))
    logging.root.setLevel(level)  # a package of that server lets the root logger say errors only


def handed_on(request: Any) -> Any:
    """The options that a parsed request gives to the engine."""
    if "sampling_params" in type(request).model_fields:
        return request.sampling_params.extra_args
    return request.vllm_xargs


def test_every_route_with_options_passes_the_sealed_ones(app: Any) -> None:
    asyncio.run(_ask_every_route(app))


async def _ask_every_route(app: Any) -> None:
    from fastapi.routing import APIRoute
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest

    seen: dict[str, Any] = {}
    for route in app.routes:
        if not isinstance(route, APIRoute) or "POST" not in route.methods:
            continue
        for body in route.dependant.body_params:
            model = body.field_info.annotation
            batch = model is BatchChatCompletionRequest
            if batch or OPTIONS & set(getattr(model, "model_fields", ())):

                def keep(values: dict[str, Any], path: str = route.path) -> None:
                    (seen[path],) = [v for v in values.values() if hasattr(v, "model_fields")]

                _instead(route, keep)
    identities = Identities.load(WorkerSettings.load())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        paths = {r.path for r in app.routes if getattr(r, "_kept", False)}
        assert len(paths) >= 9
        for path in paths:
            keys = set()
            for key in ("a", "b"):
                body = {**BODY, "messages": [MESSAGES] if "batch" in path else MESSAGES}
                if "responses" in path:
                    del body["prompt"]  # there it is a template
                headers = {"Authorization": f"Bearer {key}"}
                response = await client.post(path, json=body, headers=headers)
                assert response.status_code == 200, (path, response.text)
                assert response.headers["x-hvd-request"]
                request = seen[path]
                if hasattr(request, "to_chat_completion_request"):
                    request = request.to_chat_completion_request(MESSAGES)
                found = identities.of(handed_on(request), "r")
                assert found.tenant and found.salt and not found.alone, path
                keys.add(found.key)
            assert len(keys) == 2
        unknown = await client.post(path, json=BODY, headers={"Authorization": "Bearer c"})
        assert unknown.status_code == 401


def _instead(route: Any, keep: Any) -> None:
    """Let ``route`` hand what it parsed to ``keep`` and answer nothing."""

    from fastapi import Response

    async def call(**values: Any) -> Response:
        keep(values)
        return Response()

    route.dependant.call = call
    route.dependencies = []
    route._kept = True

"""Every route of vLLM's own that takes options hands on what the middleware wrote."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from decoder.settings import WorkerSettings
from decoder.tenancy.identities import Identities
from decoder.tenancy.key import VARIABLE
from pipelines.serve.command import MIDDLEWARE

pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM and what it imports

KEY = "0123456789abcdef0123456789abcdef"
FORGED = {"hvd_tenant": "victim", "hvd_seal": "0" * 32}
MESSAGES = [{"role": "user", "content": "a"}]
BODY: dict[str, Any] = {
    "model": "m",
    "prompt": "a",
    "input": "a",
    "token_ids": [1],
    "max_tokens": 4,
    "cache_salt": "salt",
    "vllm_xargs": FORGED,
    "sampling_params": {"max_tokens": 4, "extra_args": FORGED},
}
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


def test_every_route_that_takes_options_hands_on_the_sealed_ones(app: Any) -> None:
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

"""What clients meet while a worker ends: those under way finish, the others are sent elsewhere."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from decoder.engines.vllm import draining


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine as a test."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was let in enters the engine at once, and it may take for ever to say so."""
    monkeypatch.setattr(draining, "TOKENISE_S", 0.01)
    monkeypatch.setattr(draining, "MAX_WAIT_S", 600.0)


class Engine:
    """As far as vLLM's server knows it: busy until it is told otherwise."""

    def __init__(self, errored: bool = False) -> None:
        self.told: list[float | None] = []
        self.taken_in = asyncio.Event()
        self.errored = errored

    async def is_sleeping(self) -> bool:
        await self.taken_in.wait()
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        self.told.append(timeout)


def app_of(engine: object) -> FastAPI:
    app = FastAPI()
    app.state.engine_client = engine
    app.add_middleware(draining.DrainingMiddleware)
    app.state.slow = SimpleNamespace(reached=threading.Event(), goes_on=asyncio.Event())

    async def slow() -> str:
        app.state.slow.reached.set()
        await app.state.slow.goes_on.wait()
        return "whole"

    app.get("/slow")(slow)
    for path in ("/health", "/metrics"):
        app.get(path)(lambda: "well")
    return app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://worker")


@in_a_loop
async def test_what_is_under_way_ends_and_what_comes_later_may_try_elsewhere() -> None:
    engine = Engine()
    app = app_of(engine)
    async with client_of(app) as client:
        assert (await client.get("/health")).status_code == 200
        under_way = asyncio.create_task(client.get("/slow"))
        await asyncio.to_thread(app.state.slow.reached.wait)
        ending = asyncio.create_task(
            asyncio.to_thread(app.state.engine_client.shutdown, timeout=45)
        )
        while (refused := await client.get("/health")).status_code == 200:
            await asyncio.sleep(0.01)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        assert "again" in refused.json()["error"]["message"]
        assert (await client.get("/metrics")).json() == "well"
        await asyncio.sleep(0.1)
        assert engine.told == []  # it has not said yet that it took in what entered
        engine.taken_in.set()
        await ending
        app.state.slow.goes_on.set()
        assert (await under_way).json() == "whole"
    assert engine.told == [45]


@pytest.mark.parametrize("errored", [False, True], ids=["answers never", "died"])
@in_a_loop
async def test_an_engine_that_cannot_answer_is_shut_down(
    monkeypatch: pytest.MonkeyPatch, errored: bool
) -> None:
    engine = Engine(errored)
    if not errored:
        monkeypatch.setattr(draining, "MAX_WAIT_S", 0.1)
    app = app_of(engine)
    async with client_of(app) as client:
        assert (await client.get("/health")).status_code == 200
        await asyncio.to_thread(app.state.engine_client.shutdown)
        assert engine.told == [None]
        assert (await client.get("/health")).status_code == 503


@in_a_loop
async def test_a_server_without_an_engine_is_served_as_it_is() -> None:
    async with client_of(app_of(None)) as client:
        assert (await client.get("/health")).status_code == 200

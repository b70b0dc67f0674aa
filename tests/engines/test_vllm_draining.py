"""What clients meet while a worker ends: those under way finish, the others are sent elsewhere."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from decoder.engines.vllm.draining import DrainingMiddleware


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine as a test."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


class Engine:
    """As far as vLLM's server knows it. Takes requests in one after another, as they entered."""

    def __init__(self) -> None:
        self.told: list[float | None] = []
        self.entered = 0
        self.busy = asyncio.Event()
        self.errored = False

    async def add_request(self) -> None:
        self.entered += 1

    async def is_sleeping(self) -> bool:
        await self.busy.wait()
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        self.told.append(timeout)


def app_of(engine: object) -> FastAPI:
    app = FastAPI()
    app.state.engine_client = engine
    app.add_middleware(DrainingMiddleware)
    reached, goes_on = threading.Event(), asyncio.Event()
    app.state.slow = SimpleNamespace(reached=reached, goes_on=goes_on)

    @app.get("/health")
    async def health() -> str:
        return "well"

    @app.get("/metrics")
    async def metrics() -> str:
        return "counts"

    @app.get("/slow")
    async def slow() -> str:
        reached.set()
        await goes_on.wait()
        return "whole"

    @app.get("/late")
    async def late() -> str:
        reached.set()
        await goes_on.wait()
        await app.state.engine_client.add_request()
        return "whole"

    @app.get("/late-in-pieces")
    async def late_in_pieces() -> StreamingResponse:
        reached.set()
        await goes_on.wait()

        async def pieces() -> AsyncIterator[str]:
            try:
                await app.state.engine_client.add_request()
                yield "whole"
            except RuntimeError as error:  # as vLLM's streams do
                yield f"error: {error}"

        return StreamingResponse(pieces())

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
        engine.busy.set()
        await asyncio.to_thread(app.state.engine_client.shutdown, timeout=45)
        refused = await client.get("/health")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        assert "again" in refused.json()["error"]["message"]
        assert (await client.get("/metrics")).json() == "counts"
        app.state.slow.goes_on.set()
        assert (await under_way).json() == "whole"
    assert engine.told == [45]


@pytest.mark.parametrize("path", ["/late", "/late-in-pieces"])
@in_a_loop
async def test_a_request_that_has_not_entered_the_engine_is_sent_elsewhere(path: str) -> None:
    engine = Engine()
    engine.busy.set()
    app = app_of(engine)
    async with client_of(app) as client:
        under_way = asyncio.create_task(client.get(path))
        await asyncio.to_thread(app.state.slow.reached.wait)
        await asyncio.to_thread(app.state.engine_client.shutdown)
        app.state.slow.goes_on.set()
        answer = await under_way
        assert answer.status_code == 503 and "again" in answer.json()["error"]["message"]
    assert engine.entered == 0


@pytest.mark.parametrize("path", ["/late", "/late-in-pieces"])
@in_a_loop
async def test_what_entered_is_with_the_engine_before_it_is_told_to_end(path: str) -> None:
    engine = Engine()
    app = app_of(engine)
    app.state.slow.goes_on.set()
    async with client_of(app) as client:
        answer = await client.get(path)
        assert answer.status_code == 200 and "whole" in answer.text and engine.entered == 1
        ending = asyncio.create_task(asyncio.to_thread(app.state.engine_client.shutdown))
        while (await client.get("/health")).status_code == 200:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert engine.told == []  # it has not said yet that it took in what entered
        engine.busy.set()
        await ending
    assert engine.told == [None]


@in_a_loop
async def test_an_engine_that_never_answers_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoder.engines.vllm.draining.LONGEST_S", 0.1)
    app = app_of(Engine())
    async with client_of(app) as client:
        await client.get("/health")
        await asyncio.to_thread(app.state.engine_client.shutdown)
    assert app.state.engine_client.told == [None]


@in_a_loop
async def test_nobody_waits_for_an_engine_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.errored = True
    monkeypatch.setattr("decoder.engines.vllm.draining.LONGEST_S", 3600.0)
    app = app_of(engine)
    async with client_of(app) as client:
        under_way = asyncio.create_task(client.get("/slow"))
        await asyncio.to_thread(app.state.slow.reached.wait)
        app.state.engine_client.shutdown()
        assert engine.told == [None]
        app.state.slow.goes_on.set()
        await under_way


@in_a_loop
async def test_an_error_of_a_worker_that_serves_stays_what_it_is() -> None:
    app = app_of(Engine())

    @app.get("/fails")
    async def fails() -> str:
        raise ZeroDivisionError

    async with client_of(app) as client:
        with pytest.raises(ZeroDivisionError):
            await client.get("/fails")


@in_a_loop
async def test_a_server_without_an_engine_is_served_as_it_is() -> None:
    async with client_of(app_of(None)) as client:
        assert (await client.get("/health")).status_code == 200

"""What clients meet while a worker ends: those under way finish, the others are sent elsewhere."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from decoder.engines.vllm.draining import HANDED_ON_S, DrainingMiddleware


class Engine:
    """As far as vLLM's server knows it: ``shutdown`` waits for what is under way."""

    def __init__(self) -> None:
        self.told: list[float | None] = []
        self.known = 0
        self.errored = False

    def get_num_unfinished_requests(self) -> int:
        return self.known

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
        raise RuntimeError("cannot schedule new futures after shutdown")

    return app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://worker")


def test_what_is_under_way_ends_and_what_comes_later_may_try_elsewhere() -> None:
    async def run() -> None:
        engine = Engine()
        app = app_of(engine)
        async with client_of(app) as client:
            assert (await client.get("/health")).status_code == 200
            under_way = asyncio.create_task(client.get("/slow"))
            await asyncio.to_thread(app.state.slow.reached.wait)
            engine.known = 1
            app.state.engine_client.shutdown(timeout=45)
            refused = await client.get("/health")
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
            assert "again" in refused.json()["error"]["message"]
            assert (await client.get("/metrics")).json() == "counts"
            app.state.slow.goes_on.set()
            assert (await under_way).json() == "whole"
        assert engine.told == [45]

    asyncio.run(run())


def test_a_request_that_came_in_a_moment_before_is_no_internal_error() -> None:
    async def run() -> None:
        app = app_of(Engine())
        async with client_of(app) as client:
            under_way = asyncio.create_task(client.get("/late"))
            await asyncio.to_thread(app.state.slow.reached.wait)
            app.state.engine_client.shutdown()
            app.state.slow.goes_on.set()
            assert (await under_way).status_code == 503

    asyncio.run(run())


def test_what_was_let_in_reaches_the_engine_before_it_is_told_to_end() -> None:
    async def run() -> None:
        engine = Engine()
        app = app_of(engine)
        async with client_of(app) as client:
            under_way = asyncio.create_task(client.get("/slow"))
            await asyncio.to_thread(app.state.slow.reached.wait)
            ending = asyncio.create_task(asyncio.to_thread(app.state.engine_client.shutdown))
            while (await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            await asyncio.sleep(2 * HANDED_ON_S)
            assert engine.told == []  # let in and not yet with the engine
            engine.known = 1
            await ending
            app.state.slow.goes_on.set()
            assert (await under_way).status_code == 200
        assert engine.told == [None]

    asyncio.run(run())


def test_nobody_waits_for_an_engine_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_an_error_of_a_worker_that_serves_stays_what_it_is() -> None:
    async def run() -> None:
        app = app_of(Engine())
        app.state.slow.goes_on.set()
        async with client_of(app) as client:
            try:
                await client.get("/late")
            except RuntimeError:
                return
        raise AssertionError("the error was hidden")

    asyncio.run(run())


def test_a_server_without_an_engine_is_served_as_it_is() -> None:
    async def run() -> None:
        async with client_of(app_of(None)) as client:
            assert (await client.get("/health")).status_code == 200

    asyncio.run(run())

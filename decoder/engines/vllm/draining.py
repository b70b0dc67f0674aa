"""An ASGI middleware for vLLM's server: while it ends, new requests are sent elsewhere.

On SIGTERM vLLM lets requests under way end, keeps its port open meanwhile, and answers whatever
comes new with an internal error. Here that becomes 503 with ``Retry-After``, which clients and load
balancers repeat elsewhere, ``/health`` included: so a probe takes the worker out of its service.

Requests are not held back by a signal handler, since vLLM's own replaces it, but from the moment at
which the server tells its engine to shut down. A request that was let in and has not entered the
engine by then is sent elsewhere, too: vLLM would answer it with success and no token
(``finish_reason`` ``abort``). Those that have entered end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any, Final

from decoder.tenancy.middleware import App, Message, Receive, Send

AGAIN_S: Final = 1
"""Until a client may try again: another worker has its place by then, or this one nearly."""
LONGEST_S: Final = 10.0
"""At most, until the engine has taken in what entered it: a step that reads prompts comes first."""
STILL_SERVED: Final = "/metrics"
"""What is counted until the end is read until the end."""
BODY: Final = (
    b'{"error": {"message": "this worker is shutting down: send the request again",'
    b' "type": "ServiceUnavailableError", "param": null, "code": 503}}'
)


class _Answer:
    """What became of one request: ``refused`` by the engine's door, ``begun`` to be answered."""

    def __init__(self) -> None:
        self.refused = False
        self.begun = False
        self.start: Message | None = None  # held until what it says is known to be true


_answer: ContextVar[_Answer | None] = ContextVar("_answer", default=None)


class DrainingMiddleware:
    """Refuses requests once the engine of its server shuts down. One for each API process."""

    def __init__(self, app: App) -> None:
        """Wrap ``app``."""
        self._app = app
        self._engine: Any = None
        self._ends = False
        self._entering = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"] == STILL_SERVED:
            await self._app(scope, receive, send)
            return
        self._watch(scope)
        if self._ends:
            await _refuse(send)
            return
        answer = _Answer()
        _answer.set(answer)

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.start = message
                return
            if answer.refused and not answer.begun:
                return
            if answer.start:
                answer.begun = True
                await send(answer.start)
                answer.start = None
            await send(message)

        try:
            await self._app(scope, receive, told)
        except Exception:
            if answer.begun or not self._ends:
                raise
            answer.refused = True  # it had come in a moment before
        if answer.refused and not answer.begun:
            await _refuse(send)

    def _watch(self, scope: MutableMapping[str, Any]) -> None:
        """Stand at the door of the server's engine. Wraps two of its methods, once."""
        engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        if engine is None or engine is self._engine:
            return
        self._engine, loop = engine, asyncio.get_running_loop()
        shutdown, add_request = engine.shutdown, engine.add_request

        async def entering(*args: Any, **named: Any) -> Any:
            if self._ends:
                if answer := _answer.get():
                    answer.refused = True
                raise RuntimeError("this worker is shutting down")
            self._entering += 1
            try:
                return await add_request(*args, **named)
            finally:
                self._entering -= 1

        def noted(*args: Any, **named: Any) -> Any:
            if not self._ends:
                self._ends = True
                self._hand_on(engine, loop)
            return shutdown(*args, **named)

        engine.add_request, engine.shutdown = entering, noted

    def _hand_on(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until ``engine`` has what entered it; for the thread that shuts it down."""
        if engine.errored:
            return  # it takes nothing any more, and whoever starts it again waits for its end
        until = time.monotonic() + LONGEST_S
        while self._entering and time.monotonic() < until:
            time.sleep(0.02)
        # A question waits in the engine's queue behind all requests: its answer says they are in.
        asked = asyncio.run_coroutine_threadsafe(engine.is_sleeping(), loop)
        try:
            asked.result(max(0.0, until - time.monotonic()))
        except Exception:  # noqa: BLE001 - what gives no answer is shut down all the same
            asked.cancel()


async def _refuse(send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"retry-after", str(AGAIN_S).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})

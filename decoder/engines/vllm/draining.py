"""An ASGI middleware for vLLM's server: while it ends, new requests are sent elsewhere.

On SIGTERM vLLM lets requests under way end, keeps its port open meanwhile, and answers whatever
comes new with an internal error. Here that becomes 503 with ``Retry-After``, which clients and load
balancers repeat elsewhere, ``/health`` included: so a probe takes the worker out of its service.

Requests are not held back by a signal handler, since vLLM's own replaces it, but from the moment at
which the server tells its engine to shut down.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any, Final

from decoder.tenancy.middleware import App, Message, Receive, Send

AGAIN_S: Final = 1
"""Until a client may try again: another worker has its place by then, or this one nearly."""
HANDED_ON_S: Final = 0.5
LONGEST_S: Final = 5.0
"""At least, and at most, in which requests that were let in reach the engine. One that comes to it
later, while it shuts down, is answered by vLLM with success and no token (``finish_reason``
``abort``)."""
STILL_SERVED: Final = "/metrics"
"""What is counted until the end is read until the end."""
BODY: Final = (
    b'{"error": {"message": "this worker is shutting down: send the request again",'
    b' "type": "ServiceUnavailableError", "param": null, "code": 503}}'
)


class DrainingMiddleware:
    """Refuses requests once the engine of its server shuts down. One for each API process."""

    def __init__(self, app: App) -> None:
        """Wrap ``app``."""
        self._app = app
        self._engine: Any = None
        self._ends = False
        self._open = 0  # requests let in and not answered whole

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"] == STILL_SERVED:
            await self._app(scope, receive, send)
            return
        self._watch(scope)
        if self._ends:
            await _refuse(send)
            return
        begun = False

        async def told(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        self._open += 1
        try:
            await self._app(scope, receive, told)
        except Exception:
            if begun or not self._ends:
                raise
            await _refuse(send)  # it had come in a moment before, and was not begun
        finally:
            self._open -= 1

    def _watch(self, scope: MutableMapping[str, Any]) -> None:
        """Have the server's engine say when it is shut down. Wraps its ``shutdown``, once."""
        engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        if engine is None or engine is self._engine:
            return
        self._engine, shutdown = engine, engine.shutdown

        def noted(*args: Any, **named: Any) -> Any:
            if not self._ends:
                self._ends = True
                self._hand_on(engine)
            return shutdown(*args, **named)

        engine.shutdown = noted

    def _hand_on(self, engine: Any) -> None:
        """Wait until ``engine`` knows all that was let in; for the thread that shuts it down."""
        if engine.errored:
            return  # it takes nothing any more, and whoever starts it again waits for its end
        until = time.monotonic() + LONGEST_S
        while self._open > engine.get_num_unfinished_requests() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(HANDED_ON_S)  # the last ones are known here, and on their way to it


async def _refuse(send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"retry-after", str(AGAIN_S).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})

"""An ASGI middleware for vLLM's server: while it ends, new requests are sent elsewhere.

On SIGTERM vLLM lets requests under way end, keeps its port open meanwhile, and answers whatever
comes new with an internal error. Here that becomes 503 with ``Retry-After``, which clients and load
balancers repeat elsewhere, ``/health`` included: so a probe takes the worker out of its service.

vLLM's own signal handler replaces any other, so requests are held back from the moment at which the
server tells its engine to shut down. What was let in by then, vLLM would answer with success and no
token (``finish_reason`` ``abort``) where the engine has not taken it in: the engine is told later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any, Final

from decoder.tenancy.middleware import App, Receive, Send

AGAIN_S: Final = 1
"""Until a client may try again: another worker has its place by then, or this one nearly."""
ENTERS_S: Final = 1.0
"""Until what was let in is with the engine: a prompt is made tokens of first."""
LONGEST_S: Final = 10.0
"""At most, until the engine has taken it in: a step that reads prompts comes first."""
STILL_SERVED: Final = "/metrics"
"""What is counted until the end is read until the end."""
HEADERS: Final = [
    (b"content-type", b"application/json"),
    (b"retry-after", str(AGAIN_S).encode()),
    (b"connection", b"close"),
]
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

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and scope["path"] != STILL_SERVED:
            engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
            if engine is not None and engine is not self._engine:
                self._watch(engine, asyncio.get_running_loop())
            if self._ends:
                await send({"type": "http.response.start", "status": 503, "headers": HEADERS})
                await send({"type": "http.response.body", "body": BODY})
                return
        await self._app(scope, receive, send)

    def _watch(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Have a server's engine be told to shut down when it has what was let in. Wraps that."""
        self._engine, shutdown = engine, engine.shutdown

        def later(*args: Any, **named: Any) -> Any:  # in a thread beside the loop's
            first, self._ends = not self._ends, True
            if first and not engine.errored:  # else it takes nothing any more
                time.sleep(ENTERS_S)
                # A question waits in the engine's queue behind all requests that have entered.
                asked = asyncio.run_coroutine_threadsafe(engine.is_sleeping(), loop)
                try:
                    asked.result(LONGEST_S)
                except Exception:  # noqa: BLE001 - what gives no answer is shut down all the same
                    asked.cancel()
            return shutdown(*args, **named)

        engine.shutdown = later

"""ASGI middleware for vLLM's server: refuses new requests with 503 while the server drains.

On SIGTERM vLLM finishes running requests, keeps its port open, and answers new requests with an
internal error. This middleware answers 503 with ``Retry-After`` instead, which clients and load
balancers retry elsewhere. ``/health`` answers 503 too, so a probe removes the worker from service.

vLLM's own signal handler replaces any other, so draining begins when the server shuts its engine
down. vLLM would answer a request that the engine has not received by then with success and no token
(``finish_reason`` ``abort``). The shutdown of the engine is therefore delayed until it has received
them.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

TOKENISE_S: Final = 1.0
"""Time for accepted requests to be tokenised and reach the engine."""
MAX_WAIT_S: Final = 10.0
"""Longest wait for the engine to receive them: a step that reads prompts comes first."""
STILL_SERVED: Final = "/metrics"
"""Metrics are served until the end."""
_MESSAGE: Final = "this worker is shutting down: send the request again"
_ERROR: Final = {
    "message": _MESSAGE, "type": "ServiceUnavailableError", "param": None, "code": 503,
}  # fmt: skip
REFUSAL: Final = JSONResponse({"error": _ERROR}, 503, {"retry-after": "1", "connection": "close"})
"""A client retries after a second: another worker has taken over by then, or nearly."""


class DrainingMiddleware:
    """Refuses requests once the server's engine shuts down. One for each API process."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap ``app``."""
        self._app = app
        self._engine: Any = None
        self._draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and scope["path"] != STILL_SERVED:
            engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
            if engine is not None and engine is not self._engine:
                self._watch(engine, asyncio.get_running_loop())
            if self._draining:
                await REFUSAL(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _watch(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Delay the engine's shutdown until it has received the accepted requests."""
        self._engine, shutdown = engine, engine.shutdown

        def delayed(*args: Any, **kwargs: Any) -> Any:  # in a thread beside the loop's
            first, self._draining = not self._draining, True
            if first and not engine.errored:  # a failed engine receives nothing more
                time.sleep(TOKENISE_S)
                # This call waits in the engine's queue behind all accepted requests.
                answer = asyncio.run_coroutine_threadsafe(engine.is_sleeping(), loop)
                try:
                    answer.result(MAX_WAIT_S)
                except Exception:  # noqa: BLE001 - an engine that does not answer is shut down too
                    answer.cancel()
            return shutdown(*args, **kwargs)

        engine.shutdown = delayed

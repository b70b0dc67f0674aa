"""Calls that may wait for a server, made one after another on a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

from decoder.limited_log import LimitedLog

_Calls = queue.Queue[Callable[[], object] | None]

CLOSE_SECONDS: Final = 5.0
"""For what was offered, when its caller leaves: a process that is stopped has half a minute."""


class Background:
    """A daemon thread: a server that does not answer keeps no process from ending."""

    def __init__(self, name: str) -> None:
        self._name = f"hvd-{name}"
        self._limited_log = LimitedLog()
        self._open()

    @property
    def waiting(self) -> int:
        """Calls that wait for the one that is under way."""
        return self._calls.qsize()

    def idle(self, seconds: float = 0.0) -> bool:
        """Whether all that was offered is done, or is within so many ``seconds``."""
        done = self._calls.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._calls.unfinished_tasks, seconds)

    def offer(self, call: Callable[[], object]) -> None:
        """Have ``call`` made after those before it."""
        self._calls.put(call)
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> bool:
        """End, once all is done that was offered; False where a call does not return in time.
        Calls that are offered afterwards have a thread of their own."""
        calls, thread = self._calls, self._thread
        self._open()
        if thread.ident is not None:
            calls.put(None)
            thread.join(CLOSE_SECONDS)
        return not thread.is_alive()

    def _open(self) -> None:
        self._calls: _Calls = queue.Queue()
        self._thread = threading.Thread(
            target=self._work, args=(self._calls,), name=self._name, daemon=True
        )

    def _work(self, calls: _Calls) -> None:
        while (call := calls.get()) is not None:
            try:
                call()
            except Exception:  # noqa: BLE001 -- the calls after it are made all the same
                self._limited_log.exception(f"{self._name}: a call failed")
            finally:
                calls.task_done()

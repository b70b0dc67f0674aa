"""Runs calls that may wait for a server, one after another, on a daemon thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

from decoder.limited_log import LimitedLog

_Calls = queue.Queue[Callable[[], object] | None]

CLOSE_SECONDS: Final = 5.0  # for submitted calls; a stopped process has half a minute


class Background:
    """A thread that does not keep the process from ending while a server does not answer, which
    that of a ``ThreadPoolExecutor`` does."""

    def __init__(self, name: str) -> None:
        self._name = f"hvd-{name}"
        self._limited_log = LimitedLog()
        self._open()

    @property
    def queued(self) -> int:
        """Calls that have not begun."""
        return self._calls.qsize()

    def idle(self, seconds: float = 0.0) -> bool:
        """Whether all submitted calls are done, waiting up to ``seconds``."""
        done = self._calls.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._calls.unfinished_tasks, seconds)

    def submit(self, call: Callable[[], object]) -> None:
        """Run ``call`` after those before it."""
        self._calls.put(call)
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> bool:
        """Finish submitted calls and end the thread; False where a call does not return in time.
        Later calls get a new thread."""
        calls, thread = self._calls, self._thread
        self._open()
        if thread.ident is not None:
            calls.put(None)
            thread.join(CLOSE_SECONDS)
        return not thread.is_alive()

    def _open(self) -> None:
        self._calls: _Calls = queue.Queue()
        self._thread = threading.Thread(
            target=self._run, args=(self._calls,), name=self._name, daemon=True
        )

    def _run(self, calls: _Calls) -> None:
        while (call := calls.get()) is not None:
            try:
                call()
            except Exception:  # noqa: BLE001 -- later calls must still run
                self._limited_log.exception(f"{self._name}: a call failed")
            finally:
                calls.task_done()

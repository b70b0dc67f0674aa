"""Parent-death watchdog: an engine's child process ends soon after the process that started it.

vLLM asks its engine to end, but nothing does when the API process is killed: the engine would hold
its memory, or a GPU, for ever.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from functools import cache
from multiprocessing import util
from typing import Final

import psutil

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
GRACE_S: Final = 30.0
"""From SIGTERM to SIGKILL, for a worker to send its last events."""


@cache
def watch_parent() -> None:
    """End this process soon after its parent, if it is a child of :mod:`multiprocessing`; the same
    for the processes that it forks from now on.

    The kernel's own signal (``PR_SET_PDEATHSIG``) arrives when the *thread* that forked ends.
    """
    util.register_after_fork(_start, lambda start: start())
    _start()


def _start() -> None:
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        threading.Thread(target=_watch, args=(parent.pid,), name="hvd-parent", daemon=True).start()


def _watch(pid: int) -> None:
    try:
        parent = psutil.Process(pid)
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            time.sleep(POLL_S)
    except psutil.NoSuchProcess:
        pass
    log.error("the parent process %d has ended, so this process ends too", pid)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)

"""No process of an engine outlives the one that started it, however that died.

vLLM tells its engine to end, and nobody tells it when the API's process is killed: it would hold
memory, or a GPU, for ever.
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
from typing import Any, Final

import psutil

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
GRACE_S: Final = 30.0
"""From SIGTERM to SIGKILL: a worker sends its last events."""


@cache
def watch() -> None:
    """End this process soon after its parent, if it is a child of :mod:`multiprocessing`; and so
    those that it forks from now on.

    The kernel's own signal (``PR_SET_PDEATHSIG``) comes when the *thread* that forked ends.
    """
    util.register_after_fork(_begin, _again)
    _begin()


def _again(begin: Any) -> None:
    begin()


def _begin() -> None:
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        threading.Thread(target=_follow, args=(parent.pid,), name="hvd-parent", daemon=True).start()


def _follow(pid: int) -> None:
    try:
        parent = psutil.Process(pid)
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            time.sleep(LOOK_S)
    except psutil.NoSuchProcess:
        pass
    log.error("process %d, which started this one, is gone: this one ends, too", pid)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)

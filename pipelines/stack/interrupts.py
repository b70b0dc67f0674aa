"""Ctrl-C, SIGTERM and SIGHUP while child processes are running: none may be left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S: Final = 0.05
"""To when a signal is raised again that nobody heard."""


@contextmanager
def first_only() -> Iterator[None]:
    """The first of ``SIGNALS`` raises KeyboardInterrupt, further ones do nothing: what stops the
    children is not itself stopped halfway.

    What the caller's caller ignores stays ignored, as SIGHUP under nohup. Main thread only.
    """

    def heard(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    def unheard(what: sys.UnraisableHookArgs) -> None:
        """It came while Python ran a finalizer, which lets no exception out: raised again."""
        if not (isinstance(what.exc_value, KeyboardInterrupt) and what.exc_value.args):
            hook(what)  # what others raised is not ours
            return
        listen()
        number = what.exc_value.args[0]
        threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)).start()

    def listen() -> None:
        for number in before:
            signal.signal(number, heard)

    before, hook = _handlers(), sys.unraisablehook
    sys.unraisablehook = unheard
    listen()
    try:
        yield
    finally:
        _restore(before)
        sys.unraisablehook = hook


@contextmanager
def held() -> Iterator[None]:
    """``SIGNALS`` wait until the block has ended.

    A child that was started and is not yet in the list of those to be stopped would outlive us.
    Nothing is blocked in the kernel, because a child would inherit that.
    """
    pending: list[int] = []
    before = _handlers()
    for number in before:
        signal.signal(number, lambda number, frame: pending.append(number))
    try:
        yield
    finally:
        _restore(before)
        if pending:
            signal.raise_signal(pending[0])


def _handlers() -> dict[signal.Signals, Any]:
    found = {number: signal.getsignal(number) for number in SIGNALS}
    return {number: handler for number, handler in found.items() if handler != signal.SIG_IGN}


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)

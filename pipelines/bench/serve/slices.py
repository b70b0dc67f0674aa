"""Several servers at work, of which one runs at a time, a slice each in turn, by its own clock.

The pace of a machine wanders by more than what is compared, within half a minute. So servers that
are up together are asked all at once, and all but one are stopped (SIGSTOP); the clock of each goes
on only while it runs. What the machine does besides then falls on all alike, slice by slice.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeVar

import psutil

SLICE_S: Final = 2.0
"""Some dozens of steps: of these one is cut in two, and the caches of the processor are filled
anew."""

T = TypeVar("T")


class OwnClock:
    """Seconds that a server ran. Read by any thread, written by the one that deals the slices."""

    def __init__(self) -> None:
        self._at: tuple[float, float | None] = 0.0, None

    def __call__(self) -> float:
        """Seconds so far."""
        before, since = self._at
        return before if since is None else before + time.perf_counter() - since

    def go(self) -> None:
        """The server runs from now on."""
        self._at = self(), time.perf_counter()

    def stand(self) -> None:
        """It is stopped."""
        self._at = self(), None


def in_slices(
    works: Mapping[int, Callable[[OwnClock], T]], seconds: float = SLICE_S
) -> dict[int, T | BaseException]:
    """Do all ``works`` at once, while the servers they ask run one at a time.

    All servers run again on leaving, however it is left; a work whose server has ended is not
    stopped by that.

    Args:
        works: by the leader of each server's session; each is given its server's clock.
        seconds: of a slice.

    Returns:
        what each returned, or what it raised.
    """
    clocks = {leader: OwnClock() for leader in works}
    pool = ThreadPoolExecutor(max(len(works), 1))
    try:
        for leader in works:
            _signal(leader, signal.SIGSTOP)
        running = {leader: pool.submit(work, clocks[leader]) for leader, work in works.items()}
        while left := [leader for leader, future in running.items() if not future.done()]:
            for leader in left:
                alone = len(left) == 1
                _slice(leader, running[leader], clocks[leader], None if alone else seconds)
    finally:
        # Ctrl-C must not wait for answers: whoever interrupts ends the servers, and so the works
        pool.shutdown(wait=False, cancel_futures=True)
        for leader in works:
            _signal(leader, signal.SIGCONT)
    return {leader: future.exception() or future.result() for leader, future in running.items()}


def _slice(leader: int, work: Future[T], clock: OwnClock, seconds: float | None) -> None:
    _signal(leader, signal.SIGCONT)
    clock.go()
    try:
        wait([work], timeout=seconds)
    finally:
        _signal(leader, signal.SIGSTOP)
        clock.stand()


def _signal(leader: int, number: signal.Signals) -> None:
    """Signal all processes of a session: what a server starts may be of another group."""
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader:
                os.kill(pid, number)
        except OSError:  # it has ended, or is none of ours
            continue

"""Several servers at work, of which one runs at a time, a slice each in turn, by its own clock.

The pace of a machine wanders by more than what is compared, within half a minute. So servers that
are up together are asked all at once, and all but one are stopped (SIGSTOP); the clock of each goes
on only while it runs. Whoever has answered least comes next. What the machine does besides then
falls on all alike, slice by slice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

SLICE_S: Final = 2.0
"""Some dozens of steps: of these one is cut in two, and the caches of the processor are filled
anew."""
GUARD: Final = 'read _; for group; do kill -s CONT -- "-$group"; done'
"""Of a shell whose standard input ends with us: a stopped server would outlive us, and hear of no
SIGTERM."""

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


@dataclass(frozen=True)
class Work(Generic[T]):
    """What a server is asked, by its clock; ``answered`` says how much of that is done."""

    do: Callable[[OwnClock], T]
    answered: Callable[[], int]


def in_slices(
    works: Mapping[int, Work[T]], seconds: float = SLICE_S
) -> dict[int, T | BaseException]:
    """Do all ``works``, while the servers they ask run one at a time.

    All servers run again on leaving, however it is left. A work begins with the first slice of its
    server.

    Args:
        works: by the process group of each server.
        seconds: of a slice; who is left alone has what remains in one.

    Returns:
        what each returned, or what it raised.
    """
    clocks = {group: OwnClock() for group in works}
    running: dict[int, Future[T]] = {}
    pool = ThreadPoolExecutor(max(len(works), 1))
    with _guarded([*works]):
        try:
            for group in works:
                _signal(group, signal.SIGSTOP)
            while left := [g for g in works if g not in running or not running[g].done()]:
                group = min(left, key=lambda g: (works[g].answered(), clocks[g]()))
                _signal(group, signal.SIGCONT)
                clocks[group].go()
                if group not in running:
                    running[group] = pool.submit(works[group].do, clocks[group])
                wait([running[group]], timeout=seconds if len(left) > 1 else None)
                _signal(group, signal.SIGSTOP)
                clocks[group].stand()
        finally:
            # Ctrl-C must not wait for answers: whoever interrupts ends the servers, and so these
            pool.shutdown(wait=False, cancel_futures=True)
            for group in works:
                _signal(group, signal.SIGCONT)
    return {group: future.exception() or future.result() for group, future in running.items()}


@contextmanager
def _guarded(groups: list[int]) -> Iterator[None]:
    guard = subprocess.Popen(
        ["sh", "-c", GUARD, "sh", *map(str, groups)],
        stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.killpg(group, number)

"""Child processes, each with its log file: start, wait until ready, stop. Ctrl-C, SIGTERM and
SIGHUP leave none behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from decoder.contracts.errors import ProcessError

if TYPE_CHECKING:
    import psutil

TAIL_LINES: Final = 12
TAIL_BYTES: Final = 16_384  # bytes read from the end of a log, which may have grown for weeks
STOP_SECONDS: Final = 15.0
"""From SIGTERM to SIGKILL. Meanwhile a worker sends its last events, and the learner saves a
checkpoint."""
POLL_SECONDS: Final = 0.2
BOUND: Final = (
    *("setpriv", "--pdeathsig", "TERM", "--", "sh", "-c"),
    '[ "$PPID" = "$0" ] || exit; [ "$1" = 0 ] || { echo "$1" >/proc/self/autogroup; } 2>/dev/null; '
    'by=$1; shift; exec nice -n "$by" "$@"',
)
"""Runs a command with our process id, its niceness, and its arguments.

If we are killed, we cannot stop the child, and it would keep its port. So setpriv (util-linux) has
the kernel terminate it when its parent dies, and the shell exits if that has already happened.
Where Linux groups processes by session for scheduling, niceness only counts within a session, so it
is set for the session too.
"""


@dataclass(frozen=True)
class Child:
    """A running child, which leads a process group, so that its own children stop with it.

    ``begins`` is the offset of its output in its log. ``process`` is psutil's, because the standard
    library's can deadlock after an interrupt (Python 3.11, ``Popen.poll``).
    """

    name: str
    process: psutil.Popen
    log: Path
    begins: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of its output; "" if there are none, or the log is gone."""
        text = ""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self.begins, self.log.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])

    def ending(self) -> str:
        """How it ended, as a predicate; "" while it runs."""
        if (status := self.process.poll()) is None:
            return ""
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def check(self) -> None:
        """Check that it runs.

        Raises:
            ProcessError: it has ended; with the end of its log.
        """
        if ending := self.ending():
            raise self.failure(ending)

    def failure(self, what: str) -> ProcessError:
        """An error that it did ``what``, with the end of its log."""
        return ProcessError(f"{self.name} {what}. The end of {self.log}:\n{self.tail()}")


@dataclass(frozen=True)
class Part:
    """One process of a stack, the same at every start.

    ``is_ready`` says within seconds whether it serves; ``patience_s`` is how long it may take to be
    ready.
    """

    name: str
    arguments: Sequence[str]
    log: Path
    is_ready: Callable[[], bool] = lambda: True
    patience_s: float = 0.0
    environment: Mapping[str, str] | None = None
    niceness: int = 0


def begin(part: Part, children: dict[str, Child], again: bool = False) -> Child:
    """:func:`start` ``part`` and add it to ``children``, with signals deferred.

    Raises:
        ProcessError: the program cannot be run.
    """
    with signals_deferred():
        child = children[part.name] = start(part, again)
    return child


def start(part: Part, again: bool = False) -> Child:
    """Start ``part`` in the background. Its log is truncated, or with ``again`` appended to.

    Raises:
        ProcessError: the program cannot be run, or its log cannot be written.
    """
    import psutil  # late: only starting needs it

    name, arguments, log = part.name, part.arguments, part.log
    if shutil.which(arguments[0]) is None:
        raise ProcessError(f"{name} cannot be started: {arguments[0]} is no program.")
    if shutil.which(BOUND[0]):
        arguments = [*BOUND, str(os.getpid()), str(part.niceness), *arguments]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab" if again else "wb") as out:
            begins = out.tell()
            process = psutil.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=part.environment,
                # a terminal's Ctrl-C reaches us alone, and we stop the children in order
                start_new_session=True,
            )  # fmt: skip
            return Child(name, process, log, begins)
    except OSError as error:
        raise ProcessError(f"{name} cannot be started: {error}") from error


def wait_until(
    child: Child, is_ready: Callable[[], bool], seconds: float, others: Sequence[Child] = ()
) -> None:
    """Wait until ``is_ready()``; ``child`` and ``others`` must stay alive.

    Raises:
        ProcessError: one of them ended, or the time is over.
    """
    deadline = time.monotonic() + seconds
    while not is_ready():
        for one in (child, *others):
            one.check()
        if time.monotonic() > deadline:
            raise child.failure(f"was not ready after {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def stop(children: Sequence[Child], seconds: float = STOP_SECONDS) -> None:
    """Stop ``children`` in order: SIGTERM, and after ``seconds`` SIGKILL for the whole group. Never
    raises.

    SIGTERM goes to the child alone, which stops its own children: a worker whose engine ended at
    the same moment could not send its last events.
    """
    import psutil

    for child in children:
        with contextlib.suppress(psutil.Error):  # ended, or timed out
            child.process.terminate()
            child.process.wait(seconds)
        # even if the leader is gone: its children may live on and hold its port
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty already
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()


SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S: Final = 0.05  # delay before a lost signal is raised again


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[list[signal.Signals]]:
    """Handle with ``handler`` those of ``SIGNALS`` that are not ignored; yields them."""
    before = {each: was for each in SIGNALS if (was := signal.getsignal(each)) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, handler)
    try:
        yield [*before]
    finally:
        for each, was in before.items():
            signal.signal(each, was)


@contextlib.contextmanager
def first_only() -> Iterator[None]:
    """The first of ``SIGNALS`` raises KeyboardInterrupt and later ones do nothing, so that stopping
    the children is not interrupted.

    Ignored signals stay ignored, as SIGHUP under nohup. Main thread only.
    """

    def heard(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is unheard.__code__:  # no exception leaves it either
                raise_again(number)
                return
            frame = frame.f_back
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    def unheard(what: sys.UnraisableHookArgs) -> None:
        """It came while Python ran a finalizer, which lets no exception out: raised again."""
        if not (isinstance(what.exc_value, KeyboardInterrupt) and what.exc_value.args):
            hook(what)  # not ours
            return
        for each in heeded:
            signal.signal(each, heard)
        raise_again(what.exc_value.args[0])

    def raise_again(number: int) -> None:
        threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)).start()

    hook = sys.unraisablehook
    with _handling(heard) as heeded:
        sys.unraisablehook = unheard
        try:
            yield
        finally:
            sys.unraisablehook = hook


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer ``SIGNALS`` until the block has ended.

    Otherwise a child that was started but not yet listed could outlive us. The kernel's signal mask
    is not used, because a child would inherit it.
    """
    pending: list[int] = []
    try:
        with _handling(lambda number, frame: pending.append(number)):
            yield
    finally:
        if pending:
            signal.raise_signal(pending[0])

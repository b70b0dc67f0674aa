"""Child processes: start, wait until ready, watch, stop; each with its own log file. None may be
left behind by Ctrl-C, SIGTERM or SIGHUP."""

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
TAIL_BYTES: Final = 16_384
"""A log that grew for weeks is not read whole for its last lines."""
STOP_SECONDS: Final = 15.0
"""From SIGTERM to SIGKILL: a worker sends its last events and the learner its last checkpoint."""
POLL_SECONDS: Final = 0.2
BOUND: Final = (
    *("setpriv", "--pdeathsig", "TERM", "--", "sh", "-c"),
    '[ "$PPID" = "$0" ] || exit; [ "$1" = 0 ] || { echo "$1" >/proc/self/autogroup; } 2>/dev/null; '
    'by=$1; shift; exec nice -n "$by" "$@"',
)
"""With our process id, niceness, and what shall run. Killed ourselves, we can stop nobody: then the
kernel tells the child (setpriv, of util-linux, when the thread that started it ends), which would
otherwise hold its port against the next start; nobody is told of a parent that had ended before.
Where Linux shares processors out by session, niceness counts in the own session alone, which has
one itself."""


@dataclass(frozen=True)
class Child:
    """A running child: a leader of its own process group, so that its children stop with it.

    ``begins`` is where in its log, in bytes, what it wrote begins. ``process`` is psutil's, because
    the standard library's waits for ever once an interrupt has come between its taking a lock and
    minding to let go of it (Python 3.11, ``Popen.poll``).
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
        """The end of what it wrote; empty where that is nothing, or the log is gone."""
        text = ""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self.begins, self.log.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])

    def ending(self) -> str:
        """How it ended, as the end of a sentence; empty while it runs."""
        if (status := self.process.poll()) is None:
            return ""
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def check(self) -> None:
        """Do nothing while it runs.

        Raises:
            ProcessError: it has ended; the message holds the end of its log.
        """
        if ending := self.ending():
            raise self.failure(ending)

    def failure(self, what: str) -> ProcessError:
        """That it did ``what``, with the end of its log."""
        return ProcessError(f"{self.name} {what}. The end of {self.log}:\n{self.tail()}")


@dataclass(frozen=True)
class Part:
    """One process of a stack, the same at its first start and at every later one.

    ``is_ready`` asks, within seconds, whether it serves; ``patience_s`` is how long it may take
    until it does.
    """

    name: str
    arguments: Sequence[str]
    log: Path
    is_ready: Callable[[], bool] = lambda: True
    patience_s: float = 0.0
    environment: Mapping[str, str] | None = None
    niceness: int = 0


def begin(part: Part, children: dict[str, Child], again: bool = False) -> Child:
    """:func:`start` the process of ``part`` and put it among ``children``, whatever signal comes.

    Raises:
        ProcessError: the program cannot be run.
    """
    with held():
        child = children[part.name] = start(part, again)
    return child


def start(part: Part, again: bool = False) -> Child:
    """Start ``part`` in the background; its log is emptied, or where it starts ``again`` added to.

    Raises:
        ProcessError: the program cannot be run, or its log not be written.
    """
    import psutil  # late: what starts no process does without

    name, arguments, log = part.name, part.arguments, part.log
    if shutil.which(arguments[0]) is None:
        raise ProcessError(f"{name} cannot be started: {arguments[0]} is no program.")
    if shutil.which(BOUND[0]):
        arguments = [*BOUND, str(os.getpid()), str(part.niceness), *arguments]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab" if again else "wb") as out:
            begins = out.tell()  # the child's writing moves it
            process = psutil.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=part.environment,
                # a Ctrl-C in the terminal reaches us alone: we stop the children in order
                start_new_session=True,
            )  # fmt: skip
            return Child(name, process, log, begins)
    except OSError as error:
        raise ProcessError(f"{name} cannot be started: {error}") from error


def wait_until(
    child: Child, is_ready: Callable[[], bool], seconds: float, others: Sequence[Child] = ()
) -> None:
    """Wait until ``is_ready()``; meanwhile ``child`` and ``others`` must stay alive.

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
    """End ``children`` in this order: SIGTERM to each, SIGKILL to what is left of it after a while.

    SIGTERM goes to the child alone, which tells its own children in an order of its own: a worker
    that loses its engine at the same moment cannot send the engine's last events.

    Never raises: it runs while something else is being reported.
    """
    import psutil

    for child in children:
        with contextlib.suppress(psutil.Error):  # it has ended, or takes too long
            child.process.terminate()
            child.process.wait(seconds)
        # also when the leader is gone: what it started may have outlived it, and its port with it
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty already
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()


SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S: Final = 0.05
"""To when a signal is raised again that nobody heard."""


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[list[signal.Signals]]:
    """Let ``handler`` hear those of ``SIGNALS`` that are not ignored, which are yielded."""
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
    """The first of ``SIGNALS`` raises KeyboardInterrupt, further ones do nothing: what stops the
    children is not itself stopped halfway.

    What the caller's caller ignores stays ignored, as SIGHUP under nohup. Main thread only.
    """

    def heard(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is unheard.__code__:  # which lets no exception out either
                raise_again(number)
                return
            frame = frame.f_back
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    def unheard(what: sys.UnraisableHookArgs) -> None:
        """It came while Python ran a finalizer, which lets no exception out: raised again."""
        if not (isinstance(what.exc_value, KeyboardInterrupt) and what.exc_value.args):
            hook(what)  # what others raised is not ours
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
def held() -> Iterator[None]:
    """``SIGNALS`` wait until the block has ended.

    A child that was started and is not yet in the list of those to be stopped would outlive us.
    Nothing is blocked in the kernel, because a child would inherit that.
    """
    pending: list[int] = []
    try:
        with _handling(lambda number, frame: pending.append(number)):
            yield
    finally:
        if pending:
            signal.raise_signal(pending[0])

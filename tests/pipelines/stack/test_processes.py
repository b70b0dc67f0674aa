from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from decoder.contracts.errors import ProcessError
from pipelines.stack import processes
from pipelines.stack.processes import SIGNALS, Part, first_only, signals_deferred

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('waiting for godot'); time.sleep(600)"
)
PARENT = (
    "import subprocess, sys, time; "
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print(c.pid, flush=True); time.sleep(600)"
)


def python(code: str, log: Path, niceness: int = 0) -> processes.Child:
    return processes.start(
        Part("child", [sys.executable, "-u", "-c", code], log, niceness=niceness)
    )


def wrote(child: processes.Child) -> bool:
    return child.log.stat().st_size > 0


def test_a_process_that_dies_is_reported_with_its_log_also_while_another_starts(tmp_path) -> None:
    dead = python("print('first'); print('the reason'); raise SystemExit(3)", tmp_path / "dead")
    alive = python("import time; time.sleep(600)", tmp_path / "alive")
    try:
        for waited, others in ((dead, []), (alive, [dead])):
            with pytest.raises(ProcessError, match=r"child ended with status 3(.|\n)*the reason"):
                processes.wait_until(waited, lambda: False, 300.0, others)
    finally:
        processes.stop([alive, dead])


def test_a_process_that_never_gets_ready_is_reported_and_killed_if_it_ignores_sigterm(
    tmp_path,
) -> None:
    child = python(STUBBORN, tmp_path / "log")
    try:
        processes.wait_until(child, lambda: wrote(child), 300.0)
        with pytest.raises(ProcessError, match=r"not ready after 0 s(.|\n)*godot"):
            processes.wait_until(child, lambda: False, 0.2)
    finally:
        processes.stop([child], seconds=0.2)
    assert not child.is_alive


def test_a_program_or_a_log_that_cannot_be_had_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ProcessError, match="child cannot be started"):
        processes.start(Part("child", ["/no/such/program"], tmp_path / "log"))
    with pytest.raises(ProcessError, match="child cannot be started"):
        python("print()", tmp_path / "file" / "log")


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_niceness_is_given_to_the_child_and_where_linux_shares_by_session_to_that(tmp_path) -> None:
    group = Path("/proc/self/autogroup")
    asks = f"print(open('{group}').read().split()[-1])" if group.exists() else "print(7)"
    child = python(f"import os; print(os.nice(0)); {asks}", tmp_path / "log", niceness=7)
    child.process.wait()
    assert child.log.read_text().split() == [str(min(os.nice(0) + 7, 19)), "7"]


def test_what_an_interrupt_left_locked_is_stopped_all_the_same(tmp_path) -> None:
    """``Popen.poll`` takes a lock, and an interrupt may come before it minds to let go of it."""
    child = python("import time; time.sleep(600)", tmp_path / "log")
    child.process._waitpid_lock.acquire()
    processes.stop([child], 300.0)
    assert child.ending() == "was killed by signal 15"


def test_a_child_whose_parent_died_while_it_began_does_not_run(tmp_path) -> None:
    """Not even where the kernel was asked too late to tell of that."""
    late = tmp_path / "setpriv"
    late.write_text(
        f"#!/bin/sh\ntouch {tmp_path}/began\nuntil [ -e {tmp_path}/died ]; do sleep 0.1; done\n"
        f'exec {shutil.which("setpriv")} "$@"'
    )
    late.chmod(0o755)
    code = (
        "import os, sys; from pathlib import Path; from pipelines.stack import processes; "
        "run = ['touch', sys.argv[1] + '/ran']; "
        "processes.start(processes.Part('child', run, Path(sys.argv[1], 'log'))); "
        "\nwhile not Path(sys.argv[1], 'began').exists(): pass\n"
        "os.kill(os.getpid(), 9)"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PATH": path}, check=False
    )
    marked = [
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])
    ]
    assert marked
    (tmp_path / "died").touch()
    psutil.wait_procs(marked, timeout=300)
    assert not (tmp_path / "ran").exists()


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """As in a terminal: what started the tests may ignore a signal, as nohup does."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_interrupts_and_what_stops_things_is_left_in_peace(number) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    stopped = False
    with pytest.raises(KeyboardInterrupt), first_only():
        try:
            signal.raise_signal(number)
        finally:
            for each in SIGNALS:
                signal.raise_signal(each)
            stopped = True
    assert stopped
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with first_only():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_waits_until_a_child_is_in_its_list() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), first_only():
        with signals_deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("started")
            done.append("listed")
        done.append("never")
    assert done == ["started", "listed"]


@pytest.mark.parametrize("hasty", [False, True])
def test_a_signal_that_falls_into_a_finalizer_is_raised_again(
    hasty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it comes before what raises it has returned, on a machine that stood still."""

    class Hasty(threading.Timer):
        begun = 0

        def start(self) -> None:
            Hasty.begun += 1
            if Hasty.begun > 1:
                super().start()
            else:
                self.function(*self.args)

    if hasty:
        monkeypatch.setattr(threading, "Timer", Hasty)

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            reached.append("never")

    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), first_only():
        Finalized()
        time.sleep(600.0)
        reached.append("never")
    assert not reached

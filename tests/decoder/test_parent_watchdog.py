"""What a process started with multiprocessing does when its parent is killed."""

from __future__ import annotations

import subprocess
import sys

import psutil

from tests.conftest import until

FAMILIES = """
import multiprocessing, os, signal, sys, time
import decoder.parent_watchdog
from decoder.parent_watchdog import watch_parent
decoder.parent_watchdog.GRACE_S, decoder.parent_watchdog.POLL_S = 0.2, 0.1

def child(context, deaf, grandchild):
    watch_parent()
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if grandchild:
        context.Process(target=child, args=(context, deaf, False)).start()
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: all write to one pipe
    time.sleep(600)

if __name__ == "__main__":
    watch_parent()
    for method in ("fork", "spawn", "forkserver", "deaf"):
        context = multiprocessing.get_context("fork" if method == "deaf" else method)
        context.Process(target=child, args=(context, method == "deaf", True)).start()
    time.sleep(600)
"""


def test_no_engine_outlives_a_killed_server(tmp_path) -> None:
    """However it was started; nor does one that minds no signal."""
    script = tmp_path / "families.py"
    script.write_text(FAMILIES)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        below = [psutil.Process(int(server.stdout.readline())) for _ in range(8)]
        assert all(process.is_running() for process in below)
        server.kill()
        until(lambda: not any(process.is_running() for process in below), "their end")

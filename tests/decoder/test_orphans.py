"""What a process started with multiprocessing does when its parent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

FAMILY = """
import multiprocessing, os, signal, sys, time
from decoder.orphans import watch

def child(deaf, grandchild):
    watch()
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if grandchild:
        context.Process(target=child, args=(deaf, False)).start()
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: both write to one pipe
    time.sleep(600)

context = multiprocessing.get_context(sys.argv[1])
if __name__ == "__main__":
    import decoder.orphans
    watch()
    context.Process(target=child, args=(sys.argv[2] == "deaf", True)).start()
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("method", "kind"),
    [("fork", "polite"), ("spawn", "polite"), ("forkserver", "polite"), ("fork", "deaf")],
)
def test_an_engine_does_not_outlive_a_killed_server(method: str, kind: str, tmp_path) -> None:
    """Nor does one that minds no signal."""
    script = tmp_path / "family.py"
    script.write_text("import decoder.orphans; decoder.orphans.GRACE_S = 0.5\n" + FAMILY)
    with subprocess.Popen(
        [sys.executable, str(script), method, kind], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        below = [psutil.Process(int(server.stdout.readline())) for _ in range(2)]
        assert all(process.is_running() for process in below)
        os.kill(server.pid, signal.SIGKILL)
        until = time.monotonic() + 60.0
        while any(process.is_running() for process in below):
            assert time.monotonic() < until, "it runs on"
            time.sleep(0.05)

from __future__ import annotations

import contextlib
import os

from rich.console import Console

from pipelines.stack.up import say


def test_a_terminal_that_nobody_reads_ends_nothing(capsys) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    pipe = os.fdopen(writer, "w", buffering=1)
    for _ in range(2):
        say(Console(file=pipe), "broker ended with status 1; [next] try in 1 s")
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
    say(Console(file=pipe), "after the end")
    say(Console(), "broker runs again")
    assert "broker runs again" in capsys.readouterr().out

"""``python -m tests.pipelines.stack.flapping FOLDER``: parts that end all the time, kept up."""

from __future__ import annotations

import sys
from pathlib import Path

from pipelines.stack import interrupts, processes
from pipelines.stack.parts import Part, begin
from pipelines.stack.supervision import Pauses, keep

CODE = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(0.05)"


def main(folder: Path) -> None:
    parts = {
        name: Part(name, (sys.executable, "-c", CODE, str(folder)), folder / name, lambda: True, 1)
        for name in ("one", "two", "three")
    }
    children: dict[str, processes.Child] = {}
    with interrupts.first_only():
        try:
            for part in parts.values():
                begin(part, children)
            keep(parts, children, print, Pauses(0.001, 0.001, 60.0, 0.001))
        finally:
            processes.stop(list(children.values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

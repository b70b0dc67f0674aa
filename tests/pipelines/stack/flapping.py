"""``python -m tests.pipelines.stack.flapping FOLDER [SECONDS]``: parts that are kept up.

Without SECONDS they end all the time, and leave a child of their own behind each time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipelines.stack import processes
from pipelines.stack.processes import Part, begin
from pipelines.stack.up import keep_up

FLAPS = "sleep 600 & sleep 0.05"


def main(folder: Path, seconds: str = "") -> None:
    code = f"exec sleep {seconds}" if seconds else FLAPS
    parts = {
        name: Part(name, ("sh", "-c", code, str(folder)), folder / name, lambda: True, 1)
        for name in ("one", "two", "three")
    }
    children: dict[str, processes.Child] = {}
    with processes.first_only():
        try:
            for part in parts.values():
                begin(part, children)
            print("begun")
            keep_up(parts, children, print, 0.001)
        finally:
            processes.stop(list(children.values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

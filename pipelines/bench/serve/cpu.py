"""Processor time of a server: what it used, whoever else was using the machine.

On a shared machine the clock on the wall measures the neighbours, too. Threads that wait by
spinning count as busy: ``OMP_WAIT_POLICY=PASSIVE`` keeps OpenMP from it.
"""

from __future__ import annotations

import os
from pathlib import Path


def session_seconds(leader: int) -> float | None:
    """User and system seconds so far of all living processes in the session of process ``leader``.

    None where there is no ``/proc`` (not Linux).
    """
    ticks, found = 0, False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the name, in parentheses, may hold anything; proc(5) counts on from behind it
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if fields and int(fields[3]) == leader:
            found = True
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") if found else None

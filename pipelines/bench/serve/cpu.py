"""Processor time of a server: what it used, whoever else was using the machine.

On a shared machine the clock on the wall measures the neighbours, too. Threads that wait by
spinning count as busy: ``OMP_WAIT_POLICY=PASSIVE`` keeps OpenMP from it.
"""

from __future__ import annotations

import os

import psutil


def session_seconds(leader: int) -> float | None:
    """User and system seconds so far of all living processes in the session of process ``leader``.

    None where none lives.
    """
    found = [s for pid in psutil.pids() if (s := _seconds(pid, leader)) is not None]
    return sum(found) if found else None


def _seconds(pid: int, session: int) -> float | None:
    try:
        if os.getsid(pid) != session:
            return None
        times = psutil.Process(pid).cpu_times()
    except (psutil.Error, OSError):  # it has ended, or is none of ours
        return None
    return float(times.user + times.system)

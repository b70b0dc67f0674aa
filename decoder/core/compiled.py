"""Loops compiled to machine code, for the few places where a decision waits for them.

numba comes with vLLM, which needs it for its own drafters. Functions are compiled for one signature
when their module is imported, so that no decision ever waits for a compiler, and are kept on disk
for the next process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])

MATRIX: Final = numba.float32[:, ::1]
FLOATS: Final = numba.float32[::1]
WHOLES: Final = numba.int64[::1]
FIXED: Final = numba.types.Array(numba.float64, 1, "C", readonly=True)
REALS: Final = numba.float64[::1]
WHOLE: Final = numba.int64
REAL: Final = numba.float64
REALS_3: Final = numba.types.UniTuple(numba.float64, 3)
YES: Final = numba.boolean
"""Types of arguments: arrays are contiguous; a ``FIXED`` one is only read."""


def _if_there_is_room(keep: Callable[..., None]) -> Callable[..., None]:
    def tried(*arguments: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk: compiled again in every process, too
            keep(*arguments)

    return tried


def compiled(signature: tuple[Any, ...] | None = None) -> Callable[[F], F]:
    """Compile a function at once for arguments of ``signature``, or when a caller needs it.

    What is kept on disk is keyed by the function's own file: a constant of another file comes in
    as an argument, unless it never changes (the numbers of the arms).
    """

    def decorate(function: F) -> F:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            made = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder to keep it in: compiled again in every process
            made = numba.njit(**options)(function)
        made._cache.save_overload = _if_there_is_room(made._cache.save_overload)
        if signature:
            made.compile(signature)
            made.disable_compile()
        return made  # type: ignore[no-any-return]

    return decorate

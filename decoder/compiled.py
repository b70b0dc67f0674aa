"""Loops compiled to machine code, for the few places where a decision waits for them.

numba comes with vLLM, which needs it for its own drafters. Functions are compiled for one signature
when their module is imported, so that no decision ever waits for a compiler, and are kept on disk
for the next process. Where there is no numba they run as they are written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

try:
    import numba
except ImportError:  # no vLLM, or a learner's: the same functions, as they stand
    numba = None

F = TypeVar("F", bound=Callable[..., Any])


class _Untyped:
    """In the place of numba's types where there is none."""

    def __getattr__(self, _: str) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


_of: Any = numba or _Untyped()
MATRIX: Final = _of.float32[:, ::1]
FLOATS: Final = _of.float32[::1]
WHOLES: Final = _of.int64[::1]
FIXED: Final = _of.types.Array(_of.float64, 1, "C", readonly=True)
REALS: Final = _of.float64[::1]
WHOLE: Final = _of.int64
REAL: Final = _of.float64
REALS_3: Final = _of.types.UniTuple(_of.float64, 3)
YES: Final = _of.boolean
IDS: Final = _of.int32[::1]
IDS_2: Final = _of.int32[:, ::1]
IDS_3: Final = _of.int32[:, :, ::1]
FLOATS_3: Final = _of.float32[:, :, ::1]
WHOLES_2: Final = _of.int64[:, ::1]
WHOLES_3: Final = _of.int64[:, :, ::1]
REALS_2: Final = _of.float64[:, ::1]
SMALLS: Final = _of.int8[::1]
BYTES: Final = _of.types.Array(_of.uint8, 1, "C", readonly=True)
BYTES_2: Final = _of.uint8[:, ::1]
YESES: Final = _of.boolean[::1]
"""Types of arguments: arrays are contiguous; a ``FIXED`` one is only read."""


def record(kind: type, *fields: Any) -> Any:
    """The type of a named tuple whose fields are of these types."""
    return _of.types.NamedTuple(fields, kind)


def rows_of(kind: Any) -> Any:
    """The type of an array of rows of the structured dtype ``kind``."""
    return numba.from_dtype(kind)[::1] if numba is not None else None


def _if_there_is_room(keep: Callable[..., None]) -> Callable[..., None]:
    def tried(*arguments: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk: compiled again in every process, too
            keep(*arguments)

    return tried


def _if_it_can_be_read(cache: Any) -> Callable[..., Any]:
    load = cache.load_overload

    def tried(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception:  # noqa: BLE001 - of another version, or cut short: whatever unpickling says
            cache.flush()
            return None

    return tried


def _sources(made: Any) -> set[Any]:
    """What a compiled function is made of: its own file, and what it takes from others', which
    numba does not look at: their files, and constants."""
    function = made.py_func
    sources = {made._cache._cache_file._source_stamp}
    for name in function.__code__.co_names:
        taken = function.__globals__.get(name)
        sources |= getattr(taken, "sources", set())
        if isinstance(taken, int | float | tuple):
            sources.add((name, repr(taken)))
    return sources


def compiled(signature: tuple[Any, ...] | None = None) -> Callable[[F], F]:
    """Compile a function at once for arguments of ``signature``, or when a caller needs it.

    What is kept on disk is made anew when the function's file, that of a compiled function it
    calls or a number it takes from another changes.
    """

    def decorate(function: F) -> F:
        if numba is None or numba.config.DISABLE_JIT:
            return function
        options = {"nogil": True, "error_model": "numpy"}
        try:
            made = numba.njit(cache=True, **options)(function)
            made.sources = made._cache._cache_file._source_stamp = _sources(made)
        except RuntimeError:  # no folder to keep it in: compiled again in every process
            made = numba.njit(**options)(function)
        made._cache.load_overload = _if_it_can_be_read(made._cache)
        made._cache.save_overload = _if_there_is_room(made._cache.save_overload)
        if signature:
            made.compile(signature)
            made.disable_compile()
        return made  # type: ignore[no-any-return]

    return decorate

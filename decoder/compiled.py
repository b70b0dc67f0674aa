"""Loops compiled to machine code, for the few places where a decision waits for them.

numba comes with vLLM, which needs it for its own drafters. Functions are compiled for one signature
when their module is imported, so that no decision ever waits for a compiler, and are kept on disk
for the next process. Where there is no numba they run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numpy as np

from decoder import code_files

try:
    import numba
    from numba.extending import intrinsic, register_jitable
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
HANDLE: Final = WHOLES
FIXED: Final = _of.types.Array(_of.float64, 1, "C", readonly=True)
REALS: Final = _of.float64[::1]
WHOLE: Final = _of.int64
REAL: Final = _of.float64
REALS_3: Final = _of.types.UniTuple(_of.float64, 3)
YES: Final = _of.boolean
IDS: Final = _of.int32[::1]
IDS_2: Final = _of.int32[:, ::1]
WHOLES_2: Final = _of.int64[:, ::1]
REALS_2: Final = _of.float64[:, ::1]
SMALLS: Final = _of.int8[::1]
BYTES: Final = _of.types.Array(_of.uint8, 1, "C", readonly=True)
BYTES_2: Final = _of.uint8[:, ::1]
SCRATCH: Final = _of.types.Tuple((IDS_2, FLOATS))
"""Types of arguments: arrays are contiguous; a ``FIXED`` one is only read."""


def record(kind: type, *fields: Any) -> Any:
    """The type of a named tuple whose fields are of these types."""
    return _of.types.NamedTuple(fields, kind)


class Handle:
    """Arrays of a named tuple as one argument of a compiled function, which opens it by
    :func:`opener`: taking a tuple apart for a call costs half a microsecond an array."""

    __slots__ = ("_arrays", "_places")

    def __init__(self) -> None:
        self._arrays: Any = None

    def of(self, arrays: Any) -> Any:
        """What stands for ``arrays`` until it is asked for others; without numba they themselves.

        It knows where they lie, so they live as long.
        """
        if arrays is not self._arrays:
            self._arrays = self._places = arrays
            if numba is not None and not numba.config.DISABLE_JIT:
                places = [number for a in arrays for number in (a.ctypes.data, *a.shape)]
                self._places = np.array(places, np.int64)
        return self._places


def opener(kind: Any) -> Callable[[Any], Any]:
    """A function, for compiled ones alone, that gives the named tuple of type ``kind`` (of
    :func:`record`) that a handle stands for."""
    if numba is None or numba.config.DISABLE_JIT:
        return lambda handle: handle
    from numba.core import cgutils, types
    from numba.np.arrayobj import make_array, populate_array

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        handle = make_array(signature.args[0])(context, builder, arguments[0])
        fields, at = list[Any](), 0
        for field in kind.types:
            place, *shape = (
                builder.load(cgutils.gep_inbounds(builder, handle.data, at + i))
                for i in range(1 + field.ndim)
            )
            at += 1 + field.ndim
            array = make_array(field)(context, builder)
            size = context.get_abi_sizeof(context.get_data_type(field.dtype))
            step = context.get_constant(types.intp, size)
            strides = [step] * field.ndim
            for i in range(field.ndim - 1, 0, -1):
                strides[i - 1] = builder.mul(strides[i], shape[i])
            data = builder.inttoptr(place, array.data.type)
            populate_array(array, data, shape, strides, step, None)
            fields.append(array._getvalue())
        return context.make_tuple(builder, kind, fields)

    made: Any = intrinsic(lambda _, handle: (kind(handle), generate))
    made.sources = {repr((repr(kind), *kind.fields)), *code_files.dependencies(opener)}
    return cast("Callable[[Any], Any]", made)


def rows_of(kind: Any) -> Any:
    """The type of an array of rows of the structured dtype ``kind``."""
    return numba.from_dtype(kind)[::1] if numba is not None else None


def compilable(*functions: Any) -> None:
    """Let compiled functions call these, which themselves run as they are written, on arrays."""
    if numba is not None and not numba.config.DISABLE_JIT:
        for function in functions:
            register_jitable(nogil=True, error_model="numpy")(function)
            function.sources = code_files.dependencies(function)


def compiled(signature: tuple[Any, ...] | None = None) -> Callable[[F], F]:
    """Compile a function at once for arguments of ``signature``, or when a caller needs it.

    What is kept on disk is found again only where nothing that it was made of differs, see
    :mod:`decoder.code_files`.
    """

    def decorate(function: F) -> F:
        if numba is None or numba.config.DISABLE_JIT:
            return function
        options = {"nogil": True, "error_model": "numpy"}
        sources = code_files.dependencies(function)
        try:
            made = numba.njit(cache=True, **options)(function)
            code_files.attach(made, sources)
        except RuntimeError:  # no folder to keep it in: compiled again in every process
            made = numba.njit(**options)(function)
        made.sources = sources
        if signature:
            made.compile(signature)
            made.disable_compile()
        return made  # type: ignore[no-any-return]

    return decorate

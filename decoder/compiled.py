"""numba compilation of the loops on the decision path.

vLLM depends on numba for its own drafters. Each function is compiled for one signature when its
module is imported, so no decision waits for a compiler. Machine code is cached on disk for the next
process. Without numba the functions run as plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from itertools import count
from typing import (
    Annotated,
    Any,
    Final,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from numpy.typing import NDArray

from decoder import code_files

try:
    import numba
    from numba.extending import intrinsic, register_jitable
except ImportError:  # no vLLM here, or a learner: the functions run as plain Python
    numba = None

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy"}


def jitted() -> bool:
    """Whether functions are compiled in this process."""
    return numba is not None and not numba.config.DISABLE_JIT


_NUMBERS: Final[dict[Any, Any]] = (
    {int: numba.int64, float: numba.float64, bool: numba.boolean} if numba is not None else {}
)

Int64Array = Annotated[NDArray[np.int64], 1]
Int32Array = Annotated[NDArray[np.int32], 1]
Int32Matrix = Annotated[NDArray[np.int32], 2]
Float32Array = Annotated[NDArray[np.float32], 1]
Float32Matrix = Annotated[NDArray[np.float32], 2]
Float64Array = Annotated[NDArray[np.float64], 1]
Float64Matrix = Annotated[NDArray[np.float64], 2]
Uint8Array = Annotated[NDArray[np.uint8], 1]
Uint8Matrix = Annotated[NDArray[np.uint8], 2]
ConstantArray = Annotated[NDArray[np.float64], 1, "readonly"]
"""Annotations of arguments and fields: contiguous arrays by dtype and number of dimensions. An
array of records is ``Annotated[NDArray[Any], DTYPE]``. Signatures are derived from these."""
Handle = Annotated[NDArray[np.int64], 1]
"""Result of :func:`handle_of`: addresses and shapes of a named tuple's arrays."""


def type_of(annotation: Any) -> Any:
    """The numba type of an annotated argument: a number, an array, a tuple or a named tuple."""
    if annotation in _NUMBERS:
        return _NUMBERS[annotation]
    if get_origin(annotation) is tuple:
        return numba.types.Tuple([type_of(part) for part in get_args(annotation)])
    if get_origin(annotation) is not Annotated:
        fields = get_type_hints(annotation, include_extras=True)
        return numba.types.NamedTuple([type_of(fields[f]) for f in annotation._fields], annotation)
    array, first, *rest = get_args(annotation)
    if isinstance(first, np.dtype):
        return numba.from_dtype(first)[::1]
    dtype = numba.from_dtype(np.dtype(get_args(get_args(array)[1])[0]))
    return numba.types.Array(dtype, first, "C", readonly=bool(rest))


def handle_of(arrays: Any) -> Any:
    """Handle of a named tuple of arrays or of such tuples, which must outlive it; without numba the
    tuple itself. It passes many arrays as one argument: unboxing one costs a compiled call 40 ns or
    more. A function from :func:`opener` reads their addresses."""
    return np.array([*_numbers_of(arrays)], np.int64) if jitted() else arrays


def _numbers_of(arrays: Any) -> Iterator[int]:
    for part in arrays:
        if isinstance(part, tuple):
            yield from _numbers_of(part)
        else:
            yield part.ctypes.data
            yield from part.shape


def opener(kind: type[T]) -> Callable[[Any], T]:
    """A function, callable from compiled code, that unpacks a handle into named tuple ``kind``."""
    if not jitted():
        return lambda handle: handle
    from numba.core import cgutils, types
    from numba.np.arrayobj import make_array, populate_array

    opened = type_of(kind)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        handle = make_array(signature.args[0])(context, builder, arguments[0])
        positions = count()

        def number() -> Any:
            return builder.load(cgutils.gep_inbounds(builder, handle.data, next(positions)))

        def array_of(field: Any) -> Any:
            address, *shape = (number() for _ in range(1 + field.ndim))
            array = make_array(field)(context, builder)
            size = context.get_abi_sizeof(context.get_data_type(field.dtype))
            step = context.get_constant(types.intp, size)
            strides = [step] * field.ndim
            for i in range(field.ndim - 1, 0, -1):
                strides[i - 1] = builder.mul(strides[i], shape[i])
            data = builder.inttoptr(address, array.data.type)
            populate_array(array, data, shape, strides, step, None)
            return array._getvalue()

        def value_of(field: Any) -> Any:
            if isinstance(field, types.NamedTuple):
                return context.make_tuple(builder, field, [value_of(part) for part in field.types])
            return array_of(field)

        return value_of(opened)

    return cast("Callable[[Any], T]", intrinsic(lambda _, handle: (opened(handle), generate)))


def bit_length(number: int) -> int:
    """Bits of a number from 0 on, in compiled code too."""
    return int(number).bit_length()


if jitted():
    from numba.core import cgutils, types

    def _bit_length(context: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            leading = builder.ctlz(arguments[0], cgutils.false_bit)
            return builder.sub(context.get_constant(types.int64, 64), leading)

        return types.int64(types.int64), generate

    compiled_bit_length: Any = intrinsic(_bit_length)
    bit_length = compiled_bit_length


def compilable(*functions: Any) -> None:
    """Make functions callable from compiled code; Python still runs them on arrays, uncompiled."""
    if jitted():
        for function in functions:
            register_jitable(**OPTIONS)(function)


def compiled(function: F) -> F:
    """Compile a function when a compiled one first calls it.

    Cached code is reused only if no source that it depends on changed: :mod:`decoder.code_files`.
    """
    if not jitted():
        return function
    try:
        dispatcher = numba.njit(cache=True, **OPTIONS)(function)
        code_files.attach(dispatcher)
    except RuntimeError:  # no cache folder: every process compiles again
        dispatcher = numba.njit(**OPTIONS)(function)
    return dispatcher  # type: ignore[no-any-return]


def entry_point(function: F) -> F:
    """Compile a function that Python calls, at import, for its annotated types; it accepts no
    others."""
    dispatcher: Any = compiled(function)
    if dispatcher is not function:
        hints = get_type_hints(function, include_extras=True)
        dispatcher.compile(tuple(type_of(hints[name]) for name in signature(function).parameters))
        dispatcher.disable_compile()
    return dispatcher  # type: ignore[no-any-return]

"""Loops compiled to machine code, for the few places where a decision waits for them.

numba comes with vLLM, which needs it for its own drafters. Functions are compiled for one signature
when their module is imported, so that no decision ever waits for a compiler, and are kept on disk
for the next process. Where there is no numba they run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from itertools import count
from operator import is_
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
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
except ImportError:  # no vLLM, or a learner's: the same functions, as they stand
    numba = None

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def jitted() -> bool:
    """Whether functions are compiled in this process."""
    return numba is not None and not numba.config.DISABLE_JIT


_NUMBERS: Final[dict[Any, Any]] = (
    {int: numba.int64, float: numba.float64, bool: numba.boolean} if numba is not None else {}
)

Int64Array = Annotated[NDArray[np.int64], 1]
Int32Array = Annotated[NDArray[np.int32], 1]
Int32Matrix = Annotated[NDArray[np.int32], 2]
Int64Matrix = Annotated[NDArray[np.int64], 2]
Float32Array = Annotated[NDArray[np.float32], 1]
Float32Matrix = Annotated[NDArray[np.float32], 2]
Float64Array = Annotated[NDArray[np.float64], 1]
Float64Matrix = Annotated[NDArray[np.float64], 2]
Uint8Array = Annotated[NDArray[np.uint8], 1]
Uint8Matrix = Annotated[NDArray[np.uint8], 2]
ConstantArray = Annotated[NDArray[np.float64], 1, "readonly"]
"""Annotations of arguments and of fields: contiguous arrays by dtype and dimensions. An array of
records is ``Annotated[NDArray[Any], DTYPE]``. Signatures are derived from these."""
Handle = Annotated[NDArray[np.int64], 1]
"""What :meth:`Handles.of` gives: the addresses and shapes of a named tuple's arrays."""


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


class Handles(Generic[T]):
    """One argument in the place of many arrays: unboxing each costs a compiled call 40 ns or more.

    Holds the arrays, whose addresses it gives to a function that :func:`opener` made a reader for.
    """

    __slots__ = ("_handle", "_held")

    def __init__(self) -> None:
        self._held: tuple[Any, ...] = ()
        self._handle: Any = None

    def of(self, held: T) -> Any:
        """The handle of a named tuple of arrays, or of such tuples; without numba the tuple
        itself. Made anew where an array was replaced."""
        if not (self._held and all(map(is_, held, self._held))):  # type: ignore[call-overload]
            self._held = self._handle = held  # type: ignore[assignment]
            if jitted():
                self._handle = np.array([*_numbers_of(held)], np.int64)
        return self._handle


def _numbers_of(held: Any) -> Iterator[int]:
    for part in held:
        if isinstance(part, tuple):
            yield from _numbers_of(part)
        else:
            yield part.ctypes.data
            yield from part.shape


def opener(kind: type[T]) -> Callable[[Any], T]:
    """A function, for compiled ones, that gives the named tuple of class ``kind`` that a handle
    stands for."""
    if not jitted():
        return lambda handle: handle
    from numba.core import cgutils, types
    from numba.np.arrayobj import make_array, populate_array

    opened = type_of(kind)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        handle = make_array(signature.args[0])(context, builder, arguments[0])
        places = count()

        def number() -> Any:
            return builder.load(cgutils.gep_inbounds(builder, handle.data, next(places)))

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

        def value_of(held: Any) -> Any:
            if isinstance(held, types.NamedTuple):
                return context.make_tuple(builder, held, [value_of(part) for part in held.types])
            return array_of(held)

        return value_of(opened)

    made: Any = intrinsic(lambda _, handle: (opened(handle), generate))
    made.sources = {repr(code_files.of_type(opened)), *code_files.dependencies(opener)}
    return cast("Callable[[Any], T]", made)


def compilable(*functions: Any) -> None:
    """Let compiled functions call these, which themselves run as they are written, on arrays."""
    if jitted():
        for function in functions:
            register_jitable(nogil=True, error_model="numpy")(function)
            function.sources = code_files.dependencies(function)


def compiled(function: F) -> F:
    """Compile a function when a compiled one calls it.

    What is kept on disk is found again only where nothing that it was made of differs, see
    :mod:`decoder.code_files`.
    """
    if not jitted():
        return function
    options = {"nogil": True, "error_model": "numpy"}
    sources = code_files.dependencies(function)
    try:
        made = numba.njit(cache=True, **options)(function)
        code_files.attach(made, sources)
    except RuntimeError:  # no folder to keep it in: compiled again in every process
        made = numba.njit(**options)(function)
    made.sources = sources
    return made  # type: ignore[no-any-return]


def entry_point(function: F) -> F:
    """Compile a function that Python calls, at once, for the types that its arguments are annotated
    with; it takes no others."""
    made: Any = compiled(function)
    if made is not function:
        hints = get_type_hints(function, include_extras=True)
        made.compile(tuple(type_of(hints[name]) for name in signature(function).parameters))
        made.disable_compile()
    return made  # type: ignore[no-any-return]

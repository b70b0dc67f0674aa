"""Content-addressed on-disk cache for numba's machine code: one file per signature.

numba's own cache has an index and numbered data files, whose names depend on neither source nor
processor. If two releases or two kinds of host share a folder, one can run the other's code. Here
the file name is a digest of everything the code depends on, and files are replaced atomically: a
file always holds the code its name stands for.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

import numpy as np

KEPT: Final = 64
"""Maximum files per function; the oldest are deleted. Each source edit makes new names."""
OPTIONS: Final = ("OPT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT")
"""numba options that change the generated code."""
_CHECK: Final = 32


def dependencies(function: Any) -> set[str]:
    """Everything a function's machine code depends on: its file, its code, constants and fields
    from other modules, and the ``sources`` of the functions it calls."""
    code = function.__code__
    cells = dict[str, Any]()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell: the function itself
            cells[name] = cell.cell_contents
    namespace = function.__globals__ | cells
    return {_digest_of_file(code.co_filename), *_of_code(code), *_of_globals(code, namespace)}


def attach(dispatcher: Any, sources: set[str]) -> None:
    """Cache the functions of numba's dispatcher in files named by ``sources``.

    A torn file counts as missing. A full or read-only disk stores nothing. Neither raises.
    """
    cache = dispatcher._cache
    cache._cache_file = CodeFiles(Path(cache.cache_path), dispatcher.py_func, sources)
    cache.load_overload = _or_none(cache.load_overload, Exception)  # whatever unpickling raises
    cache.save_overload = _or_none(cache.save_overload, OSError)


class CodeFiles:
    """numba's ``IndexDataCacheFile`` without an index: ``load``, ``save`` and ``flush``."""

    def __init__(self, folder: Path, function: Any, sources: set[str]) -> None:
        name = f"{Path(function.__code__.co_filename).stem}.{function.__qualname__}"
        self._name = name.replace("<", "").replace(">", "")
        self._folder, self._sources = folder, sorted(sources)

    def path(self, key: tuple[Any, ...]) -> Path:
        """The file for numba's ``key``: signature, processor name and features, digests of byte
        code and closure."""
        signature, *rest = key
        text = repr((_versions(), self._sources, [*map(of_type, signature)], rest))
        return self._folder / f"{self._name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.nbc"

    def load(self, key: tuple[Any, ...]) -> Any:
        """The data saved for ``key``; None if missing or torn.

        Raises:
            Exception: whatever unpickling raises.
        """
        try:
            content = self.path(key).read_bytes()
        except OSError:
            return None
        check, code = content[:_CHECK], content[_CHECK:]
        if hashlib.sha256(code).digest() != check:
            return None
        return pickle.loads(code)  # noqa: S301 - numba's own form; whoever writes here runs code

    def save(self, key: tuple[Any, ...], data: Any) -> None:
        """Save ``data`` for ``key`` and delete this function's oldest files.

        Raises:
            OSError: the disk is full or read only.
        """
        from numba.core.serialize import dumps

        path, code = self.path(key), dumps(data)
        written = path.with_name(f"{path.name}.tmp.{uuid.uuid4().hex[:16]}")
        try:
            written.write_bytes(hashlib.sha256(code).digest() + code)
            written.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                written.unlink()
            raise
        self._drop_oldest()

    def flush(self) -> None:
        """Do nothing: other versions of the source have other file names."""

    def _drop_oldest(self) -> None:
        times = dict[Path, float]()
        for path in self._folder.glob(f"{self._name}-*"):
            with contextlib.suppress(OSError):  # another process may delete it first
                times[path] = path.stat().st_mtime
        for path in sorted(times, key=times.__getitem__)[:-KEPT]:
            with contextlib.suppress(OSError):
                path.unlink()


def _or_none(call: Callable[..., Any], *errors: type[Exception]) -> Callable[..., Any]:
    def call_or_none(*arguments: Any) -> Any:
        with contextlib.suppress(*errors):
            return call(*arguments)
        return None

    return call_or_none


@functools.cache
def _versions() -> tuple[str, ...]:
    import numba

    options = (f"{name}={getattr(numba.config, name, None)}" for name in OPTIONS)
    return (sys.version, numba.__version__, version("llvmlite"), np.__version__, *options)


@functools.cache
def _digest_of_file(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:  # from a zip or exec: the code object is digested anyway
        return ""


def _of_code(code: CodeType) -> Iterator[str]:
    """The running code, not the file: an upgrade may have replaced the file since the import."""
    constants = [value for value in code.co_consts if not isinstance(value, CodeType)]
    yield repr((code.co_firstlineno, code.co_code.hex(), code.co_names, constants))
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _of_code(value)


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names(value)


def _of_globals(code: CodeType, namespace: dict[str, Any]) -> Iterator[str]:
    """Values that numba compiles in from a module's globals and from the modules it names."""
    names = dict.fromkeys(_names(code))
    pending, seen = [namespace], set[int]()
    while pending:
        module = pending.pop()
        seen.add(id(module))
        for name in names:
            if (value := module.get(name)) is None:
                continue
            yield from getattr(value, "sources", ())
            if isinstance(value, ModuleType) and id(vars(value)) not in seen:
                pending.append(vars(value))
            elif (constant := _constant(value)) is not None:
                yield f"{name} {constant}"


def _constant(value: Any) -> str | None:
    """Text that identifies what numba compiles in from ``value``; None if nothing."""
    if isinstance(value, np.ndarray):
        return repr((value.dtype.descr, value.shape, hashlib.sha256(value.tobytes()).hexdigest()))
    if isinstance(value, tuple):
        return f"{type(value).__name__}{getattr(value, '_fields', ())}" + repr(
            [_constant(item) for item in value]
        )
    if isinstance(value, type):
        if issubclass(value, enum.Enum):
            return repr([*value])
        return repr(getattr(value, "_fields", None))
    if isinstance(value, np.dtype):
        return repr(value)
    plain = (bool, int, float, complex, str, bytes, np.generic)
    return repr(value) if isinstance(value, plain) else None


def of_type(kind: Any) -> Any:
    """A numba type, with the record fields that a named tuple's type name omits."""
    parts = [of_type(part) for part in getattr(kind, "types", ())]
    return (str(kind), repr(getattr(kind, "fields", None)), parts)

"""Machine code that numba keeps on disk between processes: one file for each signature.

numba itself keeps an index and numbered data files, whose names depend on neither source nor
processor. Of two releases or two kinds of host that share a folder, one then runs the other's code
under its own index. Here a file's name is a digest of all that the code depends on, and a file is
replaced as a whole: a name that is found holds the code that belongs to it.
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
"""Files of one function at most, the oldest go: each edit of a source makes new names."""
OPTIONS: Final = ("OPT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT")
"""Of numba's own, those that change the code which it makes."""
_CHECK: Final = 32


def dependencies(function: Any) -> set[str]:
    """What the machine code of a Python function depends on: its file, its code, the constants and
    the fields that it takes from other modules, and the ``sources`` of the functions that it calls.
    """
    code = function.__code__
    cells = dict[str, Any]()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet: the function itself
            cells[name] = cell.cell_contents
    held = function.__globals__ | cells
    return {_digest_of_file(code.co_filename), *_of_code(code), *_of_globals(code, held)}


def attach(dispatcher: Any, sources: set[str]) -> None:
    """Let the functions of numba's dispatcher be kept in files named by ``sources``.

    A file that is torn counts as none; a disk that is full or read only keeps nothing. Neither
    raises.
    """
    cache = dispatcher._cache
    cache._cache_file = CodeFiles(Path(cache.cache_path), dispatcher.py_func, sources)
    cache.load_overload = _or_none(cache.load_overload, Exception)  # whatever unpickling raises
    cache.save_overload = _or_none(cache.save_overload, OSError)


class CodeFiles:
    """What numba's ``IndexDataCacheFile`` does, without an index: ``load``, ``save``, ``flush``."""

    def __init__(self, folder: Path, function: Any, sources: set[str]) -> None:
        name = f"{Path(function.__code__.co_filename).stem}.{function.__qualname__}"
        self._name = name.replace("<", "").replace(">", "")
        self._folder, self._sources = folder, sorted(sources)

    def path(self, key: tuple[Any, ...]) -> Path:
        """The file of numba's ``key``: the signature, the processor's name and features, digests of
        byte code and closure."""
        signature, *rest = key
        held = repr((_versions(), self._sources, [*map(of_type, signature)], rest))
        return self._folder / f"{self._name}-{hashlib.sha256(held.encode()).hexdigest()[:32]}.nbc"

    def load(self, key: tuple[Any, ...]) -> Any:
        """What was saved for ``key``; None where nothing whole was.

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
        """Keep ``data`` for ``key``, and of this function's files the newest.

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
        """Nothing: what another version of the source left has another name."""

    def _drop_oldest(self) -> None:
        held = dict[Path, float]()
        for path in self._folder.glob(f"{self._name}-*"):
            with contextlib.suppress(OSError):  # another process drops, too
                held[path] = path.stat().st_mtime
        for path in sorted(held, key=held.__getitem__)[:-KEPT]:
            with contextlib.suppress(OSError):
                path.unlink()


def _or_none(call: Callable[..., Any], *errors: type[Exception]) -> Callable[..., Any]:
    def tried(*arguments: Any) -> Any:
        with contextlib.suppress(*errors):
            return call(*arguments)
        return None

    return tried


@functools.cache
def _versions() -> tuple[str, ...]:
    import numba

    options = (f"{name}={getattr(numba.config, name, None)}" for name in OPTIONS)
    return (sys.version, numba.__version__, version("llvmlite"), np.__version__, *options)


@functools.cache
def _digest_of_file(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:  # of a zip or an exec: the code itself is there
        return ""


def _of_code(code: CodeType) -> Iterator[str]:
    """The code that runs, not the file: an upgrade may have replaced that since the import."""
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


def _of_globals(code: CodeType, held: dict[str, Any]) -> Iterator[str]:
    """What numba compiles in of a module's globals, and of those of modules that it names."""
    names = dict.fromkeys(_names(code))
    waiting, seen = [held], set[int]()
    while waiting:
        room = waiting.pop()
        seen.add(id(room))
        for name in names:
            if (value := room.get(name)) is None:
                continue
            yield from getattr(value, "sources", ())
            if isinstance(value, ModuleType) and id(vars(value)) not in seen:
                waiting.append(vars(value))
            elif (constant := _constant(value)) is not None:
                yield f"{name} {constant}"


def _constant(value: Any) -> str | None:
    """A text that differs where what numba compiles in of ``value`` does; None: nothing is."""
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
    """A numba type, with the fields that the name of a named tuple leaves out."""
    parts = [of_type(part) for part in getattr(kind, "types", ())]
    return (str(kind), repr(getattr(kind, "fields", None)), parts)

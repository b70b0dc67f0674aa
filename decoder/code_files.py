"""Content-addressed on-disk cache for numba's machine code: one file per signature.

numba's own cache has an index and numbered data files, whose names depend on neither source nor
processor. If two releases or two kinds of host share a folder, one can run the other's code. Here
the file name is a digest of everything the code depends on, and files are replaced atomically: a
file always holds the code its name stands for.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import pickle
import sys
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

KEPT: Final = 64
"""Maximum files per function; the oldest are deleted. Each source edit makes new names."""
OPTIONS: Final = ("OPT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT")
"""numba options that change the generated code."""
_CHECK: Final = 32


def sources(module: str) -> list[str]:
    """Digests of the sources of ``module`` and of all modules of its package and of this one that
    it imports, directly or not: whatever numba compiles in is defined there. Sorted."""
    top = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    rooms = Path(__file__).parent, Path(top or __file__).parent
    pending, digests = [module], dict[str, str]()
    while pending:
        name = pending.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if name not in digests and file and any(map(Path(file).is_relative_to, rooms)):
            digests[name], imported = _source_of(file)
            pending += imported
    return sorted(digests.values())


@functools.cache
def _source_of(file: str) -> tuple[str, list[str]]:
    """Digest of a source file, and the names of what it imports at its top level."""
    try:
        text = Path(file).read_bytes()
        statements = ast.parse(text).body
    except (OSError, SyntaxError, ValueError):  # from a zip, or without source
        return "", []  # numba's key has the byte code
    imported = list[str]()
    for node in statements:
        if isinstance(node, ast.Import):
            imported += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            of = node.module or ""
            imported += [of, *(f"{of}.{name.name}" for name in node.names)]
    return hashlib.sha256(text).hexdigest(), imported


def attach(dispatcher: Any) -> None:
    """Keep the code of numba's dispatcher in files named by what it depends on.

    A torn file counts as missing. A full or read-only disk stores nothing. Neither raises.
    """
    cache = dispatcher._cache
    cache._cache_file = CodeFiles(Path(cache.cache_path), dispatcher.py_func)
    cache.load_overload = _or_none(cache.load_overload, Exception)  # whatever unpickling raises
    cache.save_overload = _or_none(cache.save_overload, OSError)


class CodeFiles:
    """numba's ``IndexDataCacheFile`` without an index: ``load``, ``save`` and ``flush``."""

    def __init__(self, folder: Path, function: Any) -> None:
        name = f"{Path(function.__code__.co_filename).stem}.{function.__qualname__}"
        self._name = name.replace("<", "").replace(">", "")
        self._folder, self._sources = folder, sources(function.__module__)

    def path(self, key: tuple[Any, ...]) -> Path:
        """The file for numba's ``key``: signature, processor name and features, digests of byte
        code and closure."""
        signature, *rest = key
        text = repr((_versions(), self._sources, [*map(_of_type, signature)], rest))
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


def _of_type(kind: Any) -> Any:
    """A numba type, with the record fields that a named tuple's type name omits."""
    parts = [_of_type(part) for part in getattr(kind, "types", ())]
    return (str(kind), repr(getattr(kind, "fields", None)), parts)

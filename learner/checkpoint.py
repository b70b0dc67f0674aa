"""Stores the learner's state and the offsets it stands for, in one transaction.

A tree is stored as safetensors: arrays, and a header with the JSON of the rest, in which each array
is named where it belongs, and a digest over both. A dataclass is written as its fields, and
:func:`made` again by their annotations. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, TypeAdapter
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from decoder.contracts.bundle import metadata_of
from decoder.contracts.features import SCHEMA_ID

FORMAT: Final = f"hvd.learner.v10-{SCHEMA_ID.rpartition('-')[2]}"
"""Of other features, nothing that was learned is to be gone on from."""
Tree = dict[str, Any]
"""What is stored: what JSON knows, arrays, dataclasses and models; it is read back without
the last two, and in the same order."""
Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class OtherFormat(ValueError):
    """A whole tree of another release, or of another topic; says of which."""


class Damaged(OSError):
    """What lies there is no store."""


class Store:
    """Trees by name and number in one SQLite file. What is put is in force at :meth:`commit`, all
    at once; until then this connection alone sees it, and a kill undoes it.

    A tree may say how many events it has learned from, which is read without the tree. Every method
    raises OSError where the disk refuses, and its kind Damaged where the file is none of SQLite's.
    """

    def __init__(self, path: Path) -> None:
        with _as_os_error():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "temp_store=MEMORY"):
                self._db.execute(f"PRAGMA {pragma}")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS trees (name TEXT, number INTEGER, "
                "learned INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (name, number))"
            )
            if (found := self._read("PRAGMA quick_check(1)")) != [("ok",)]:
                raise sqlite3.DatabaseError(str(found))

    def put(self, name: str, tree: Tree, number: int = 0, learned: int = 0) -> int:
        """Put ``tree`` in the place of what is there; its bytes."""
        data = pack(tree)
        self._write("INSERT OR REPLACE INTO trees VALUES (?, ?, ?, ?)", name, number, learned, data)
        return len(data)

    def drop(self, name: str, below: int = 2**62) -> None:
        """Drop the trees of ``name`` with numbers below that."""
        self._write("DELETE FROM trees WHERE name = ? AND number < ?", name, below)

    def get(self, name: str, below: int = 1) -> list[Tree]:
        """The trees of ``name`` with numbers below that, in their order; raises as :func:`unpack`
        where one is damaged."""
        asked = "SELECT data FROM trees WHERE name = ? AND number < ? ORDER BY number"
        return [unpack(data) for (data,) in self._read(asked, name, below)]

    def learned(self, name: str) -> int:
        """What tree ``name`` says; 0 where there is none."""
        return sum(n for (n,) in self._read("SELECT learned FROM trees WHERE name = ?", name))

    def commit(self) -> None:
        """Let what was put be in force; on the disk when this returns."""
        self._end("COMMIT")

    def rollback(self) -> None:
        """Undo what was put since the last commit."""
        self._end("ROLLBACK")

    def close(self) -> None:
        """Leave the file; what is not committed is undone."""
        self._db.close()

    def _end(self, how: str) -> None:
        with _as_os_error():
            if self._db.in_transaction:
                self._db.execute(how)

    def _write(self, statement: str, *values: object) -> None:
        with _as_os_error():
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(statement, values)

    def _read(self, statement: str, *values: object) -> list[Any]:
        with _as_os_error():
            return self._db.execute(statement, values).fetchall()


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise OSError(str(error)) from error
    except sqlite3.Error as error:
        raise Damaged(str(error)) from error


def pack(tree: Tree) -> bytes:
    """``tree`` as bytes."""
    arrays: Arrays = {}
    mark = secrets.token_hex(8)  # a bundle's provenance may hold any word that is known before

    def encode(value: Any) -> Any:
        """What JSON has no word for."""
        if isinstance(value, np.generic):
            return value.item()
        if is_dataclass(value):
            return {each.name: getattr(value, each.name) for each in fields(value)}
        if isinstance(value, BaseModel):
            return value.model_dump()
        if not isinstance(value, np.ndarray | array):
            raise TypeError(f"{value!r} is nothing that is stored")
        name = str(len(arrays))
        arrays[name] = np.ascontiguousarray(value)
        return {mark: name}

    state = json.dumps({"format": FORMAT, **tree}, default=encode)
    return save_arrays(
        arrays, metadata={"state": state, "digest": _digest(arrays, state), "mark": mark}
    )


def unpack(data: bytes) -> Tree:
    """The reverse, with arrays that may be written to.

    Raises:
        OtherFormat: another release has stored it.
        SafetensorError, ValueError, KeyError, TypeError: it is damaged.
    """
    arrays = load_arrays(data)
    metadata = metadata_of(data)
    if metadata["digest"] != _digest(arrays, metadata["state"]):
        raise ValueError("its digest does not match")
    mark = metadata.get("mark", "mark")  # older releases had none

    def decode(value: dict[str, Any]) -> Any:
        return arrays[value[mark]].copy() if value.keys() == {mark} else value

    tree: Tree = json.loads(metadata["state"], object_hook=decode)
    if (of := tree.pop("format")) != FORMAT:
        raise OtherFormat(of)
    return tree


def made(kind: Callable[..., T], tree: object) -> T:
    """What was written as ``tree``.

    Raises:
        ValueError: it is not of this version.
    """
    value: T = _reader(kind).validate_python([tree])[0]
    return value


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    # in a list, since a dataclass by itself lets nobody say that it holds arrays
    return TypeAdapter(list[kind], config=ConfigDict(arbitrary_types_allowed=True))


def _digest(arrays: Arrays, state: str) -> str:
    sha = hashlib.sha256(state.encode())
    for name in sorted(arrays):
        sha.update(f"{name}{arrays[name].dtype}{arrays[name].shape}".encode())
        sha.update(arrays[name].tobytes())
    return sha.hexdigest()

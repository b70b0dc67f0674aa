"""Transactional store of the learner's state.

A tree is serialised as safetensors: arrays, and a header with the rest as JSON, references to the
arrays, and a digest. Dataclasses are stored as their fields and restored by their annotations, with
pydantic. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
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
"""With other features, nothing learned can be continued."""
Tree = dict[str, Any]
"""JSON values, arrays, dataclasses and models; read back without the last two."""
Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class OtherFormat(ValueError):
    """An intact tree of another release or topic, which the message names."""


class Damaged(OSError):
    """The file is no SQLite database, or a damaged one."""


class Store:
    """Trees by name and number in one SQLite file, written in transactions.

    A tree's number of learned events can be read without the tree. Methods raise OSError for disk
    errors, and Damaged for a damaged file.
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
            if (result := self._read("PRAGMA quick_check(1)")) != [("ok",)]:
                raise sqlite3.DatabaseError(str(result))

    def put(self, name: str, tree: Tree, number: int = 0, learned: int = 0) -> int:
        """Insert or replace a tree; its size in bytes."""
        data = pack(tree)
        self._write("INSERT OR REPLACE INTO trees VALUES (?, ?, ?, ?)", name, number, learned, data)
        return len(data)

    def drop(self, name: str, below: int = 2**62) -> None:
        """Delete trees of ``name`` with numbers below ``below``."""
        self._write("DELETE FROM trees WHERE name = ? AND number < ?", name, below)

    def get(self, name: str, below: int = 1) -> list[Tree]:
        """Trees of ``name`` with numbers below ``below``, in order; raises as :func:`unpack`."""
        query = "SELECT data FROM trees WHERE name = ? AND number < ? ORDER BY number"
        return [unpack(data) for (data,) in self._read(query, name, below)]

    def learned(self, name: str) -> int:
        """Events that tree ``name`` has learned from; 0 if there is none."""
        return sum(n for (n,) in self._read("SELECT learned FROM trees WHERE name = ?", name))

    def commit(self) -> None:
        """Commit the transaction; it is on the disk when this returns."""
        self._end("COMMIT")

    def rollback(self) -> None:
        """Undo everything since the last commit."""
        self._end("ROLLBACK")

    def close(self) -> None:
        """Close the file without a commit."""
        self._db.close()

    def _end(self, statement: str) -> None:
        with _as_os_error():
            if self._db.in_transaction:
                self._db.execute(statement)

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
    """Serialise ``tree``."""
    arrays: Arrays = {}
    mark = secrets.token_hex(8)  # random, since a bundle's provenance may hold any key

    def encode(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if is_dataclass(value) and not isinstance(value, type):
            adapter = _adapter(type(value))
            return adapter.dump_python([value], by_alias=True, warnings=False)[0]
        if isinstance(value, BaseModel):
            return value.model_dump()
        if not isinstance(value, np.ndarray | array):
            raise TypeError(f"{value!r} cannot be stored")
        name = str(len(arrays))
        arrays[name] = np.ascontiguousarray(value)
        return {mark: name}

    state = json.dumps({"format": FORMAT, **tree}, default=encode)
    return save_arrays(
        arrays, metadata={"state": state, "digest": _digest(arrays, state), "mark": mark}
    )


def unpack(data: bytes) -> Tree:
    """Deserialise a tree; its arrays are writable.

    Raises:
        OtherFormat: another release has written it.
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
    if (other := tree.pop("format")) != FORMAT:
        raise OtherFormat(other)
    return tree


def restore(kind: Callable[..., T], tree: object) -> T:
    """Restore a value of type ``kind``.

    Raises:
        ValueError: the tree is of another version.
    """
    value: T = _adapter(kind).validate_python([tree])[0]
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # a dataclass by itself cannot be configured to hold arrays; a list of it can
    return TypeAdapter(list[kind], config=ConfigDict(arbitrary_types_allowed=True))


def _digest(arrays: Arrays, state: str) -> str:
    sha = hashlib.sha256(state.encode())
    for name in sorted(arrays):
        sha.update(f"{name}{arrays[name].dtype}{arrays[name].shape}".encode())
        sha.update(arrays[name].tobytes())
    return sha.hexdigest()

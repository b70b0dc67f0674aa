"""The learner's state and the offsets it stands for, saved in one atomic write.

A file is safetensors: arrays, and a header with the JSON of the rest, in which each array is named
where it belongs, and a digest over both. A dataclass is written as its fields, and :func:`made`
again by their annotations. Scopes have files of their own (``learner.scopes``), which the
checkpoint names: so what did not change is not written again, and all of it is in force at once.
The previous checkpoint is kept. No pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
from array import array
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from decoder.contracts.bundle import metadata_of
from decoder.contracts.features import SCHEMA_ID

log = logging.getLogger(__name__)

FORMAT: Final = f"hvd.learner.v9-{SCHEMA_ID.rpartition('-')[2]}"
"""Of other features, nothing that was learned is to be gone on from."""
Tree = dict[str, Any]
"""What is put into a file: what JSON knows, arrays, dataclasses and models; it is read back without
the last two, and in the same order."""
Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class OtherFormat(ValueError):
    """A whole file of another release; says of which format."""


def previous_of(path: Path) -> Path:
    """Where the checkpoint before the one at ``path`` is kept."""
    return path.with_suffix(path.suffix + ".previous")


def save(path: Path, tree: Tree) -> int:
    """Replace the checkpoint at ``path``; at every instant a whole one lies there or beside it.

    Returns:
        the bytes written.

    Raises:
        OSError: the disk refuses; what :func:`load` finds is as it was.
    """
    return write(path, tree, previous_of(path))


def write(path: Path, tree: Tree, before: Path | None = None) -> int:
    """Put one file at ``path``, whole or not at all, and on the disk when this returns; its bytes.
    What was there goes to ``before``, if that is named.

    Raises:
        OSError: the disk refuses; what was there is as it was.
    """
    data = pack(tree)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(path.suffix + ".tmp")
    try:
        with written.open("wb") as file:
            size = file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if before is not None and path.exists():
            path.replace(before)
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)  # a part of a file would keep a full disk full
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return size


def load(path: Path) -> Tree | None:
    """The newest sound checkpoint at ``path`` or beside it; None when there is none.

    A damaged file is reported and moved aside to ``*.damaged``, so that the next save does not
    replace the sound previous one by it.

    Raises:
        OtherFormat: another release has saved it.
    """
    for candidate in (path, previous_of(path)):
        if not candidate.exists():
            continue
        try:
            return read(candidate)
        except OtherFormat:
            raise
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            log.error("checkpoint %s is damaged (%s); trying the one before it", candidate, error)
            with contextlib.suppress(OSError):
                candidate.replace(candidate.with_suffix(".damaged"))
    return None


def read(path: Path) -> Tree:
    """The file at ``path``.

    Raises:
        OSError, SafetensorError, ValueError, KeyError, TypeError: it is not there, or damaged.
    """
    return unpack(path.read_bytes())


def pack(tree: Tree) -> bytes:
    """``tree`` as a file holds it."""
    arrays: Arrays = {}
    mark = secrets.token_hex(8)  # a bundle's provenance may hold any word that is known before

    def told(value: Any) -> Any:
        """What JSON has no word for."""
        if isinstance(value, np.generic):
            return value.item()
        if is_dataclass(value):
            return {each.name: getattr(value, each.name) for each in fields(value)}
        if isinstance(value, BaseModel):
            return value.model_dump()
        if not isinstance(value, np.ndarray | array):
            raise TypeError(f"{value!r} is nothing that a checkpoint holds")
        name = str(len(arrays))
        arrays[name] = np.ascontiguousarray(value)
        return {mark: name}

    state = json.dumps({"format": FORMAT, **tree}, default=told)
    return save_arrays(
        arrays, metadata={"state": state, "digest": _digest(arrays, state), "mark": mark}
    )


def unpack(data: bytes) -> Tree:
    """The reverse, with arrays that may be written to; raises as :func:`read`."""
    arrays = load_arrays(data)
    metadata = metadata_of(data)
    if metadata["digest"] != _digest(arrays, metadata["state"]):
        raise ValueError("its digest does not match")
    mark = metadata.get("mark", "mark")  # older releases had none

    def heard(value: dict[str, Any]) -> Any:
        return arrays[value[mark]].copy() if value.keys() == {mark} else value

    tree: Tree = json.loads(metadata["state"], object_hook=heard)
    if (of := tree.pop("format")) != FORMAT:
        raise OtherFormat(of)
    return tree


def made(kind: Callable[..., T], told: object) -> T:
    """What was written as ``told``.

    Raises:
        ValueError: it is not of this version.
    """
    found: T = _reader(kind).validate_python([told])[0]
    return found


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

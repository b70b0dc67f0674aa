"""The learner's state and the offsets it stands for, saved in one atomic write.

A file is safetensors: arrays, and a header with the JSON-able rest, in which each array is named
where it belongs, and a digest over both. Scopes have files of their own (``learner.scopes``), which
the checkpoint names: so what did not change is not written again, and all of it is in force at
once. The previous checkpoint is kept. No pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from decoder.contracts.bundle import metadata_of

log = logging.getLogger(__name__)

FORMAT: Final = "hvd.learner.v7"
ARRAY: Final = "an array"
"""Stands, with its name, for an array; no key of ours or of anybody's scope has a space."""

Tree = dict[str, Any]
"""What a part of the learner puts into a file: JSON-able values, and arrays in it or in such
dictionaries in it."""
Arrays = dict[str, NDArray[Any]]


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
    arrays: Arrays = {}
    state = json.dumps({"format": FORMAT, **_parted(tree, "", arrays)}, sort_keys=True)
    metadata = {"state": state, "digest": _digest(arrays, state)}
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(path.suffix + ".tmp")
    try:
        with written.open("wb") as file:
            size = file.write(save_arrays(arrays, metadata=metadata))
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
    """
    for candidate in (path, previous_of(path)):
        if not candidate.exists():
            continue
        try:
            return read(candidate)
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
    data = path.read_bytes()
    arrays = load_arrays(data)
    metadata = metadata_of(data)
    if metadata["digest"] != _digest(arrays, metadata["state"]):
        raise ValueError("its digest does not match")
    told = json.loads(metadata["state"])
    if told.pop("format") != FORMAT:
        raise ValueError(f"not of format {FORMAT}")
    tree: Tree = _whole(told, arrays)
    return tree


def _parted(value: Any, name: str, arrays: Arrays) -> Any:
    """``value`` without its arrays, which are put under their names. Mutates ``arrays``."""
    if isinstance(value, np.ndarray):
        arrays[name] = np.ascontiguousarray(value)
        return {ARRAY: name}
    if isinstance(value, dict):
        return {key: _parted(each, f"{name}.{key}", arrays) for key, each in value.items()}
    return value


def _whole(value: Any, arrays: Arrays) -> Any:
    """The reverse."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {ARRAY}:
        return arrays[value[ARRAY]]
    return {key: _whole(each, arrays) for key, each in value.items()}


def _digest(arrays: Arrays, state: str) -> str:
    sha = hashlib.sha256(state.encode())
    for name in sorted(arrays):
        sha.update(f"{name}{arrays[name].dtype}{arrays[name].shape}".encode())
        sha.update(arrays[name].tobytes())
    return sha.hexdigest()

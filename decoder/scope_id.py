"""The scope of a policy: the target, drafter and feature schema that it was learned for.

A payoff learned on one model says nothing about another, and another drafter changes the best
decision. A worker therefore accepts policies of its own scope only.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from decoder.contracts.errors import ModelError
from decoder.contracts.features import SCHEMA_ID

CHUNKS = 64
CHUNK_BYTES = 65_536
"""Weights are sampled at 64 evenly spaced offsets: that distinguishes checkpoints, and is fast at
16 GB."""


def checkpoint_digest(path: Path) -> str:
    """Digest of the weights in a checkpoint directory; ignores file metadata and configuration.

    Raises:
        ModelError: the directory holds no safetensors file.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"no *.safetensors in {path}: give a Hugging Face checkpoint directory.")
    sha = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            begin = 8 + int.from_bytes(stream.read(8), "little")
            length = file.stat().st_size - begin
            sha.update(length.to_bytes(8, "little"))
            for chunk in range(CHUNKS):
                stream.seek(begin + length * chunk // CHUNKS)
                sha.update(stream.read(CHUNK_BYTES))
    return sha.hexdigest()


def _identity(model: str, revision: str | None) -> str:
    path = Path(model)
    if path.is_dir():
        return checkpoint_digest(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return checkpoint_digest(
            Path(snapshot_download(model, revision=revision, local_files_only=True))
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, ModelError):
        return f"{model}@{revision or 'main'}"  # weights that are not safetensors files on disk


def readable(model: str) -> str:
    """What a person calls a model: the last part of its hub name or directory, at most 64 letters,
    digits, dots, dashes and underscores."""
    path = Path(model)
    if path.parent.name == "snapshots":  # the hub's cache: models--owner--name/snapshots/<commit>
        path = Path(path.parents[1].name.rpartition("--")[2])
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.name)[:64]


def scope_of(target: str, drafter: str | None, revision: str | None = None) -> str:
    """Scope id of a target and drafter, each a local directory or a hub name."""
    parts = [_identity(target, revision), _identity(drafter, None) if drafter else "", SCHEMA_ID]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

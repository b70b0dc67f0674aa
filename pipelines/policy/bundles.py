"""Policy bundles in files that a person names."""

from __future__ import annotations

from pathlib import Path

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import ModelError
from decoder.policy.probes import from_bytes


def load_policy(path: Path, scope: str | None = None) -> Policy:
    """The bundle in ``path``, made for ``scope``, or whatever scope it was made for.

    Raises:
        ModelError: the file cannot be read.
        PolicyRefused: it is damaged, or made for other features, or another scope.
    """
    try:
        return from_bytes(path.read_bytes(), scope)
    except OSError as error:
        raise ModelError(f"policy {path} cannot be read: {error.strerror or error}.") from error

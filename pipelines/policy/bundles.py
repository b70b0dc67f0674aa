"""Policy bundles in files that a person names, and what tells one from another."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from decoder.contracts.bundle import Policy, pack
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


def digest_of(policy: Policy) -> str:
    """Of all that a bundle holds, but for what its maker saw the network say."""
    return hashlib.sha256(pack(policy, np.zeros(len(policy.probe_inputs), np.float32))).hexdigest()

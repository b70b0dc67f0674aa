"""The policy that comes with the project: what any scope serves from its first request on.

It names no target and no drafter, only the feature schema; ``docs/first-policy.md`` says what it
was made of and how it does on texts that it has not seen.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.errors import PolicyRefused
from decoder.policy.probes import from_bytes

SHIPPED: Final = Path(__file__).with_name("first.safetensors")


def first_policy(scope: str) -> Policy:
    """The first policy, of version 0, as one of ``scope``. Its file is read once.

    Raises:
        PolicyRefused: the file is missing, damaged, or of other features than this version's.
    """
    return replace(read_first(SHIPPED), scope=scope)


@cache
def read_first(path: Path) -> Policy:
    """The bundle in ``path``, which must be for any scope.

    Raises:
        PolicyRefused: as :func:`first_policy`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PolicyRefused("missing", f"no first policy at {path}: {error.strerror}") from error
    return from_bytes(data, ANY_SCOPE)

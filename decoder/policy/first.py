"""The policy that comes with the project: what any scope serves from its first request on.

It names no target and no drafter, only the feature schema; ``docs/learning.md`` says what it
was made of and how it does on texts that it has not seen.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from decoder.contracts.bundle import ANY_SCOPE, FIRST, Policy, frequency_policy
from decoder.contracts.errors import PolicyRefused
from decoder.policy.probes import from_bytes

log = logging.getLogger(__name__)

SHIPPED: Final = Path(__file__).with_name("first.safetensors")


def first_policy(scope: str) -> Policy:
    """The first policy, of version 0, as one of ``scope``. Its file is read once.

    Raises:
        PolicyRefused: the file is missing, damaged, or of other features than this version's.
    """
    return replace(read_first(SHIPPED), scope=scope)


def first_or_counting(scope: str) -> Policy:
    """The first policy of ``scope``; counting, which needs no file, where that is unusable."""
    try:
        return first_policy(scope)
    except PolicyRefused as refused:
        _say(str(refused))
        return replace(frequency_policy(scope), role=FIRST)


@cache
def _say(reason: str) -> None:
    """Once a process: a learner asks for every scope."""
    log.warning("cache drafts are judged by their counted score at first: %s", reason)


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

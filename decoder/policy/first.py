"""The shipped policy, which every scope serves from its first request on.

It depends on the feature schema, not on a target or drafter. ``docs/learning.md`` describes its
training data and its results on held-out text.
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
    """:func:`read_first` of the shipped file, for ``scope``."""
    return replace(read_first(SHIPPED), scope=scope)


def first_or_counting(scope: str) -> Policy:
    """The first policy for ``scope``; the frequency policy, which needs no file, if unusable."""
    try:
        return first_policy(scope)
    except PolicyRefused as refused:
        _warn_once(str(refused))
        return replace(frequency_policy(scope), role=FIRST)


@cache
def _warn_once(reason: str) -> None:
    """Log once per process: a learner asks for every scope."""
    log.warning("the shipped policy is unusable, counted scores decide at first: %s", reason)


@cache
def read_first(path: Path) -> Policy:
    """The first policy, version 0, in ``path``, for any scope.

    Raises:
        PolicyRefused: the file is missing, damaged, or made for another feature schema.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PolicyRefused("missing", f"no first policy at {path}: {error.strerror}") from error
    return from_bytes(data, ANY_SCOPE)

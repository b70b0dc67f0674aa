"""Compiled functions compute what their source says, wherever it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decoder.compiled import REAL, compiled


def test_a_function_that_can_be_kept_nowhere_is_compiled_all_the_same() -> None:
    """numba keeps nothing of a source without a file, as of one in a place that is read only."""
    made: dict[str, Callable[..., Any]] = {}
    exec("def plus(a, b):\n    return a + b", made)
    assert compiled((REAL, REAL))(made["plus"])(1.5, 2.0) == 3.5

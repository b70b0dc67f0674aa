"""Imports that warn about what they import themselves, which is theirs to mend."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import kafka  # noqa: F401

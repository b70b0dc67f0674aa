"""What the plugin does for the engines it is loaded into, done for those that tests make."""

from __future__ import annotations

import pytest
from vllm.config import speculative


@pytest.fixture(scope="session", autouse=True)
def without_trees() -> None:
    """Method ``suffix`` asks for no package of suffix trees."""
    speculative.has_arctic_inference = lambda: True

"""A mock cluster for each test: it starts in a hundredth of a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import swept
from tests.learner.conftest import empty_store  # noqa: F401
from tests.mock_cluster.cluster import MockCluster, running


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    """Two brokers; of each topic two partitions, led by one of them each."""
    with running(brokers=2, partitions=2) as started:
        yield started
    swept()  # here, and not in somebody else's test

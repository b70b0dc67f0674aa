"""Survival is the product of the chances not to break off; costs grow with tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.contracts.bundle import BUCKET_ENDS, BUCKETS
from decoder.contracts.features import FloatArray
from decoder.policy.estimate import survival
from decoder.policy.loops import yields_of_places
from decoder.policy.pricing import CostTable

logits = st.lists(st.floats(-8, 8, width=32), min_size=BUCKETS, max_size=BUCKETS)


def naive_survival(logits: FloatArray, length: int) -> list[float]:
    """The definition, one position at a time."""
    alive, curve = 1.0, []
    for position in range(1, length + 1):
        bucket = sum(position > end for end in BUCKET_ENDS)
        alive *= 1.0 - 1.0 / (1.0 + float(np.exp(-np.float64(logits[bucket]))))
        curve.append(alive)
    return curve


@given(logits, st.integers(1, 512))
def test_survival_is_the_running_product_of_its_definition(values: list[float], n: int) -> None:
    (curve,) = survival(np.array([values], np.float32), np.array([n]))
    assert np.allclose(curve, naive_survival(np.array(values), n), atol=1e-5)
    assert (np.diff(curve) <= 0).all()


@given(st.floats(0.001, 0.999), st.integers(1, 8))
def test_a_chain_yields_a_geometric_sum(chance: float, k: int) -> None:
    yields = yields_of_places(np.full(k, np.log(chance / (1 - chance))), k)
    assert yields[-1] == pytest.approx(sum(chance**j for j in range(1, k + 1)), rel=1e-5)


@pytest.mark.parametrize(
    ("tokens", "times"),
    [((2, 4), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1, 2), (1.0, np.nan)), ((1, 2), (0.0, 1.0))],
)
def test_a_table_that_makes_no_sense_is_refused(tokens: tuple, times: tuple) -> None:
    with pytest.raises(ValueError, match="cost table"):
        CostTable("t", tokens, times)

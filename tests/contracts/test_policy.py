"""A policy bundle survives the wire exactly, or is refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from decoder.contracts.bundle import _metadata, frequency_policy
from decoder.contracts.errors import PolicyRefused
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.policy.estimate import Estimate, decide_each, predict
from decoder.policy.pricing import NOMINAL
from decoder.policy.probes import from_bytes, to_bytes
from decoder.policy.rule import CACHE, MODEL, NONE, Situation
from tests.conftest import random_policy


def refusal_of(data: bytes, scope: str | None = "scope") -> str:
    with pytest.raises(PolicyRefused) as refused:
        from_bytes(data, scope)
    return refused.value.reason


def test_round_trip_keeps_every_prediction() -> None:
    policy = random_policy()
    again = from_bytes(to_bytes(policy), "scope")
    x = np.random.default_rng(1).random((50, NUM_FEATURES)).astype(np.float32) * 10
    assert np.array_equal(predict(policy, x), predict(again, x))
    assert (again.version, again.threshold, again.kind) == (1, 1.5, "payoff")


def test_a_bundle_is_a_few_hundred_kilobytes() -> None:
    assert 200_000 < len(to_bytes(random_policy())) < 500_000


def test_frequency_policy_round_trips_without_layers() -> None:
    assert from_bytes(to_bytes(frequency_policy("scope")), "scope").kind == "frequency"


@given(position=st.integers(0, 2**31), flip=st.integers(1, 255))
def test_any_flipped_byte_is_refused(position: int, flip: int) -> None:
    data = bytearray(_BUNDLE)
    data[position % len(data)] ^= flip
    with pytest.raises(PolicyRefused):
        from_bytes(bytes(data), "scope")


_BUNDLE = to_bytes(random_policy())


@given(st.integers(0, len(_BUNDLE) - 1))
def test_any_truncation_is_refused(length: int) -> None:
    assert refusal_of(_BUNDLE[:length]) == "malformed"


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert refusal_of(data) == "malformed"


def test_other_scope_and_other_schema_are_refused() -> None:
    assert refusal_of(to_bytes(random_policy()), "other") == "scope"
    assert refusal_of(to_bytes(replace(random_policy(), schema_id="old"))) == "schema"


def test_nan_weights_and_zero_spread_are_refused() -> None:
    policy = random_policy()
    weight = policy.layers[0][0].copy()
    weight[0, 0] = np.nan
    poisoned = replace(policy, layers=((weight, policy.layers[0][1]), *policy.layers[1:]))
    assert refusal_of(to_bytes(poisoned)) == "nonfinite"
    flat = replace(policy, std=np.zeros(NUM_FEATURES, np.float32), probe_inputs=np.zeros(
        (0, NUM_FEATURES), np.float32))  # fmt: skip
    assert refusal_of(to_bytes(flat)) == "nonfinite"


def test_layers_that_do_not_chain_are_refused() -> None:
    policy = random_policy()
    broken = replace(policy, layers=policy.layers[:1], probe_inputs=policy.probe_inputs[:0])
    assert refusal_of(to_bytes(broken)) == "shape"


def test_probes_that_come_out_otherwise_are_refused() -> None:
    data = to_bytes(random_policy())
    arrays, metadata = load(data), _metadata(data)
    arrays["probe_outputs"] = arrays["probe_outputs"] + 1
    from decoder.contracts.bundle import _digest

    metadata["digest"] = _digest(arrays, metadata["policy"])
    assert refusal_of(save(arrays, metadata=metadata)) == "probe"


def test_prediction_stays_within_the_draft() -> None:
    x = np.random.default_rng(2).normal(size=(200, NUM_FEATURES)).astype(np.float32) * 50
    lengths = np.abs(x[:, FEATURES.index("draft_len")])
    x[:, FEATURES.index("draft_len")] = lengths
    predicted = predict(random_policy(), x)
    assert (predicted >= 0).all() and (predicted <= lengths).all()


@given(st.lists(st.floats(0, 64, width=32), min_size=1), st.booleans(), st.booleans())
def test_decision_is_the_threshold_rule(
    predicted: list[float], has_model: bool, use_model: bool
) -> None:
    policy = replace(random_policy(), threshold=6.0, use_model=use_model)
    values, n = np.array(predicted, np.float32), len(predicted)
    lengths = np.full(n, 64, np.int32)
    situation = Situation(NOMINAL, 4 if has_model else 0)
    found = Estimate(values, lengths, np.zeros(n, np.float32))
    choice = decide_each(policy, found, situation, np.ones(n, np.int64))
    otherwise = MODEL if has_model and use_model else NONE
    assert list(choice.arms) == [CACHE if p >= 6.0 else otherwise for p in predicted]

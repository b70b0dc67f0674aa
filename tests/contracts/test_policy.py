"""A policy bundle survives the wire exactly, or is refused with a reason."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from decoder.contracts.bundle import ANY_SCOPE, TRIAL, _digest, frequency_policy, metadata_of
from decoder.contracts.errors import MAX_CHARACTERS, PolicyRefused
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.policy.estimate import Estimate, predict
from decoder.policy.pricing import NOMINAL
from decoder.policy.probes import from_bytes, to_bytes
from decoder.policy.rule import CACHE, MODEL, NONE
from learner.evaluation.independent import Situation, decide_each
from tests.conftest import random_policy
from tests.contracts.test_events import ANYTHING

_BUNDLE = to_bytes(random_policy())
HELD = load(_BUNDLE)


def refusal_of(data: bytes, scope: str | None = "scope") -> str:
    with pytest.raises(PolicyRefused) as refused:
        from_bytes(data, scope)
    return refused.value.reason


def test_round_trip_keeps_every_prediction() -> None:
    policy = replace(random_policy(), publication=7, role="trial")
    data = to_bytes(policy)
    again = from_bytes(data, "scope")
    assert 200_000 < len(data) < 500_000 and (again.publication, again.role) == (7, "trial")
    assert from_bytes(to_bytes(frequency_policy("scope")), "scope").kind == "frequency"
    assert from_bytes(rewritten({"version": 9})).version == 9, "refused for what is changed alone"
    x = np.random.default_rng(1).random((50, NUM_FEATURES)).astype(np.float32) * 10
    assert np.array_equal(predict(policy, x), predict(again, x))
    assert (again.version, again.threshold, again.kind) == (1, 1.5, "payoff")


@given(position=st.integers(0, 2**31), flip=st.integers(1, 255))
def test_any_flipped_byte_is_refused(position: int, flip: int) -> None:
    data = bytearray(_BUNDLE)
    data[position % len(data)] ^= flip
    with pytest.raises(PolicyRefused):
        from_bytes(bytes(data), "scope")


@given(st.integers(0, len(_BUNDLE) - 1))
def test_any_truncation_is_refused(length: int) -> None:
    assert refusal_of(_BUNDLE[:length]) == "malformed"


def test_other_scope_and_other_schema_are_refused() -> None:
    assert refusal_of(to_bytes(random_policy()), "other") == "scope"
    assert refusal_of(to_bytes(replace(random_policy(), schema_id="old"))) == "schema"


def test_a_first_policy_for_any_scope_is_for_every_one() -> None:
    general = replace(random_policy(scope=ANY_SCOPE), role="first")
    for scope in (None, "scope", "other"):
        assert from_bytes(to_bytes(general), scope).scope == ANY_SCOPE
    for role in ("champion", "trial"):
        assert refusal_of(to_bytes(replace(general, role=role))) == "scope"
    assert refusal_of(to_bytes(replace(general, scope="scope")), "other") == "scope"


def rewritten(header: dict[str, Any] | str, **arrays: np.ndarray) -> bytes:
    """The bundle with some of its header and arrays replaced and a digest that is right."""
    metadata, held = metadata_of(_BUNDLE), {**HELD, **arrays}
    if isinstance(header, dict):
        header = json.dumps({**json.loads(metadata["policy"]), **header})
    return save(held, metadata={"policy": header, "digest": _digest(held, header)})


DEEP = 100_000


HEADERS: dict[str, list[dict[str, Any] | str]] = {
    "malformed": [
        {"contract": "hvd.policy.v1"}, "[" * DEEP + "]" * DEEP, "[]", "9" * 10_000,
        '{"contract":' * DEEP + "1" + "}" * DEEP, {"provenance": [1]},
        {"provenance": {"note": "x" * 100_000}},
        {"provenance": {"a": json.loads("[" * 30 + "]" * 30)}}, {"version": 10**400},
        {"version": -1}, {"version": True}, {"version": 1.5}, {"publication": 2**60},
        {"scope": ["scope"]}, {"scope": "x" * 10_000}, {"role": None}, {"kind": "oracle"},
        {"kind": "frequency"}, {"use_model": "false"}, {"threshold": "6"},
    ],
    "nonfinite": [
        {"threshold": 10**400}, {"threshold": float("inf")}, {"threshold": float("nan")},
        {"model_payoff": float("nan")},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("header", "reason"), [(each, why) for why, headers in HEADERS.items() for each in headers]
)
def test_a_header_of_another_hand_is_refused(header: dict[str, Any] | str, reason: str) -> None:
    assert refusal_of(rewritten(header)) == reason


def with_draft_of(length: float) -> dict[str, np.ndarray]:
    inputs = HELD["probe_inputs"].copy()
    inputs[0, FEATURES.index("draft_len")] = length
    return {"probe_inputs": inputs}


ARRAYS: dict[str, list[dict[str, np.ndarray]]] = {
    "dtype": [
        {name: HELD[name].astype(kind)} for kind in (np.float64, np.float16, np.int32)
        for name in ("mean", "layers.0.weight", "probe_inputs", "probe_outputs")
    ] + [{"more": np.zeros(3)}],
    "probe": [
        {"probe_inputs": HELD["probe_inputs"][:0], "probe_outputs": HELD["mean"][:0]},
        {"probe_outputs": HELD["probe_outputs"] + 1}, *map(with_draft_of, (-1.0, 1e9, 600.0)),
        # finite weights may still predict what is no number, from which nothing differs too much
        {"layers.0.weight": np.full_like(HELD["layers.0.weight"], 3e38)},
    ],
    "shape": [
        {"probe_outputs": np.zeros(shape, np.float32)} for shape in (3, (16, 1))
    ],
    "nonfinite": [{"layers.0.weight": HELD["layers.0.weight"] * np.nan}, {"std": HELD["std"] * 0}],
}  # fmt: skip


@pytest.mark.parametrize("reason", ARRAYS)
def test_arrays_of_another_hand_are_refused(reason: str) -> None:
    for arrays in ARRAYS[reason]:
        assert refusal_of(rewritten({}, **arrays)) == reason, arrays.keys()


def test_a_refusal_is_short_however_long_the_names_in_a_bundle_are() -> None:
    with pytest.raises(PolicyRefused) as refused:
        from_bytes(rewritten({}, **{"://a" * 500_000: np.zeros(1)}), "scope")
    assert refused.value.reason == "dtype" and len(str(refused.value)) <= MAX_CHARACTERS


@given(
    st.dictionaries(st.sampled_from(sorted(json.loads(metadata_of(_BUNDLE)["policy"]))), ANYTHING)
)
def test_a_mutated_header_is_read_or_refused(header: dict[str, Any]) -> None:
    with contextlib.suppress(PolicyRefused):
        to_bytes(from_bytes(rewritten(header)))


@given(
    name=st.sampled_from(sorted(HELD)),
    shape=st.lists(st.integers(0, 70), max_size=3),
    value=st.floats(width=32),
)
def test_a_mutated_array_is_read_or_refused(name: str, shape: list[int], value: float) -> None:
    with contextlib.suppress(PolicyRefused):
        from_bytes(rewritten({}, **{name: np.full(shape, value, np.float32)}))


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
    found, model = Estimate(values, lengths), np.zeros(n, np.float32)
    choice = decide_each(policy, found, model, situation, np.ones(n, np.int64), 2.0)
    otherwise = MODEL if has_model and use_model else NONE
    assert list(choice.arms) == [CACHE if p >= 6.0 else otherwise for p in predicted]


def test_the_same_choices_are_the_same_policy_whatever_it_is_called() -> None:
    """Kind, parameter and weights make it; the normaliser counts as part of the weights."""
    one = random_policy(seed=1)
    again = replace(
        one, version=7, scope="t", publication=3, role=TRIAL, share=0.5, provenance={"a": 1}
    )
    assert again.with_probes(one.probe_inputs[:1]).digest == one.digest
    others = [
        random_policy(seed=2), replace(one, threshold=3.0), replace(one, use_model=False),
        replace(one, mean=one.mean + 1), frequency_policy("s"), frequency_policy("s", 3.0),
    ]  # fmt: skip
    assert len({each.digest for each in (one, *others)}) == 1 + len(others)
    rate = random_policy(seed=1, kind="survival")
    assert replace(rate, threshold=9.0).digest == rate.digest, "a rate decides, and no threshold"
    assert from_bytes(to_bytes(one)).digest == one.digest

"""A signature is good for its record alone: for no other key of the topic, value, or secret."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.contracts.errors import SettingsError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.signature import is_genuine, signed

SECRET = "0123456789abcdef"
VALUES = st.none() | st.binary(max_size=40)


def record(key: bytes | None, value: bytes | None, headers: object) -> SimpleNamespace:
    return SimpleNamespace(key=key, value=value, headers=headers)


@given(st.binary(max_size=20), VALUES)
def test_what_was_signed_is_genuine_under_the_same_secret_alone(key: bytes, value) -> None:  # type: ignore[no-untyped-def]
    made = record(key, value, [("schema", b"hvd.policy.v2"), *signed(SECRET, key, value)])
    assert is_genuine(SECRET, made)
    assert not is_genuine(SECRET + "x", made)


@given(st.binary(max_size=6), VALUES, st.binary(max_size=6), VALUES)
def test_a_signature_is_good_for_nothing_else(key: bytes, value, other: bytes, another) -> None:  # type: ignore[no-untyped-def]
    moved = record(other, another, signed(SECRET, key, value))
    assert is_genuine(SECRET, moved) == ((key, value) == (other, another))


@given(st.lists(st.tuples(st.sampled_from(["signature", "schema"]), VALUES), max_size=3))
def test_made_up_headers_prove_nothing(headers: list[tuple[str, bytes | None]]) -> None:
    assert not is_genuine(SECRET, record(b"a/champion", b"bundle", headers))


def test_one_signature_of_several_is_none() -> None:
    (good,) = signed(SECRET, b"k", b"v")
    assert not is_genuine(SECRET, record(b"k", b"v", [good, ("signature", b"0" * 64)]))
    assert not is_genuine(SECRET, record(None, None, None))


def test_without_a_secret_nothing_is_signed_and_everything_taken() -> None:
    assert signed("", b"k", b"v") == []
    assert is_genuine("", record(b"k", b"v", []))


def test_a_short_key_is_refused_and_none_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_KAFKA_POLICY_KEY", "letmein")
    with pytest.raises(SettingsError, match="take at least 16") as refused:
        KafkaSettings.load()
    assert "letmein" not in str(refused.value)
    monkeypatch.setenv("HVD_KAFKA_POLICY_KEY", SECRET)
    assert SECRET not in repr(KafkaSettings.load())
    assert "policy_key" not in KafkaSettings.load().client_options()

"""Whatever a variable holds, a process begins with it or says in one short sentence why not."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.contracts.errors import PolicyRefused, SettingsError
from decoder.contracts.settings import KafkaSettings, Settings
from decoder.settings import WorkerSettings
from decoder.tenancy.key import key_of
from decoder.worker import initial_policy
from learner.settings import LearnerSettings

CLASSES: tuple[type[Settings], ...] = (KafkaSettings, WorkerSettings, LearnerSettings)
NAMES = [
    (each, f"{each.model_config['env_prefix']}{name}".upper())
    for each in CLASSES
    for name in each.model_fields
]
HOSTILE = (
    "", " ", "-1", "0", "1e400", "nan", "-inf", "9" * 5000, "a" * 100_000, "[]", "{}", "[" * 10_000,
    "null", "true", "tcp://10.0.0.1:80", "/dev/null/x", "../" * 2000, "\x01\x7f", "\n\n", "💥",
    "\udcff", "%s%n", "${HOME}", ",,,", ":", "a:b:c", "http://[::1", "'; drop", "1" * 17,
)  # fmt: skip
OF_OTHERS = {name for _, name in NAMES} | {"HVD_CPU_FLAGS", "HVD_SECRETS_DIR"}
LONGEST = 600
"""Characters of what is said: some lines of a terminal."""


def tried(kind: type[Settings], name: str, value: str) -> None:
    """Load ``kind`` with one variable set; a refusal names it."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(name, value)
        try:
            loaded = kind.load()
        except SettingsError as refused:
            said = str(refused)
            assert name in said or name.rsplit("_", 1)[0] in said
            assert said.isprintable() and len(said) <= LONGEST, said[:LONGEST]
            return
    if isinstance(loaded, WorkerSettings):
        usable(loaded)


def usable(loaded: WorkerSettings) -> None:
    """What a worker does first with its settings refuses in a sentence, too."""
    try:
        key_of(loaded)
        initial_policy(loaded, "scope")
    except (SettingsError, PolicyRefused) as refused:
        assert str(refused)


@pytest.mark.parametrize(("kind", "name"), NAMES, ids=str)
def test_a_hostile_value_is_taken_or_refused_in_a_sentence(kind: type[Settings], name: str) -> None:
    for value in HOSTILE:
        tried(kind, name, value)


@given(
    st.sampled_from(NAMES),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50)
    | st.integers().map(str)
    | st.floats().map(str)
    | st.recursive(st.just("0"), lambda inner: inner.map("[{}]".format), max_leaves=5),
)
def test_any_value_is_taken_or_refused_in_a_sentence(named: tuple[type[Settings], str], value: str):  # type: ignore[no-untyped-def]
    tried(*named, value)


@given(st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1))
def test_any_unknown_name_is_refused_in_a_sentence(rest: str) -> None:
    for prefix in ("HVD_", "HVD_KAFKA_", "HVD_WORKER_"):
        name = f"{prefix}{rest}"
        if name in os.environ or name in OF_OTHERS or name.startswith("HVD_LEARNER_"):
            continue
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(name, "1")
            try:
                WorkerSettings.load()
            except SettingsError as refused:
                assert str(refused).isprintable()
            else:
                assert prefix == "HVD_KAFKA_", f"{name!r} was taken, and is of no other process"


def test_a_secret_that_is_no_text_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_KAFKA_SASL_PLAIN_PASSWORD", "hunter\udcff2")
    with pytest.raises(
        SettingsError, match="HVD_KAFKA_SASL_PLAIN_PASSWORD is not valid UTF-8"
    ) as refused:
        KafkaSettings.load()
    assert "hunter" not in str(refused.value)

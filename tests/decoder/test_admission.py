"""A bundle is in force after every check or not at all; what was in force stays."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.admission import Admission, check_pace
from decoder.contracts.bundle import (
    ANY_SCOPE,
    LAST_PUBLICATION,
    LEAP,
    OUTPUTS,
    Kind,
    Policy,
)
from decoder.contracts.errors import PolicyRefused
from decoder.contracts.features import NUM_FEATURES
from decoder.policy.probes import to_bytes
from decoder.settings import WorkerSettings
from decoder.worker import initial_policy
from tests.conftest import random_policy


def policy_of(kind: Kind, *hidden: int) -> Policy:
    rng, widths = np.random.default_rng(0), (NUM_FEATURES, *hidden, OUTPUTS[kind])
    layers = tuple(
        (rng.normal(size=s).astype(np.float32) / s[0], np.zeros(s[1], np.float32))
        for s in pairwise(widths)
    )
    return replace(random_policy(), kind=kind, layers=layers)


def test_good_bundles_are_applied() -> None:
    applied: list[Policy] = []
    desk = Admission("scope", applied.append)
    for version in (1, 2, 1):  # a rollback is a swap like any other
        assert desk.offer(to_bytes(random_policy(version, version=version)))
    assert [p.version for p in applied] == [1, 2, 1]
    assert desk.swaps == 3 and desk.swap_ms_max > 0 and desk.applied_at > 0


def test_bad_bundles_are_counted_by_reason_and_change_nothing() -> None:
    applied: list[Policy] = []
    desk = Admission("scope", applied.append)
    good = to_bytes(random_policy())
    desk.offer(good)
    for bad in (b"", b"junk" * 100, good[:-5], to_bytes(random_policy(scope="elsewhere"))):
        assert not desk.offer(bad)
    assert not desk.offer(good, role="trial")
    assert len(applied) == 1 and desk.current is applied[0]
    assert desk.refusals == {"malformed": 3, "scope": 1, "role": 1}


def test_whoever_floods_the_topic_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    desk = Admission("scope", lambda policy: None)
    for _ in range(50):
        desk.offer(b"junk")
        desk.offer(to_bytes(random_policy(scope="elsewhere")))
    assert desk.refusals == {"malformed": 50, "scope": 50}
    assert [word in caplog.text for word in ("malformed", "scope")] == [True, True]
    assert caplog.text.count("policy bundle refused") == 2


def test_an_older_publication_is_passed_over() -> None:
    applied: list[Policy] = []
    desk = Admission("scope", applied.append)
    for version, publication in ((1, 4), (2, 3), (1, 4), (3, 6), (2, 5)):
        desk.offer(to_bytes(replace(random_policy(version=version), publication=publication)))
    assert [p.publication for p in applied] == [4, 6]
    assert desk.ignored == {"older": 2} and not desk.refusals


def test_a_number_that_leaps_leaves_room_for_the_next() -> None:
    applied: list[Policy] = []
    desk = Admission("scope", applied.append)
    for publication in (LAST_PUBLICATION, 7_000_001, 7_000_001 + LEAP + 1, 8_000_001):
        desk.offer(to_bytes(replace(random_policy(), publication=publication)))
    assert [p.publication for p in applied] == [7_000_001, 8_000_001]
    assert desk.ignored == {"leap": 2}


def first(version: int, publication: int, scope: str = ANY_SCOPE) -> bytes:
    policy = random_policy(version=version, scope=scope)
    return to_bytes(replace(policy, role="first", publication=publication))


def test_a_first_policy_serves_until_there_is_a_champion_and_is_held_from_then_on() -> None:
    applied: list[Policy] = []
    shipped = replace(random_policy(version=0), role="first")
    desk = Admission("scope", applied.append, shipped)
    assert desk.offer(first(3, publication=5), "first")
    assert desk.current is applied[0]
    champion = replace(random_policy(version=1), publication=2)  # numbered apart from firsts
    assert desk.offer(to_bytes(champion))
    assert desk.offer(first(4, publication=6), "first")
    assert [(p.version, p.role) for p in applied] == [(3, "first"), (1, "champion")]
    assert {p.scope for p in applied} == {"scope"} and desk.held["first"].version == 4


def test_counting_that_was_asked_for_gives_way_to_no_first_policy() -> None:
    applied: list[Policy] = []
    start = initial_policy(WorkerSettings(start="counting"), "scope")
    desk = Admission("scope", applied.append, start)
    assert start.kind == "frequency"
    assert desk.offer(first(1, publication=1), "first")
    assert desk.offer(first(2, publication=2, scope="scope"), "first")
    assert desk.current is start and not applied and desk.held["first"].version == 2
    assert desk.offer(to_bytes(replace(random_policy(version=3), publication=1)))
    assert [p.version for p in applied] == [3]


@pytest.mark.parametrize("role", ["champion", "trial"])
def test_nothing_but_a_first_policy_is_for_any_scope(role: str) -> None:
    desk = Admission("scope", lambda _: None)
    bundle = replace(random_policy(scope=ANY_SCOPE), role=role, publication=1)
    assert not desk.offer(to_bytes(bundle), role)
    assert desk.refusals == {"scope": 1} and not desk.held


def test_a_scope_s_own_first_policy_goes_before_the_one_for_any() -> None:
    applied: list[Policy] = []
    desk = Admission("scope", applied.append)
    assert desk.offer(first(1, publication=7), "first")
    assert desk.offer(first(2, publication=1, scope="scope"), "first")
    assert not desk.offer(first(3, publication=8), "first")
    assert not desk.offer(first(4, publication=1, scope="elsewhere"), "first")
    assert [p.version for p in applied] == [1, 2] and desk.held["first"].version == 2
    assert desk.ignored == {"any": 1} and desk.refusals == {"scope": 1}


def test_a_router_that_cannot_take_a_policy_ends_no_thread() -> None:
    def apply(policy: Policy) -> None:
        raise RuntimeError("not now")

    desk = Admission("scope", apply)
    assert not desk.offer(to_bytes(random_policy()))
    assert desk.refusals == {"error": 1} and desk.current is None


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200), st.text(max_size=5))
def test_no_bytes_raise(data: bytes, role: str) -> None:
    assert not Admission("scope", lambda _: None).offer(data, role)


def test_a_policy_that_is_too_slow_is_refused_and_says_what_to_do() -> None:
    applied: list[Policy] = []
    desk = Admission("scope", applied.append)
    assert desk.offer(to_bytes(random_policy()))
    assert not desk.offer(to_bytes(policy_of("survival", 700, 700)))
    assert desk.refusals == {"slow": 1} and len(applied) == 1
    with pytest.raises(PolicyRefused, match="make its network smaller"):
        check_pace(policy_of("survival", 700, 700))

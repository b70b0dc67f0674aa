"""A bundle is in force after every check or not at all; what was in force stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.admission import Admission, check_size
from decoder.contracts.bundle import ANY_SCOPE, LAST_PUBLICATION, LEAP, Policy
from decoder.contracts.errors import PolicyRefused
from decoder.policy.probes import to_bytes
from decoder.settings import WorkerSettings
from decoder.worker import initial_policy
from tests.conftest import random_policy


def test_good_bundles_are_applied_and_bad_ones_counted_by_reason_and_said_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    applied: list[Policy] = []
    desk = Admission("scope", applied.append)
    for version in (1, 2, 1):  # a rollback is a swap like any other
        good = to_bytes(random_policy(version, version=version))
        assert desk.offer(good)
    bad = b"", b"junk" * 100, good[:-5], to_bytes(random_policy(scope="elsewhere"))
    for each in bad * 20:
        assert not desk.offer(each)
    assert not desk.offer(good, role="trial")
    assert [p.version for p in applied] == [1, 2, 1] and desk.current is applied[-1]
    assert desk.swaps == 3 and desk.swap_ms_max > 0 and desk.applied_at > 0
    assert desk.refusals == {"malformed": 60, "scope": 20, "role": 1}
    assert caplog.text.count("policy bundle refused") == 3, "a flood does not fill the log"


@pytest.mark.parametrize(
    ("came", "taken", "ignored"),
    [
        ((4, 3, 4, 6, 5), [4, 6], {"older": 2}),
        # a number that leaps leaves room for the next
        ((LAST_PUBLICATION, 7_000_001, 7_000_002 + LEAP, 8_000_001), [7_000_001, 8_000_001],
         {"leap": 2}),
    ],
)  # fmt: skip
def test_an_older_publication_is_passed_over(
    came: tuple[int, ...], taken: list[int], ignored: dict[str, int]
) -> None:
    applied: list[Policy] = []
    desk = Admission("scope", applied.append)
    for publication in came:
        desk.offer(to_bytes(replace(random_policy(), publication=publication)))
    assert [p.publication for p in applied] == taken
    assert desk.ignored == ignored and not desk.refusals


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
    slow = random_policy(kind="survival", hidden=(700, 700))
    assert not desk.offer(to_bytes(slow))
    assert desk.refusals == {"slow": 1} and len(applied) == 1
    with pytest.raises(PolicyRefused, match="make its network smaller"):
        check_size(slow)

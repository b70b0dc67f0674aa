"""What is handed over waits for MLflow and for the scope, and a person's word is looked up last."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from decoder.contracts.errors import RegistryError
from learner.release import registrar
from learner.release.registrar import Registrar
from learner.release.registrations import (
    MoveRequest,
    MoveResult,
    Registered,
    Registration,
    move_aliases,
)
from learner.release.registry import ARTIFACT, Registry, digest_of
from tests.conftest import random_policy, until
from tests.learner.stage import WARNINGS, answers_until, client_of, settled

pytestmark = WARNINGS

FIRST, WINNER = (random_policy(seed=seed, scope="ab12", version=0) for seed in (0, 1))
MINE: set[str] = set()


@pytest.fixture
def desk(registry: Registry) -> Iterator[Registrar]:
    MINE.clear()
    MINE.add("ab12")
    made = Registrar(registry, MINE.__contains__)
    yield made
    made.close()


def test_registrations_wait_for_the_lease(desk: Registrar) -> None:
    MINE.clear()
    desk.submit(Registration(FIRST))
    desk.start()
    time.sleep(0.2)
    assert not [a for a in desk.answers() if isinstance(a, Registered)]
    assert [each.policy for each in desk.pending()] == [FIRST]
    MINE.add("ab12")
    answers_until(desk, bool)


def test_candidates_wait_while_a_version_is_pinned(desk: Registrar, registry: Registry) -> None:
    first = registry.register(FIRST)
    registry.move("ab12", "champion", first)
    name = registry.alias_state("ab12").name
    client_of(registry).set_registered_model_alias(name, "pinned", str(first))
    desk.start()
    for seed in (1, 2, 3):
        desk.submit(Registration(random_policy(seed, "ab12"), against=digest_of(FIRST)))
        time.sleep(0.3)
    assert len(registry.versions("ab12")) == 1 and len(desk.pending()) == 1
    client_of(registry).delete_registered_model_alias(name, "pinned")
    done = settled(desk)
    assert (done.version, done.refusal) == (2, "")


def test_a_return_of_the_first_policy_waits_for_no_trial(registry: Registry) -> None:
    MINE.add("ab12")
    first, worse = registry.register(FIRST), registry.register(WINNER)
    registry.move("ab12", "champion", worse)
    desk = Registrar(registry, MINE.__contains__, busy=lambda scope: True, trial=True)
    desk.start()
    try:
        back = Registration(FIRST, against=digest_of(WINNER), params={"learner": "first"})
        desk.submit(Registration(random_policy(7, "ab12"), against=digest_of(WINNER)))
        desk.submit(back)
        assert settled(desk) == Registered(first, "")
        assert registry.alias_state("ab12").champion == first
    finally:
        desk.close()


def test_a_damaged_champion_does_not_block_promotion(
    desk: Registrar, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = registry.register(random_policy(5, "ab12"))
    registry.move("ab12", "champion", damaged)
    held = client_of(registry).get_model_version(registry.alias_state("ab12").name, str(damaged))
    bundle = Path(str(held.source).removeprefix("file://")) / ARTIFACT
    bundle.write_bytes(b"spoilt")
    desk.request([("ab12", damaged)])
    desk.start()
    until(lambda: "is unusable" in caplog.text)
    desk.submit(Registration(WINNER, against=digest_of(FIRST)))
    done = settled(desk)
    assert (done.version, done.refusal) == (2, "")
    assert caplog.text.count("is unusable") == 1


def test_a_temporarily_unreadable_champion_stays(
    desk: Registrar, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = registry.register(random_policy(5, "ab12"))
    registry.move("ab12", "champion", other)
    load, away = registry.load, iter([RegistryError("the artefact's server does not answer")])

    def loaded(*asked: Any) -> Any:
        for error in away:
            desk.submit(Registration(WINNER, against=digest_of(FIRST)))
            raise error
        return load(*asked)

    monkeypatch.setattr(registry, "load", loaded)
    desk.request([("ab12", other)])
    desk.start()
    found = answers_until(desk, lambda found: len(found) >= 2)  # it is loaded, too, maybe twice
    (settled,) = (each for each in found if isinstance(each, Registered))
    assert "was made champion" in settled.refusal and settled.version is None
    assert registry.alias_state("ab12").champion == other and len(registry.versions("ab12")) == 1
    assert desk.given_up["person"] == 1


def test_unreadable_policies_are_dropped(
    desk: Registrar, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.move("ab12", "champion", registry.register(FIRST))
    desk.submit(Registration(replace(WINNER, threshold=float("nan")), against=digest_of(FIRST)))
    desk.start()
    until(lambda: not desk.pending())
    assert len(registry.versions("ab12")) == 1 and "a candidate is given up" in caplog.text


def test_pending_moves_are_not_lost(desk: Registrar) -> None:
    MINE.clear()
    for number in range(300):
        desk.move(MoveRequest(f"s{number}", "learner", "why", {}))
    desk.start()
    moved = answers_until(desk, lambda found: len(found) == 300)
    assert {one.request.scope for one in moved if isinstance(one, MoveResult)} == {
        f"s{number}" for number in range(300)
    }


@pytest.mark.parametrize(
    "failure", [RegistryError("no such name is allowed"), KeyError("a bug"), AssertionError()]
)
def test_refused_registrations_do_not_block_others(
    desk: Registrar, registry: Registry, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(registrar, "MAX_TRIES", 4)
    monkeypatch.setattr(registrar, "MAX_PAUSE_SECONDS", 0.0)
    tried: Counter[str] = Counter()
    through = registry.register

    def refuse(policy: object, *args: object) -> Any:
        if policy is WINNER or isinstance(policy, Registry):
            tried["winner" if policy is WINNER else "move"] += 1
            raise failure
        return through(policy, *args)  # type: ignore[arg-type]

    MINE.add("cd34")
    registry.move("ab12", "champion", through(FIRST))
    with monkeypatch.context() as refusing:
        refusing.setattr(registry, "register", refuse)
        refusing.setattr(registrar, "move_aliases", refuse)
        desk.submit(Registration(WINNER, against=digest_of(FIRST)))
        desk.submit(Registration(random_policy(3, "cd34", 0), against="x"))
        desk.move(MoveRequest("ab12", "learner", "why", {}, over=1, to=2))
        desk.start()
        until(lambda: desk.given_up["refused"] == 2)
        assert tried["move"] == 4 <= tried["winner"]
        found = answers_until(desk, lambda found: any(isinstance(one, MoveResult) for one in found))
        assert all(one.refusal for one in found if isinstance(one, MoveResult)), (
            "none without a word is done"
        )
        assert WINNER in [each.policy for each in desk.pending()], "what has won is not lost"
    answers_until(desk, lambda found: any(isinstance(a, Registered) and a.version for a in found))


def test_refused_writes_keep_registrations_pending_and_log_once(
    desk: Registrar,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A learner hands over the first policies of all its scopes each second."""
    monkeypatch.setattr(registrar, "MAX_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(registrar, "MAX_TRIES", 3)
    scopes = [f"s{number}" for number in range(registrar.MAX_PENDING + 20)]
    MINE.update(scopes)
    registry.move("ab12", "champion", registry.register(FIRST))
    tried: Counter[str] = Counter()

    def refuse(policy: Any, *args: object) -> Any:
        tried[policy.scope] += 1
        raise RegistryError("PERMISSION_DENIED")

    monkeypatch.setattr(registry, "register", refuse)
    desk.submit(Registration(WINNER, against=digest_of(FIRST)))
    desk.start()

    def handed_over() -> bool:
        for scope in scopes:
            desk.submit(Registration(replace(FIRST, scope=scope)))
        assert WINNER in [each.policy for each in desk.pending()]
        assert len(desk.pending()) <= registrar.MAX_PENDING
        return tried["ab12"] > 5

    until(handed_over)
    assert desk.given_up["crowded"] == 0
    assert len([r for r in caplog.records if "PERMISSION_DENIED" in r.getMessage()]) <= 2


def test_retries_of_refused_registrations_back_off(
    desk: Registrar, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def refuse(*args: object) -> Any:
        tried.append(time.monotonic())
        raise RegistryError("QUOTA_EXCEEDED")

    monkeypatch.setattr(registry, "register", refuse)
    desk.submit(Registration(FIRST))
    desk.start()
    until(lambda: len(tried) == 4)
    assert tried[3] - tried[2] >= 4 * registrar.FOLLOW_SECONDS


def test_a_failed_retirement_does_not_block_a_candidate(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> Any:
        raise RegistryError("AccessDenied on DeleteObject")

    registry.move("ab12", "champion", registry.register(FIRST))
    monkeypatch.setattr(registry, "retire", refuse)
    desk = Registrar(registry, lambda scope: True, keep=1)
    desk.submit(Registration(WINNER, against=digest_of(FIRST)))
    desk.start()
    done = settled(desk)
    desk.close()
    assert (done.version, done.refusal) == (2, "") and registry.alias_state("ab12").champion == 2
    assert "AccessDenied" in caplog.text


def test_later_candidates_replace_earlier_ones_within_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registrar, "MAX_PENDING", 3)
    desk = Registrar(Registry("http://127.0.0.1:9"), lambda scope: True)
    for seed in (1, 2):
        desk.submit(Registration(random_policy(seed, "ab12"), against="x"))
    assert [digest_of(w.policy) for w in desk.pending()] == [digest_of(random_policy(2, "ab12"))]
    for number in range(5):
        desk.submit(Registration(random_policy(0, f"s{number}")))
    assert [w.policy.scope for w in desk.pending()] == ["ab12", "s0", "s1"], "what waits stays"
    for number in range(2, 4):
        desk.submit(Registration(random_policy(0, f"s{number}"), against="x"))
    assert [w.policy.scope for w in desk.pending()] == ["ab12", "s2", "s3"], "winners come first"
    assert not desk.given_up
    desk.submit(Registration(random_policy(0, "s4"), against="x"))
    assert [w.policy.scope for w in desk.pending()] == ["ab12", "s2", "s3"]
    assert desk.given_up == {"crowded": 1}
    assert Registrar(Registry("x"), lambda scope: True, desk.pending()).pending() == desk.pending()


@pytest.fixture
def standing(registry: Registry) -> Registry:
    """Version 1 is champion of standing."""
    for seed in range(3):
        registry.register(random_policy(seed, scope="ab12"))
    registry.move("ab12", "champion", 1)
    return registry


def move(**changes: Any) -> MoveRequest:
    return MoveRequest("ab12", "learner-a", "because", {3: {"trial": "promoted"}}, **changes)


@pytest.fixture
def trying(standing: Registry, desk: Registrar) -> Iterator[Registrar]:
    """Of version 1 of standing, who has others tried first."""
    made = Registrar(standing, MINE.__contains__, by="learner-a", trial=True)
    made.start()
    yield made
    made.close()


def settle(desk: Registrar) -> Registered:
    desk.submit(Registration(random_policy(1, "ab12"), against=digest_of(random_policy(0, "ab12"))))
    return settled(desk)


def ended(registry: Registry, **tags: str) -> None:
    """Version 2 was on trial."""
    done = {2: {"trial": "dropped", "trial_against": "1", **tags}}
    move_aliases(registry, MoveRequest("ab12", "learner-a", "slower", done, ended=2))


def test_a_candidate_is_tried_again_after_the_cooldown_or_against_another_champion(
    trying: Registrar, standing: Registry
) -> None:
    assert settle(trying).refusal == ""
    assert (standing.alias_state("ab12").trial, standing.alias_state("ab12").champion) == (2, 1)
    now = datetime.now(UTC)
    for at, against, again in (
        (now, "1", None), (now - registrar.COOLDOWN, "1", 2), (now, "3", 2), (now.max, "1", 2),
    ):  # fmt: skip
        ended(standing, trial_at=at.replace(tzinfo=UTC).isoformat(), trial_against=against)
        settle(trying)
        assert standing.alias_state("ab12").trial == again, (at, against)


def waits(desk: Registrar) -> bool:
    desk.submit(Registration(random_policy(1, "ab12"), against=digest_of(random_policy(0, "ab12"))))
    time.sleep(0.4)
    return bool(desk.pending())


def test_no_trial_during_a_person_s_or_soon_after_a_roll_back(
    trying: Registrar, standing: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, name = client_of(standing), standing.alias_state("ab12").name
    client.set_registered_model_alias(name, "trial", "3")
    assert waits(trying) and standing.alias_state("ab12").trial == 3
    standing.move("ab12", "champion", 1, "learner-b", "rolled back from version 3: slower")
    client.delete_registered_model_alias(name, "trial")
    assert waits(trying)
    monkeypatch.setattr(registrar, "COOLDOWN", timedelta(0))
    until(lambda: standing.alias_state("ab12").trial == 2)
    client.set_registered_model_alias(name, "trial", "1")  # the champion itself: nothing is tried
    waits(trying)
    until(lambda: not trying.pending() and standing.alias_state("ab12").trial == 2)


def test_a_person_s_move_is_not_recorded_as_the_learner_s(standing: Registry) -> None:
    standing.move("ab12", "champion", 3, "anna", "it looks good")
    assert not move_aliases(standing, move(over=1, to=3)).refusal
    assert {v.number: v.tags for v in standing.versions("ab12")}[3]["moved_by"] == "anna"
    standing.move("ab12", "trial", 2, "learner-a", "won")
    assert "version 3" in move_aliases(standing, move(over=1, to=2, ended=2)).refusal
    assert standing.alias_state("ab12").trial is None, (
        "or another learner's winners waited for ever"
    )


def test_a_return_to_the_first_policy_uses_its_version(standing: Registry) -> None:
    standing.move("ab12", "champion", 3)
    first = random_policy(0, scope="ab12")
    done = move_aliases(standing, move(over=3, to=2, first=first))
    assert not done.refusal and standing.alias_state("ab12").champion == 1
    standing.move("ab12", "champion", 3)
    anew = move(over=3, to=2, first=random_policy(9, scope="ab12"))
    assert not move_aliases(standing, anew).refusal, "as after an upgrade that brings another"
    assert (
        standing.alias_state("ab12").champion == 4 == standing.find(random_policy(9, scope="ab12"))
    )
    standing.move("ab12", "champion", 2)
    assert (
        "version 2" in move_aliases(standing, replace(anew, first=random_policy(8, "ab12"))).refusal
    )
    client_of(standing).delete_registered_model_alias(standing.alias_state("ab12").name, "champion")
    assert (
        "taken away"
        in move_aliases(standing, replace(anew, first=random_policy(8, "ab12"))).refusal
    )
    assert len(standing.versions("ab12")) == 4

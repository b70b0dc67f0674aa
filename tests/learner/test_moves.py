"""What the learner moves, and what it leaves to a person; with a real registry."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from decoder.contracts.errors import RegistryError
from learner.moves import Move, carry_out
from learner.registry import Registry
from tests.conftest import random_policy
from tests.learner.stage import client_of

# mlflow uses parts of sqlalchemy that are to go; that is theirs to mend
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

POINTS = [(1e9 + k, 1.0, 0.9, 1.1) for k in range(4)]


@pytest.fixture
def three(registry: Registry) -> Registry:
    """Version 1 is champion of three."""
    for seed in range(3):
        registry.register(random_policy(seed, scope="ab12"))
    registry.promote("ab12", 1)
    return registry


def move(**changes: Any) -> Move:
    return Move("ab12", "learner-a", "because", **{"tags": {3: {"trial": "running"}}, **changes})


def test_alias_trial_is_taken_from_nobody_but_itself(three: Registry) -> None:
    done = carry_out(three, move(begun=2))
    assert done.standing is not None and done.standing.trial == 2
    assert carry_out(three, move(begun=3)).standing == three.standing("ab12")
    assert three.standing("ab12").trial == 3, "what it named was its own"
    client_of(three).set_registered_model_alias(three.model_name("ab12"), "trial", "2")
    carry_out(three, move(begun=3))
    assert three.standing("ab12").trial == 2, "a person's"
    carry_out(three, move(ended=2))
    client_of(three).set_registered_model_alias(three.model_name("ab12"), "pinned", "2")
    carry_out(three, move(begun=3))
    assert three.standing("ab12").trial is None


def test_a_picture_that_cannot_be_kept_vetoes_nothing(
    three: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def attach(*_: object) -> None:
        assert three.standing("ab12").champion == 3, "first"
        raise RegistryError("no room for artefacts")

    monkeypatch.setattr(three, "attach", attach)
    with caplog.at_level(logging.ERROR):
        done = carry_out(three, move(over=1, to=3, points=POINTS))
    assert not done.refusal and done.standing is not None and done.standing.champion == 3
    tags = {v.number: v.tags for v in three.versions("ab12")}[3]
    assert (tags["moved_by"], tags["why"], tags["trial"]) == ("learner-a", "because", "running")
    assert "gets no picture" in caplog.text


def test_what_a_person_did_is_not_signed_by_the_learner(three: Registry) -> None:
    three.promote("ab12", 3, {"moved_by": "anna", "why": "it looks good"})
    assert not carry_out(three, move(over=1, to=3)).refusal
    assert {v.number: v.tags for v in three.versions("ab12")}[3]["moved_by"] == "anna"
    assert "version 3" in carry_out(three, move(over=1, to=2)).refusal


def test_the_way_back_to_the_first_policy_is_its_version(three: Registry) -> None:
    three.promote("ab12", 3)
    first = random_policy(0, scope="ab12")
    done = carry_out(three, move(over=3, to=2, first=first))
    assert not done.refusal and three.standing("ab12").champion == 1
    three.promote("ab12", 3)
    gone = carry_out(three, move(over=3, to=2, first=random_policy(9, scope="ab12")))
    assert "first policy" in gone.refusal and three.standing("ab12").champion == 3

"""The whole learner against a real broker and a real registry."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from kafka.errors import KafkaTimeoutError

from decoder.contracts.events import Origin
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.topics import DEAD, POLICY, STATUS, policy_key
from decoder.contracts.trials import SUFFIX
from decoder.kafka.compacted import Compacted
from decoder.policy.probes import from_bytes
from learner import state
from learner.loop import Learner
from learner.release.registrations import Registration
from learner.release.registry import Registry, digest_of
from learner.release.rollout import Rollout
from learner.scope import Scope
from learner.scopes import Scopes
from tests.conftest import random_policy
from tests.events import encode_events, from_events
from tests.learner.stage import WARNINGS, Stage, champion_of, client_of
from tests.learner.stream import (
    ORIGIN,
    SCOPE,
    batches,
    consume,
    produce,
    reported,
    settings_in,
    step_until,
    stop,
)
from tests.learner.traffic import Traffic

pytestmark = WARNINGS

EVENTS = Traffic(seed=9).events(80)
RECORDS = len(EVENTS) // 50


def version_of(learner: Learner) -> int:
    return learner.scopes.loaded[SCOPE].version if SCOPE in learner.scopes.loaded else 0


def total_of(learner: Learner) -> int:
    return learner.scopes.loaded[SCOPE].total if SCOPE in learner.scopes.loaded else 0


def test_a_learner_learns_promotes_publishes_and_resumes(bare: Stage) -> None:
    named = replace(ORIGIN, target="Llama-3.1", drafter="eagle3")
    plain = EVENTS[0]._replace(draft_len=0, accepted=0, label="", features=None, number=2**40)
    good = [*batches(EVENTS, origin=named), *batches([plain], origin=named, first=RECORDS + 2)]
    poison = [b"not json", b"", json.dumps({"contract": "hvd.drafts.v1"}).encode()]
    produce(bare.kafka, [*good[:7], *poison, good[3], *good[7:]])
    learner = bare.learner("off")
    step_until(learner, lambda: version_of(learner) > 1)
    step_until(learner, lambda: learner.publisher.topic.last(SCOPE) is not None)
    last = reported(bare.kafka, learner)
    stop(learner)
    scope = learner.scopes.loaded[SCOPE]
    assert scope.total == len(EVENTS) and learner.reader.refused == {"malformed": 2, "contract": 1}
    assert learner.source.offsets == {0: RECORDS + 5} and learner.source.lag() == 0
    dead = consume(bare.kafka, DEAD)
    assert [record.value for record in dead] == poison
    headers = [dict(record.headers) for record in dead]
    assert [h["__streams.errors.offset"] for h in headers] == [b"7", b"8", b"9"]
    assert {h["__streams.errors.topic"] for h in headers} == {b"hvd.drafts.v2"}
    assert all(b"refused" in h["__streams.errors.message"] for h in headers)

    assert bare.registry.alias_state(SCOPE).name == "hvd-payoff-llama-3.1-eagle3-scope01"
    made = bare.registry.versions(SCOPE)[-1]
    assert made.tags["target"] == "Llama-3.1"
    champion = champion_of(bare.registry, SCOPE)
    published = consume(bare.kafka, POLICY)
    assert champion is not None and published[-1].key == f"{SCOPE}/champion".encode()
    read = [from_bytes(record.value, SCOPE) for record in published]
    assert read[-1].version == champion.version == scope.version > 1
    assert read[-1].kind == "survival" and len(read[-1].probe_inputs)
    assert [p.publication for p in read] == sorted({p.publication for p in read})
    assert last.champion_version == read[-1].version and last.drafts_consumed == len(EVENTS)
    assert last.events_consumed == len(EVENTS) + 1
    assert (last.records_refused, last.records_missing, last.records_duplicate) == (3, 2, 1)
    assert (last.events_duplicate, last.publication) == (50, read[-1].publication)
    assert last.holds_lease and last.promotions >= 1

    again = bare.learner("off")
    assert again.source.offsets == learner.source.offsets
    produce(bare.kafka, [good[0], *batches(Traffic(seed=10).events(2), first=RECORDS + 3)])
    step_until(again, lambda: total_of(again) == len(EVENTS) + 40)
    assert again.reader.repeated == 100 and version_of(again) == read[-1].version
    step_until(again, lambda: again.lease.holds(SCOPE))
    stop(again)
    # what lies on the topic is what is served: nothing was published again
    assert len(consume(bare.kafka, POLICY)) == len(published)


def test_a_person_moves_pins_and_unpins(bare: Stage) -> None:
    for seed in (1, 2, 3):
        bare.registry.register(random_policy(seed=seed, scope=SCOPE))
    learner = bare.learner("off")

    def published() -> int:
        last = learner.publisher.topic.last(SCOPE)
        return 0 if last is None else last.version

    bare.registry.move(SCOPE, "champion", 2)
    step_until(learner, lambda: published() == 2)
    bare.registry.move(SCOPE, "champion", 1)
    step_until(learner, lambda: published() == 1)
    bare.name("pinned", 3)
    step_until(learner, lambda: published() == 3)
    bare.registry.move(SCOPE, "champion", 2)
    step_until(learner, lambda: learner.aliases[SCOPE].champion == 2)
    bare.name("pinned", None)
    step_until(learner, lambda: published() == 2)
    stop(learner)
    read = [from_bytes(r.value, SCOPE) for r in consume(bare.kafka, POLICY)]
    # A lease that lapsed on a busy machine has what is in force published once more.
    versions = [version for version, _ in groupby(policy.version for policy in read)]
    assert versions == [2, 1, 3, 2] and {p.role for p in read} == {"champion"}
    assert [p.publication - read[0].publication for p in read] == list(range(len(read)))


def test_a_roll_back_during_a_registration_wins(
    bare: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(bare.kafka, batches(EVENTS[:300]))
    bare.registry.register(random_policy(seed=5, scope=SCOPE))
    bare.registry.move(SCOPE, "champion", 1)
    other = bare.registry.register(random_policy(seed=6, scope=SCOPE))
    learner = bare.learner("off")
    step_until(learner, lambda: total_of(learner) == 300 and version_of(learner) == 1)
    through = learner.registrar._registry.register

    def moved_meanwhile(*args: object, **kwargs: object) -> int:
        version = through(*args, **kwargs)  # type: ignore[arg-type]
        bare.registry.move(SCOPE, "champion", other)  # a person, between the learner's two looks
        return version

    monkeypatch.setattr(learner.registrar._registry, "register", moved_meanwhile)
    produce(bare.kafka, batches(EVENTS[300:], first=6))
    step_until(learner, lambda: version_of(learner) == other)
    stop(learner)
    assert bare.registry.alias_states()[SCOPE].champion == other
    assert learner.scopes.loaded[SCOPE].promotions == 0
    candidate = client_of(bare.registry).get_model_version_by_alias(
        bare.registry.alias_state(SCOPE).name, "candidate"
    )
    assert int(candidate.version) > other


def test_a_kill_after_a_registration_creates_no_second_version(
    bare: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(bare.kafka, batches(EVENTS[:300]))
    learner = bare.learner("off")
    step_until(learner, lambda: total_of(learner) == 300 and version_of(learner) == 1)
    learner.checkpoint()
    produce(bare.kafka, batches(EVENTS[300:], first=6))
    monkeypatch.setattr(learner, "checkpoint", lambda: None)
    step_until(learner, lambda: version_of(learner) > 1)
    versions = bare.registry.versions(SCOPE)
    before = reported(bare.kafka, learner)
    learner.close()  # dies here, with a policy published and no checkpoint

    again = bare.learner("off")
    after = reported(bare.kafka, again)  # in a container it has the name and the number that it had
    assert after.process == before.process and after.life != before.life
    assert after.events_consumed < before.events_consumed
    assert again.scopes.get(SCOPE).total == 300
    step_until(again, lambda: total_of(again) == len(EVENTS) and version_of(again) > 1)
    step_until(again, lambda: not again.registrar.pending())
    stop(again)
    digests = [version.tags["digest"] for version in bare.registry.versions(SCOPE)]
    assert len(set(digests)) == len(digests) >= len(versions)


def test_a_candidate_survives_an_outage_of_mlflow(
    bare: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    produce(bare.kafka, batches(EVENTS))
    learner = bare.learner("off", mlflow_tracking_uri="http://127.0.0.1:9")
    step_until(learner, lambda: bool(learner.registrar.pending()) and learner.source.lag() == 0)
    step_until(learner, lambda: learner.registrar.away_since > 0)
    told = reported(bare.kafka, learner)
    stop(learner)
    assert total_of(learner) == len(EVENTS) and "127.0.0.1:9" in caplog.text
    assert told.waiting and told.registry_away_since > 0
    assert not consume(bare.kafka, POLICY)

    again = bare.learner("off")
    (won,) = again.registrar.pending()
    assert won.against and won.policy.kind == "survival"

    def is_published() -> bool:
        last = again.publisher.topic.last(SCOPE)
        return last is not None and last.version > 1

    step_until(again, is_published)
    stop(again)
    champion = champion_of(bare.registry, SCOPE)
    assert champion is not None and champion.provenance["origin"] == "learner"


def test_a_record_that_fails_training_is_counted(
    bare: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = bare.learner("off")
    produce(bare.kafka, batches(EVENTS[:200]))
    step_until(learner, lambda: total_of(learner) == 200)
    learner.checkpoint()
    feed = Scope.update

    def absurd(scope: Scope, rows: object, came: int) -> list[object]:
        feed(scope, rows)  # type: ignore[arg-type]
        if rows.draft_len[0] == 77:  # type: ignore[attr-defined]
            raise FloatingPointError("a record that nobody thought of")
        return []

    monkeypatch.setattr(Scope, "update", absurd)
    features = np.zeros_like(EVENTS[0].features)
    odd = EVENTS[0]._replace(draft_len=77, accepted=0, features=features)
    stock = [odd, *(e._replace(side=SUFFIX) for e in EVENTS[300:305])]
    produce(bare.kafka, [encode_events(stock, ORIGIN, 4), *batches(EVENTS[200:300], first=5)])
    step_until(learner, lambda: learner.source.offsets == {0: 7})
    assert learner.faults == 1 and total_of(learner) == 300
    last = reported(bare.kafka, learner)
    stop(learner)
    assert (last.events_consumed, last.losses) == (306, {"fault": 1, "side": 5})


def test_an_unreadable_registration_does_not_cost_the_checkpoint(
    tmp_path: Path, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_in(tmp_path, registry)
    scopes = Scopes(settings)
    scopes.get(SCOPE, 3)
    sound = Registration(random_policy(1, SCOPE))
    spoilt = Registration(replace(sound.policy, threshold="six"), against="x")  # type: ignore[arg-type]
    numbers = {policy_key(SCOPE, "champion"): 7_000_003}
    rollouts = {"old": Rollout(champion="five"), SCOPE: Rollout(champion=5)}  # type: ignore[arg-type]
    state.save(
        settings,
        state.State(
            scopes, waiting=[spoilt, sound], rollouts=rollouts, offsets={0: 5}, published=numbers
        ),
    )
    again = state.load(settings)
    assert again.rollouts == {SCOPE: Rollout(champion=5)}
    assert again.scopes.events[SCOPE] == 3 and again.offsets == {0: 5}
    assert [digest_of(each.policy) for each in again.waiting] == [digest_of(sound.policy)]
    assert again.published == numbers and "and dropped" in caplog.text


def test_an_unreadable_first_policy_is_replaced_by_counted_scores(
    bare: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "first.safetensors").write_bytes(b"spoilt")
    monkeypatch.setattr("decoder.policy.first.SHIPPED", tmp_path / "first.safetensors")
    produce(bare.kafka, batches(EVENTS[:200]))
    learner = bare.learner("off")
    step_until(learner, lambda: version_of(learner) == 1)
    stop(learner)
    assert bare.registry.load(SCOPE, 1).kind == "frequency"


def test_scopes_unknown_to_workers_are_skipped(bare: Stage) -> None:
    learner = bare.learner("off")
    made_up = [
        batches(EVENTS[:100], 100, Origin(f"made-up-{n}", "w", f"{n:04x}")) for n in range(40)
    ]
    produce(bare.kafka, [value for values in made_up for value in values], known=False)
    produce(bare.kafka, batches(EVENTS[:200]))
    step_until(learner, lambda: total_of(learner) == 200 and learner.source.lag() == 0)
    learner.checkpoint()
    assert learner.unknown == reported(bare.kafka, learner).events_unknown == 4_000
    assert [*learner.scopes.events] == [*learner.scopes.loaded] == [SCOPE]
    status = WorkerStatus(process="w", scope="made-up-7", time=1.0).model_dump_json().encode()
    produce(bare.kafka, [status], STATUS)
    step_until(learner, lambda: learner.statuses.is_known("made-up-7"))
    (value,) = batches(EVENTS[100:200], 100, Origin("made-up-7", "w", "0007"), 1)
    produce(bare.kafka, [value], known=False)
    step_until(learner, lambda: "made-up-7" in learner.scopes.loaded)
    assert learner.scopes.get("made-up-7").total == 100
    stop(learner)


def test_a_new_learner_waits_for_statuses_before_it_skips_scopes(
    bare: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, away = Compacted.read, [KafkaTimeoutError("not now")]

    def late(topic: Compacted, seconds: float = 0.0) -> bool:
        if topic._topic is STATUS and away:
            raise away.pop()
        return read(topic, seconds)

    monkeypatch.setattr(Compacted, "read", late)
    monkeypatch.setattr("learner.ingest.statuses.RETRY_SECONDS", 0.1)
    produce(bare.kafka, batches(EVENTS[:200]))
    learner = bare.learner("off")
    step_until(learner, lambda: learner.source.offsets == {0: 4})
    stop(learner)
    assert (total_of(learner), learner.unknown, away) == (200, 0, [])


def test_a_spare_adopts_the_holder_s_sampling_rate(bare: Stage) -> None:
    learner = bare.learner("off")
    said = LearnerStatus(process="other", scope=SCOPE, time=1.0, holds_lease=True, share=0.25)
    produce(bare.kafka, batches(EVENTS[:50]))
    step_until(learner, lambda: total_of(learner) == 50)
    produce(bare.kafka, [said.model_dump_json().encode()], STATUS)
    step_until(learner, lambda: learner.sampler.get(SCOPE) == 0.25)
    produce(bare.kafka, batches(EVENTS[50:], first=1))
    step_until(learner, lambda: total_of(learner) == len(EVENTS))
    rows = from_events(EVENTS[50:])
    few = int((rows.request < np.uint64(2**62)).sum())
    learned = learner.scopes.get(SCOPE).buffer.total + len(learner.scopes.get(SCOPE)._waiting)
    assert learned == 50 + few < len(EVENTS)
    stop(learner)
    assert state.load(learner.settings).shares == {SCOPE: 0.25}

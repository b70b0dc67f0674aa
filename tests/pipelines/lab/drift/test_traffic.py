"""Scenarios as files, and the requests they come to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decoder.contracts.errors import SettingsError, TraceError
from pipelines.lab.drift import alterations
from pipelines.lab.drift.scenario import PLAIN_US, Drafter, Machine, Scenario, Segment, chosen, read
from pipelines.lab.drift.traffic import KINDS, Library, lessons, traffic
from pipelines.lab.replay.traces import Trace
from tests.pipelines.lab.replay.samples import copying_traces, dialogue, token_classes

CLASSES = token_classes()


def library(count: int = 60) -> Library:
    def named(stem: str, traces: list[Trace]) -> list[Trace]:
        return [replace(t, session=f"{stem}/{t.session}", workload=stem) for t in traces]

    talk = [replace(t, session=f"talk{i}") for i in range(20) for t in dialogue(i)]
    sets = {"one": copying_traces(1, count), "two": copying_traces(2, count), "talk": talk}
    return Library({n: named(n, ts) for n, ts in sets.items()}, CLASSES, 4)


def scenario(*segments: Segment, history: Segment | None = None) -> Scenario:
    return Scenario(name="test", segments=segments, history=history)


def of(kind: str, generations: int = 10, **more: object) -> Segment:
    return Segment.model_validate({"kinds": (kind,), "generations": generations, **more})


def test_every_shipped_scenario_can_be_read() -> None:
    shipped = chosen([])
    assert len(shipped) == 10
    for each in shipped:
        assert each.about
        assert all(set(s.kinds) - {"alpacaeval_chat"} <= KINDS.keys() for s in each.segments)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("about = ", "is not TOML"),
        ("about = 'x'", "segments: Field required"),
        ("[[segments]]\nkinds = ['a']\ngenerations = 5\ncolour = 1", "segments.0.colour"),
        ("[[segments]]\nkinds = ['a']\ngenerations = 5\nmachine = { plain = 0 }", "machine.plain"),
        ("[[segments]]\nkinds = ['a']\ngenerations = nan", "segments.0.generations"),
    ],
)
def test_a_wrong_scenario_is_refused_in_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        read(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    path.write_bytes(b"\xff\xfe")
    for asked, told in (("rain", "no scenario 'rain'"), (str(path), "is not TOML"),
                        (f"{path}.toml", "cannot read scenario")):  # fmt: skip
        with pytest.raises(SettingsError, match=told):
            chosen([asked])


def test_the_same_seed_sends_the_same_and_another_sends_others() -> None:
    asked = scenario(of("one"), of("two", breaks=6))
    one, two, other = (traffic(asked, library(), seed) for seed in (1, 1, 2))
    for a, b in zip(one.requests, two.requests, strict=True):
        np.testing.assert_array_equal(a.trace.output, b.trace.output)
        np.testing.assert_array_equal(a.trace.model_accepted, b.trace.model_accepted)
    assert [r.trace.session for r in one.requests] != [r.trace.session for r in other.requests]


def test_no_session_comes_twice_or_is_both_trained_on_and_served() -> None:
    segments = (of("one", 12), of("two", 12), of("one", 12))
    sent = traffic(scenario(*segments), library(), 1)
    sessions = [r.trace.session for r in sent.requests]
    assert len(sessions) == len(set(sessions)) == 36
    assert sent.begins == [0, 12, 24]
    taught = {t.session for t in lessons(segments, library(), 1, 100)}
    assert taught and taught.isdisjoint(sessions)
    # recordings that end end a segment
    sent = traffic(scenario(of("one", 500), of("two", 5)), library(), 1)
    assert 10 < len(sent.requests) < 70 and sent.requests[-1].segment == 1
    with pytest.raises(TraceError, match="no recordings of kind elsewhere"):
        traffic(scenario(of("elsewhere")), library(), 1)


def test_turns_of_a_dialogue_come_in_order_among_others() -> None:
    sent = traffic(scenario(of("talk", 40)), library(), 1)
    seen: dict[str, int] = {}
    for request in sent.requests:
        size = len(request.trace.prompt)
        assert size > seen.get(request.trace.session, 0)
        seen[request.trace.session] = size
    assert len({r.trace.session for r in sent.requests[:4]}) == 4


def test_changes_are_what_differs() -> None:
    first, second = of("one"), of("one", 99, drafter={"known": 0.1, "new": 0.1})
    assert scenario(first, second).changes(1) == ["drafter"]
    assert scenario(first, second, first, second).later == (second, first)
    assert scenario(first, history=of("two")).changes(0) == ["kinds"]


def test_templates_are_repeated_with_arguments_of_their_own() -> None:
    classes = np.zeros((1_000, 6), np.float32)
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(1_000, size=50), rng.integers(1_000, size=80)
    output[10:40] = prompt[:30]
    template = Trace("t", prompt, output)
    made = alterations.filled_in([template], 5, classes, np.random.default_rng(0))
    assert len({t.session for t in made}) == 5
    same = np.mean([np.asarray(t.output) == output for t in made])
    assert 0.7 < same < 0.95
    for trace in made:
        np.testing.assert_array_equal(trace.output[10:40], trace.prompt[:30])
    assert any((made[0].output != t.output).any() for t in made[1:])


def test_a_misleading_prompt_breaks_every_copy() -> None:
    classes = np.zeros((5_000, 6), np.float32)
    output = np.arange(40) + 1_000
    made = alterations.misleading(Trace("s", [1, 2], output), 4, classes, np.random.default_rng(0))
    shown = np.asarray(made.prompt[2:])
    same = shown == output
    assert same[:3].all()
    assert not same[3::4].any()


def test_a_drafter_foresees_what_was_written_before_by_its_own_chance() -> None:
    rng = np.random.default_rng(0)
    fresh = rng.integers(100_000, size=4_000)
    trace = Trace("s", fresh, np.concatenate([fresh[:2_000], rng.integers(100_000, size=2_000)]))
    made = alterations.foreseen(trace, Drafter(known=1.0, new=0.0), 4, np.random.default_rng(0))
    accepted = np.asarray(made.model_accepted)
    assert (accepted[2:1_990] == 4).all()
    assert (accepted[2_000:] == 0).all()
    even = alterations.foreseen(trace, Drafter(known=0.5, new=0.5), 4, np.random.default_rng(0))
    assert np.mean(even.model_accepted) == pytest.approx(0.9375, abs=0.06)


def test_a_machine_prices_steps_as_it_says() -> None:
    costs, unit = Machine(plain=2.0, token=0.5, draft=0.1, draft_token=0.2).costs, PLAIN_US
    assert (costs.time(1), costs.time(3)) == pytest.approx((2 * unit, 3 * unit))
    assert costs.drafting(4, 1) == pytest.approx(0.9 * unit)

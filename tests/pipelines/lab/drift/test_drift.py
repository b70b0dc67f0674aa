"""Scenarios as files, the requests they come to, the service that decodes them, its figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.contracts.errors import TraceError
from decoder.policy.first import first_policy
from decoder.settings import WorkerSettings
from learner.training.rows import Rows
from pipelines.cli import app
from pipelines.lab.drift import study
from pipelines.lab.drift.changes import (
    CONTEXT,
    Drafter,
    filled_in,
    foreseen,
    misleading,
    renamed,
    sampled,
)
from pipelines.lab.drift.measure import figures
from pipelines.lab.drift.stream import Learning, Run, Worker, decode
from pipelines.lab.drift.study import NAMES, resampled, stream
from pipelines.lab.drift.traffic import BROKEN as BROKEN_TENANT
from pipelines.lab.drift.traffic import (
    HONEST,
    KINDS,
    PLAIN_US,
    Library,
    Machine,
    Request,
    Scenario,
    Segment,
    Traffic,
    chosen,
    lessons,
    traffic,
)
from pipelines.lab.replay.traces import Trace
from pipelines.replay.engine import Simulator, model_acceptance
from pipelines.replay.method import Method
from pipelines.replay.rivals import method
from tests.events import from_events
from tests.learner.traffic import Traffic as Taught
from tests.pipelines.lab.replay.samples import (
    copying_traces,
    dialogue,
    token_classes,
    word_tokenizer,
    write_traces,
)

CLASSES = token_classes()


def library(count: int = 60) -> Library:
    def named(stem: str, traces: list[Trace]) -> list[Trace]:
        return [replace(t, session=f"{stem}/{t.session}", workload=stem) for t in traces]

    sets = {"one": copying_traces(1, count), "two": copying_traces(2, count)}
    return Library({n: named(n, ts) for n, ts in sets.items()}, CLASSES, 4)


def scenario(*segments: Segment, history: Segment | None = None) -> Scenario:
    return Scenario(name="test", segments=segments, history=history)


def of(kind: str, generations: int = 10, **more: object) -> Segment:
    return Segment.model_validate({"kinds": (kind,), "generations": generations, **more})


def test_every_shipped_scenario_can_be_read() -> None:
    shipped = chosen([])
    assert len(shipped) == 14
    for each in shipped:
        assert each.about
        assert sum(segment.generations for segment in each.segments) == 1_000
        assert all(set(s.kinds) - {"alpacaeval_chat"} <= KINDS.keys() for s in each.segments)


def test_the_same_seed_sends_the_same_no_session_twice_and_none_that_was_learned_from() -> None:
    segments = (of("one", 12), of("two", 12, breaks=6), of("one", 12))
    sent, again, other = (traffic(scenario(*segments), library(), seed) for seed in (1, 1, 2))
    for a, b in zip(sent.requests, again.requests, strict=True):
        np.testing.assert_array_equal(a.trace.output, b.trace.output)
        np.testing.assert_array_equal(a.trace.model_accepted, b.trace.model_accepted)
    sessions = [r.trace.session for r in sent.requests]
    assert sessions != [r.trace.session for r in other.requests]
    assert len(sessions) == len(set(sessions)) == 36 and sent.begins == [0, 12, 24]
    taught = {t.session for t in lessons(segments, library(), 1, 100)}
    assert taught and taught.isdisjoint(sessions)
    # recordings that end end a segment
    sent = traffic(scenario(of("one", 500), of("two", 5)), library(), 1)
    assert 10 < len(sent.requests) < 70 and sent.requests[-1].segment == 1
    with pytest.raises(TraceError, match="no recordings of kind elsewhere"):
        traffic(scenario(of("elsewhere")), library(), 1)


def test_templates_get_arguments_of_their_own_and_a_misleading_prompt_breaks_every_copy() -> None:
    classes, rng = np.zeros((5_000, 6), np.float32), np.random.default_rng(0)
    prompt, output = rng.integers(1_000, size=50), rng.integers(1_000, size=80)
    output[10:40] = prompt[:30]
    made = filled_in([Trace("t", prompt, output)], 5, classes, rng)
    assert len({t.session for t in made}) == 5
    assert 0.7 < np.mean([np.asarray(t.output) == output for t in made]) < 0.95
    for trace in made:
        np.testing.assert_array_equal(trace.output[10:40], trace.prompt[:30])
    output = np.arange(40) + 1_000
    broken = misleading(Trace("s", [1, 2], output), 4, classes, rng)
    same = np.asarray(broken.prompt[2:]) == output
    assert same[:3].all() and not same[3::4].any()


def test_a_name_is_another_throughout_the_copy_and_nothing_else_is() -> None:
    classes, rng = np.zeros((5_000, 6), np.float32), np.random.default_rng(0)
    output = np.arange(400, dtype=np.int32) + 1_000
    output[20::2], output[[11, 111, 211]], output[[51, 351]] = 9, 7, 8  # 9 comes too often
    copied = np.asarray(renamed(Trace("s", [1, 2], output), 2, classes, rng).prompt[2:])
    assert np.flatnonzero(copied != output).tolist() == [11, 51, 111, 211, 351]
    assert len(np.unique(copied[output == 7])) == 1


def test_sampling_changes_its_share_of_an_output_and_neither_prompt_nor_end() -> None:
    classes, rng = np.zeros((5_000, 6), np.float32), np.random.default_rng(0)
    output = np.arange(2_000, dtype=np.int32)
    made = sampled(Trace("s", [1, 2], output), 0.125, classes, rng)
    differs = np.asarray(made.output) != output
    assert 0.1 < differs.mean() < 0.15 and not differs[-1] and list(made.prompt) == [1, 2]


def test_a_drafter_knows_what_has_come_behind_the_same_two_tokens_before() -> None:
    text = [*np.random.default_rng(3).integers(40, size=900).tolist(), 2**20, 7, 2**20, 7, 1]
    prompt, output = text[:300], text[300:]
    sure = foreseen(Trace("s", prompt, output), Drafter(known=1.0, new=0.0), 1,
                    np.random.default_rng(0)).model_accepted  # fmt: skip
    grams = [tuple(text[at - CONTEXT : at + 1]) for at in range(CONTEXT, len(text))]
    known = [gram in grams[:at] for at, gram in enumerate(grams)][300 - CONTEXT :]
    assert 0 < sum(known) < len(known) and np.asarray(sure).tolist() == known


def copies(trace: Trace, whole: bool = False) -> bool:
    """Whether the prompt ends in the output, or in most of it; it is shorter by itself."""
    if len(trace.prompt) < len(trace.output):
        return False
    same = np.asarray(trace.prompt)[-len(trace.output) :] == np.asarray(trace.output)
    return bool(same.all() if whole else same.mean() > 0.5)


def test_a_share_of_sessions_is_another_tenants_and_a_share_of_requests_a_whole_copy() -> None:
    sent = traffic(scenario(of("one", 40, breaks=4, broken=0.25)), library(120), 1).requests
    assert 0.1 < np.mean([r.tenant == BROKEN_TENANT for r in sent]) < 0.45
    assert all(copies(r.trace) == (r.tenant == BROKEN_TENANT) for r in sent)
    sent = traffic(scenario(of("one", 40, breaks=4, verbatim=0.3)), library(120), 1).requests
    assert 0.1 < np.mean([copies(r.trace, whole=True) for r in sent]) < 0.5
    assert {r.tenant for r in sent} == {HONEST}


SETTINGS = WorkerSettings()
COSTS = Machine().costs
COUNTING = frequency_policy("drift")


def with_model(traces: list[Trace], mean: float = 2.2) -> list[Trace]:
    return [replace(t, model_accepted=model_acceptance(t, mean)) for t in traces]


def requests(traces: list[Trace], segment: int = 0) -> list[Request]:
    return [Request(t, segment) for t in with_model(traces)]


def served(asked: list[Request], policy: Policy = COUNTING, adapts: bool = False) -> Run:
    return decode(asked, [COSTS], policy, Worker(SETTINGS, adapts), token_classes())


def test_one_request_at_a_time_decodes_as_the_simulator_does() -> None:
    traces = [replace(t, session=f"{i}/{t.session}") for i, t in enumerate(copying_traces(1, 8))]
    traces = with_model([*traces, *dialogue(2), *copying_traces(3, 1, 1)])
    by = Method("frequency", method("frequency").policy)
    cycles, _ = Simulator(token_classes(), SETTINGS, costs=COSTS).decode(traces, by)
    found = served([Request(t, 0) for t in traces])
    np.testing.assert_array_equal(found.cycles, np.bincount(cycles.arm, minlength=3))
    assert found.us.sum() == pytest.approx(cycles.times(COSTS).sum())
    assert found.tokens.tolist() == [len(t.output) - 1 for t in traces]


def test_a_policy_told_is_in_force_from_the_next_request_on() -> None:
    asked = requests(copying_traces(1, 6))
    never = frequency_policy("drift", float("inf"))

    def told(index: int, rows: Rows) -> Policy | None:
        return never if index == 2 else None

    found = decode(asked, [COSTS], COUNTING, Worker(SETTINGS, False), token_classes(), told)
    whole, half = (served(asked[:n]).cycles[2] for n in (6, 3))
    assert 0 < half == found.cycles[2] < whole


def test_what_won_is_tried_by_the_worker_in_recorded_time() -> None:
    never, other = frequency_policy("drift", 1e9), frequency_policy("drift", 2.0)
    learning, asked = Learning(never), requests(copying_traces(1, 100))
    learning._waiting = other
    found = decode(  # without the floor, which would decide in the champion's place
        asked, [COSTS], learning.scope.champion, Worker(SETTINGS, False), token_classes(),
        learning.told, learning.interleaver,
    )  # fmt: skip
    one, totals = learning._one, learning.interleaver.totals
    assert one is not None and len(one.pairs) >= 12
    assert one.labels.pairs >= 12, "labels of all traffic judge it as well"
    assert totals["trial"].us == pytest.approx(totals["trial"].cost_us, rel=0.05)
    whole = sum(total.us for total in totals.values())
    assert whole == pytest.approx(found.us.sum(), rel=0.05)


BEFORE, AFTER = 60, 240


def one_change(**more: Any) -> Scenario:
    before = Segment(kinds=("one",), generations=BEFORE)
    after = Segment(kinds=("two",), generations=AFTER)
    return Scenario(name="test", segments=(before, after), **more)


def sent_by(each: Scenario) -> Traffic:
    requests, begins = [], []
    for index, segment in enumerate(each.segments):
        begins.append(len(requests))
        place = range(len(requests), len(requests) + segment.generations)
        requests += [Request(Trace(f"s{i // 2}", [1], [2]), index) for i in place]
    return Traffic(requests, begins)


def ran(before: float, after: float, settles: int = 0, **more: Any) -> Run:
    """Ten tokens a request at a rate; half of ``after`` for the first requests after the change."""
    rates = [before] * BEFORE + [after / 2] * settles + [after] * (AFTER - settles)
    us = [10 * PLAIN_US / rate for rate in rates]
    return Run(np.full(len(rates), 10), np.array(us), np.array([0, 1, 3]), **more)


def test_rates_and_shares_are_of_the_requests_of_their_window() -> None:
    each = one_change()
    found = figures(each, 1, sent_by(each), {"first": ran(2.0, 3.0)})
    first = found["policies"]["first"]
    assert first["rate_after"] == pytest.approx(3.0)
    assert first["rate_start"] == pytest.approx(2.0)
    assert first["rate"] == pytest.approx(300 / (60 / 2 + 240 / 3))
    assert first["cycles_by_arm"] == {"none": 0.0, "model": 0.25, "cache": 0.75}
    assert found["changes"] == [{"at": 60, "what": ["kinds"], "segment": 1}]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_recovery_counts_until_it_is_as_good_as_retrained_and_alarms_elsewhere_are_false() -> None:
    each, retrained, first = one_change(), ran(2.0, 4.0), ran(2.0, 3.0)
    for settles in (0, 40, 100):
        runs = {"adaptive": ran(2.0, 4.0, settles), "refit": retrained, "first": first}
        found = figures(each, 1, sent_by(each), runs)
        assert settles - 2 <= found["recovery_requests"][0] <= settles
        assert found["gap_recovered"] == pytest.approx(1.0)
    never = {"adaptive": ran(2.0, 3.9), "refit": retrained}
    assert figures(each, 1, sent_by(each), never)["recovery_requests"] == [None]
    adaptive = ran(2.0, 4.0, alarms=[10, 59, 60, 159, 160, 299], promotions=[70])
    found = figures(each, 1, sent_by(each), {"adaptive": adaptive})
    assert found["false_alarms"] == 4, "where nothing changed"
    still = Scenario(name="still", segments=(Segment(kinds=("one",), generations=300),))
    assert figures(still, 1, sent_by(still), {"adaptive": adaptive})["false_alarms"] == 6


REQUESTS = 160
LOSS = 0.02
HOSTILE = "hostile"
BROKEN = 4
"""A hostile tenant's prompts hold its outputs with one of so many tokens wrong."""


def named(trace: Trace, name: str) -> Trace:
    return replace(trace, session=name, model_accepted=model_acceptance(trace, 2.2))


def honest_rate(requests: list[Request], learning: Learning) -> float:
    """Tokens a microsecond of the honest ones, while a learner hears of all of them."""
    costs, first = [Machine().costs], first_policy("drift")
    served = Worker(WorkerSettings())
    found = decode(
        requests, costs, first, served, token_classes(), learning.told, learning.interleaver
    )
    counted = [r.tenant == HONEST for r in requests]
    return float(found.tokens[counted].sum() / found.us[counted].sum())


def test_others_lose_at_most_two_per_cent() -> None:
    """As many hostile requests as honest ones: each copy is found, looks good, and breaks off."""
    draw = np.random.default_rng(1)
    honest, hostile = (copying_traces(seed, REQUESTS, 120) for seed in (1, 101))
    both: list[Request] = []
    for index, (good, bad) in enumerate(zip(honest, hostile, strict=True)):
        broken = misleading(bad, BROKEN, token_classes(), draw)
        both.append(Request(named(broken, f"hostile {index}"), 0, HOSTILE))
        both.append(Request(named(good, f"honest {index}"), 0, HONEST))
    taught, untaught = (Learning(first_policy("drift"), "off") for _ in range(2))
    beside = honest_rate(both, taught)
    alone = honest_rate([r for r in both if r.tenant == HONEST], untaught)
    assert taught.promotions, "nothing was learned, so nothing was shown"
    assert beside >= (1.0 - LOSS) * alone


SCENARIO = """
[[segments]]
kinds = ["chat"]
generations = 12
[[segments]]
kinds = ["edits"]
generations = 25
breaks = 6
"""


@pytest.fixture
def drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, on two files of sixty recordings in token ids and a scenario of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for seed, name in enumerate(("chat", "edits")):
        write_traces(tmp_path / "traces" / f"{name}.jsonl", seed, 60, 60)
    (tmp_path / "small.toml").write_text(SCENARIO, encoding="utf-8")
    given = {
        "--tokenizer": tmp_path / "tokenizer", "--traces": tmp_path / "traces",
        "--scenario": tmp_path / "small.toml", "--seeds": 1,
    }  # fmt: skip

    def ran(*flags: str, **more: Any) -> Result:
        options = given | {f"--{name}": value for name, value in more.items()}
        asked = [str(w) for pair in options.items() if pair[1] is not None for w in pair]
        return CliRunner().invoke(app, ["drift", *asked, *flags])

    return ran


def test_every_policy_is_measured(drift: Callable[..., Result]) -> None:
    summary = json.loads(drift("--json").stdout)
    (found,) = summary["scenarios"]
    assert list(found["policies"]) == list(NAMES)
    assert all(figure["rate"] > 0 for figure in found["policies"].values())
    assert found["requests"] == 37
    assert found["changes"][0]["what"] == ["kinds", "breaks"]
    assert "small" in drift(policies="first").stdout


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"seeds": "-1"}, "give positive numbers"),
        ({"policies": "best"}, "no policy 'best'"),
        ({"traces": "."}, "name a folder of trace files"),
        ({"scenario": "numbered-records"}, "left out, no recordings of kind service"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(
    drift: Callable[..., Result], wrong: dict[str, Any], says: str
) -> None:
    found = drift(**wrong)
    assert found.exit_code
    assert says in str(found.exception)


# --- traffic that does not change


def sessions(seed: int, sign: int, n: int = 40) -> list[list[Rows]]:
    """Each of two requests of twenty drafts."""
    rows = from_events(Taught(seed=seed, sign=sign).events(2 * n))
    cuts = [rows.take(np.arange(at, at + 20)) for at in range(0, len(rows), 20)]
    return [cuts[at : at + 2] for at in range(0, len(cuts), 2)]


def test_alarms_of_a_stream_are_those_of_the_scope_that_it_is_fed_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm = stream("k", 1, sessions(1, 1), first_policy("drift"), 3_000, lambda *_: None)
    assert (calm["cache"], calm["model"]) == (0, 0) and 3_000 <= calm["rows"] < 3_020
    rows = iter([*islice(resampled(sessions(1, 1), np.random.default_rng(1)), 150),
                   *islice(resampled(sessions(2, -1), np.random.default_rng(1)), 151)])  # fmt: skip
    monkeypatch.setattr(study, "resampled", lambda *_: rows)
    turned = stream("k", 1, sessions(1, 1), first_policy("drift"), 6_000, lambda *_: None)
    assert turned["cache"] > 0


def test_the_command_counts_false_alarms_and_says_them_by_text(
    drift: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "LENGTH", 700)
    asked = {"scenario": None, "seeds": None}
    found = json.loads(drift("--false-alarms=2100", "--json", **asked).stdout)
    assert [(s["kind"], s["seed"]) for s in found["streams"]] == [
        ("agentic", 0), ("agentic", 1), ("chat", 0),
    ]  # fmt: skip
    assert found["rows"] == sum(each["rows"] for each in found["streams"]) >= 2_100
    assert "agentic" in drift("--false-alarms=700", **asked).stdout

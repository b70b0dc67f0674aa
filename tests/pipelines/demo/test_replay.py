"""The demo's own answers by every rule, in virtual time."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.trials import MODEL
from decoder.settings import WorkerSettings
from pipelines.demo.replay import cost_table, policy_of, replayed
from pipelines.demo.run import write
from pipelines.demo.summary import Run, _choice, is_level, is_told, summarise
from pipelines.replay.engine import Trace, drawn_by_position
from pipelines.replay.rules import HYBRID, name_of, rivals
from pipelines.watch.ledger import Ledger, Phase
from tests.pipelines.watch.records import batch, event, recorded, worker_status

PRICES = {"1": 77_000, "4": 90_000, "16": 150_000, "64": 400_000}
PHASES = [
    Phase("one agent", ("edits",), "agents", 1000.0, 1060.0),
    Phase("conversation", ("chat",), "conversation", 1060.0, 1120.0),
]


def answer(seed: int, copies: bool, length: int = 60) -> Trace:
    """An answer that copies runs of its prompt, or says what nobody said before."""
    rng = random.Random(seed)
    prompt, output = [rng.randrange(1000, 9000) for _ in range(80)], list[int]()
    while copies and len(output) < length:
        begin = rng.randrange(60)
        output += [*prompt[begin : begin + rng.randrange(6, 18)], rng.randrange(1000, 9000)]
    output = output or [rng.randrange(1000, 9000) for _ in range(length)]
    return Trace(str(seed), prompt, output[:length], "edits", length)


ANSWERS = {
    "one agent": [answer(n, copies=True) for n in range(8)],
    "conversation": [answer(n, copies=False) for n in range(8, 16)],
}


def measured(**prices: object) -> Ledger:
    """A run whose worker measured its prices, and whose model drafts broke off at their second
    token while agents were served, and at their first in conversation."""
    ledger = recorded()
    last = {"step_us": PRICES, "draft_us": 8000.0, "exposed_us_p50": 150.0, **prices}
    ledger.add_status(worker_status(1119.5, 5000, **last))
    drafted = {"arm": MODEL, "side": MODEL, "verified_len": 4}
    for n in range(120):
        accepted = 1 if n < 60 else 0
        changes = drafted | {"model_accepted": accepted}
        ledger.add_drafts(batch([event(1000 + n, 1000.0 + n, **changes)]))
    return ledger


def silent(what: str, done: int, whole: int) -> None:
    pass


def test_every_rule_decodes_the_same_answers_and_the_figures_repeat() -> None:
    ledger = measured()
    found = replayed(ledger, PHASES, ANSWERS, silent)
    assert found == replayed(ledger, PHASES, ANSWERS, silent), "a fixed seed, no clock"
    assert json.loads(json.dumps(found, allow_nan=False)) is not None
    rules = rivals(WorkerSettings().model_draft_tokens)
    for kind, phase in (("agents", "one agent"), ("conversation", "conversation")):
        one = found["kinds"][kind]
        assert set(one["over"]) == set(rules) and one["answers"] == 8
        # the first token of an answer comes with its prompt
        assert one["tokens"] == sum(len(trace.output) - 1 for trace in ANSWERS[phase])
        assert all(r["low"] <= r["ratio"] <= r["high"] for r in one["over"].values())
    assert found["kinds"]["agents"]["over"]["greedy"]["low"] > 1.0, "copied text is copied"
    said = json.dumps(found)
    texts = [ids for some in ANSWERS.values() for t in some for ids in (t.prompt, t.output)]
    assert not any(json.dumps(ids[:2])[1:-1] in said for ids in texts), "no token leaves the run"


def test_prices_are_the_workers_and_without_any_nothing_is_claimed() -> None:
    settings = WorkerSettings()
    table = cost_table(measured().statuses[-1:], settings)
    assert [table.time(int(n)) for n in PRICES] == [*PRICES.values()]
    assert table.drafting(settings.model_draft_tokens, 1) == pytest.approx(8000.0)
    (odd,) = measured(step_us={"1": 0, "4": 90, "16": 80, "64": 85}).statuses[-1:]
    stalled = cost_table([odd, *measured().statuses[-1:] * 2], settings)
    assert stalled.verify_us == table.verify_us, "one status after a stall changes nothing"
    odd = cost_table([odd], settings)
    assert np.all(np.diff(odd.verify_us) >= 0.0) and odd.time(1) > 0.0, "whatever was measured"
    for ledger in (Ledger(), recorded()):
        assert replayed(ledger, PHASES, ANSWERS, silent) == {}
    assert replayed(measured(), PHASES, {}, silent) == {}
    single = {
        name: [replace(t, output=t.output[:1]) for t in some] for name, some in ANSWERS.items()
    }
    few = {name: some[:3] for name, some in ANSWERS.items()}
    for answers in (single, few):
        assert replayed(measured(), PHASES, answers, silent)["kinds"] == {}


def test_model_drafts_are_drawn_from_the_acceptance_that_was_measured() -> None:
    ledger = measured()
    agents, conversation = (ledger.acceptance([(phase.began, phase.ended)], 4) for phase in PHASES)
    assert agents == [61 / 62, 1 / 62, 0.5, 0.5] and conversation[0] == 1 / 62
    drawn = drawn_by_position((0.8, 0.5, 0.5), 20_000, np.random.default_rng(0))
    reached = [np.mean(drawn[drawn >= place] > place) for place in range(3)]
    # a token that is easy at one place is at the others
    assert reached[0] == pytest.approx(0.8, abs=0.02) and drawn.max() == 3
    assert ledger.acceptance([(0.0, 1.0)], 2) == [0.5, 0.5], "nothing seen"


def test_the_policy_is_the_one_that_decided_most() -> None:
    ledger = measured()
    assert policy_of(ledger, PHASES).version in (1, 2)
    assert policy_of(ledger, PHASES[:1]).version == 1
    assert policy_of(Ledger(), PHASES).version == 0, "the policy that ships"


def test_the_headline_names_best_and_worst_of_agents_and_conversation(tmp_path) -> None:
    ledger = measured()
    ledger.rounds.clear()  # a machine too slow for a single pair
    virtual = replayed(ledger, PHASES, ANSWERS, silent)
    summary = summarise(ledger, Run({"answered": 16}, 1000.0, left_out=["three agents"]), virtual)
    (told,) = [one for one in summary["sentences"] if "virtual time" in one]
    for word in ("agents: ", "conversation: ", "the best of 12 rules", "the worst", "drawn from"):
        assert word in told
    assert any("no time for these phases: three agents" in s for s in summary["sentences"])
    write(ledger, summary, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "Virtual time: ratio of tokens a second to each rule" in page
    assert all(name_of(rule) in page for rule in rivals(4))
    assert "agents, in virtual time, over the best of 12 rules" in page
    assert HYBRID not in virtual["kinds"]["agents"]["over"]


@pytest.mark.parametrize(
    ("low", "high", "told", "level"),
    [(1.1, 1.3, True, False), (0.96, 1.04, True, True), (0.9, 1.02, False, False),
     (0.7, 0.9, True, False), (None, None, False, False)],
)  # fmt: skip
def test_an_interval_within_a_twentieth_of_one_is_as_fast_and_tells(
    low: float | None, high: float | None, told: bool, level: bool
) -> None:
    one = {"ratio": 1.0, "low": low, "high": high}
    assert is_told(one) is told and is_level(one) is level


def test_a_sentence_on_best_and_worst_leaves_out_traffic_that_no_rule_replayed() -> None:
    ends = {"agents": ("model", "plain"), "a bad policy": ("suffix", "plain")}
    kinds = {key: {"ratio": 1.3, "low": 1.2, "high": 1.4} for key in ends}
    summary = {
        "best_and_worst": ends,
        "uplift": {f"over_{side}": {"kinds": kinds} for side in ("model", "suffix", "plain")},
        "virtual": {"kinds": {"agents": {}}},
    }
    assert "agents: " in _choice(summary) and "bad policy" not in _choice(summary)
    assert "bad policy" in _choice(summary | {"virtual": {}})


def test_what_is_told_in_virtual_time_is_not_called_open() -> None:
    ledger = measured()
    ledger.rounds = [r for r in ledger.rounds if False]
    decided = {"ratio": 1.3, "low": 1.2, "high": 1.4}
    over: Sequence[str] = ("greedy", "suffix", "eagle3:4")

    def said(one: dict[str, float]) -> str:
        kinds = {"agents": {"answers": 9, "tokens": 99, "over": dict.fromkeys(over, one)}}
        return " ".join(summarise(ledger, Run({}, 1000.0), {"kinds": kinds})["sentences"])

    assert "cannot be told" not in said(decided)
    assert "cannot be told" in said(decided | {"low": 0.8})


def test_a_machine_that_stalls_is_told_by_the_time_that_its_steps_should_take() -> None:
    ledger = recorded()
    rng = random.Random(3)
    ledger.rounds = [
        # nine of ten blocks stall, now one side's and now another's
        played.model_copy(update={"blocks": tuple(
            block.model_copy(update={"us": block.us * rng.choice([1.0, 40.0, 300.0])})
            for block in played.blocks
        )})
        for played in ledger.rounds
    ]  # fmt: skip
    summary = summarise(ledger, Run({"answered": 9}, 1000.0))
    over = summary["uplift"]["over_plain"]
    assert not is_told(over) and over["at_costs"]["low"] > 1.3
    (live,) = [s for s in summary["sentences"] if s.startswith("Live, on the same")]
    assert "excludes stalls" in live and "1.5" in live and "plain decoding" in live
    untold = [s for s in summary["sentences"] if "cannot be told from this run" in s]
    assert not any("plain decoding" in s for s in untold)

from __future__ import annotations

import json

import pytest

from decoder.contracts.trials import Block, Group
from pipelines.watch.ledger import Phase
from pipelines.watch.uplift import RECENT, by_workload, course, shown, uplifts
from tests.pipelines.watch.records import rounds

RATES = {"champion": 60.0, "plain": 40.0, "suffix": 50.0}
PHASES = [Phase("A", ("edits",), 100.0, 200.0), Phase("B", ("chat",), 200.0)]


def played() -> list:
    return [*rounds(40, 100.0, 2.0, RATES), *rounds(20, 200.0, 2.0, {**RATES, "champion": 30.0})]


def test_each_phase_has_its_own_ratio_and_the_whole_is_that_of_all() -> None:
    found = uplifts(played(), PHASES)
    over = found["over_plain"]
    assert over.phases["A"].ratio == pytest.approx(1.5, rel=0.05)
    assert over.phases["B"].ratio == pytest.approx(0.75, rel=0.05)
    assert (over.phases["A"].pairs, over.phases["B"].pairs, over.whole.pairs) == (40, 20, 60)
    assert over.whole.low < over.whole.ratio < over.whole.high
    assert found["over_suffix"].phases["A"].ratio == pytest.approx(1.2, rel=0.05)


def test_a_side_that_never_played_is_left_out_and_too_few_pairs_are_null_in_json() -> None:
    found = uplifts(rounds(5, 100.0, 2.0, RATES), PHASES)
    assert list(found) == ["over_plain", "over_suffix"] and list(uplifts((), ())) == ["over_plain"]
    few = found["over_plain"].as_dict()
    assert (few["low"], few["high"], few["pairs"]) == (None, None, 5)
    assert few["ratio"] == pytest.approx(1.5, rel=0.1)
    assert json.loads(json.dumps(few, allow_nan=False)) == few


def test_what_is_shown_claims_no_interval_before_there_is_one() -> None:
    whole = [uplifts(rounds(n, 0.0, 1.0, RATES), ())["over_plain"].whole for n in (0, 5, 50)]
    assert shown(whole[0]) == "-"
    assert shown(whole[1]).startswith("about 1.")
    assert " to " in shown(whole[2])


def test_a_workload_has_the_ratio_of_its_own_requests() -> None:
    def parted(block: Block) -> Block:
        fast = 0.5 if block.side == "champion" else 0.25
        parts = {"edits": fast, "chat": 1.0 - fast}
        groups = [
            Group(workload=w, tokens=p * block.tokens, cost_us=0.5 * block.cost_us)
            for w, p in parts.items()
        ]
        return block.model_copy(update={"groups": tuple(groups)})

    made = rounds(40, 0.0, 1.0, {"champion": 60.0, "plain": 60.0})
    made = [r.model_copy(update={"blocks": tuple(map(parted, r.blocks))}) for r in made]
    found = by_workload(made)
    assert list(found) == ["chat", "edits"]
    assert found["edits"]["over_plain"].ratio == pytest.approx(2.0, rel=0.05)
    assert found["chat"]["over_plain"].ratio == pytest.approx(2.0 / 3.0, rel=0.05)
    assert "over_suffix" not in found["chat"]
    assert by_workload(rounds(3, 0.0, 1.0, RATES)) == {}


def test_a_course_ends_with_what_is_known_now_and_narrows() -> None:
    points = course(played()[:40], "plain", 10)
    assert len(points) == 10
    assert points[-1] == (180.0, uplifts(played()[:40], ())["over_plain"].whole)
    assert points[-1][1].high - points[-1][1].low < points[4][1].high - points[4][1].low


def test_a_recent_course_follows_a_change() -> None:
    _, last = course(played(), "plain", 10, RECENT)[-1]
    _, whole = course(played(), "plain", 10)[-1]
    assert last.pairs == RECENT
    assert last.ratio < whole.ratio

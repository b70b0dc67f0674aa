from __future__ import annotations

import pytest

from decoder.contracts.trials import Block, Group
from pipelines.watch import uplift
from pipelines.watch.ledger import Phase
from pipelines.watch.uplift import ALL, as_dict, as_text, over_time, uplifts
from tests.pipelines.watch.records import rounds

RATES = {"champion": 60.0, "plain": 40.0, "suffix": 50.0}
PHASES = [Phase("A", ("edits",), 100.0, 200.0), Phase("B", ("chat",), 200.0)]


def played() -> list:
    return [*rounds(40, 100.0, 2.0, RATES), *rounds(20, 200.0, 2.0, {**RATES, "champion": 30.0})]


def test_each_phase_has_its_own_ratio_and_the_whole_is_that_of_all() -> None:
    found = uplifts(played(), PHASES)
    first, second, whole = (found[name]["plain"] for name in ("A", "B", ALL))
    assert (first.ratio, second.ratio) == pytest.approx((1.5, 0.75), rel=0.05)
    assert (first.pairs, second.pairs, whole.pairs) == (40, 20, 60)
    assert whole.low < whole.ratio < whole.high
    assert found["A"]["suffix"].ratio == pytest.approx(1.2, rel=0.05)
    rates = [uplift.rate_in(phase, played()) for phase in PHASES]
    assert rates == pytest.approx([60.0, 30.0], rel=0.05) and uplift.rate_in(PHASES[0], []) == 0.0


def test_no_interval_is_claimed_before_there_is_one_and_no_side_that_never_played() -> None:
    assert list(uplifts(rounds(5, 0.0, 2.0, RATES), ())[ALL]) == ["plain", "suffix"]
    none, few, many = (uplifts(rounds(n, 0.0, 1.0, RATES), ())[ALL]["plain"] for n in (0, 5, 50))
    assert as_text(none) == "-" and as_text(few).startswith("about 1.") and " to " in as_text(many)
    assert as_dict(none) == {"ratio": None, "low": None, "high": None, "pairs": 0}
    assert as_dict(few) == {**as_dict(none), "ratio": round(few.ratio, 4), "pairs": 5}


def test_a_workload_has_the_ratio_of_its_own_requests() -> None:
    def parted(block: Block) -> Block:
        fast, cost = 0.5 if block.side == "champion" else 0.25, 0.5 * block.cost_us
        parts = {"edits": fast * block.tokens, "chat": (1.0 - fast) * block.tokens}
        groups = tuple(Group(workload=w, tokens=n, cost_us=cost) for w, n in parts.items())
        return block.model_copy(update={"groups": groups})

    made = rounds(40, 0.0, 1.0, {"champion": 60.0, "plain": 60.0})
    made = [r.model_copy(update={"blocks": tuple(map(parted, r.blocks))}) for r in made]
    ratios = {name: one["plain"].ratio for name, one in uplift.by_workload(made).items()}
    assert ratios == pytest.approx({"chat": 2.0 / 3.0, "edits": 2.0, ALL: 1.0}, rel=0.05)


def test_a_course_ends_with_what_is_known_now_narrows_and_the_recent_one_follows() -> None:
    points = over_time(played()[:40], "plain", 10)
    assert len(points) == 10
    assert points[-1] == (180.0, uplifts(played()[:40], ())[ALL]["plain"])
    assert points[-1][1].high - points[-1][1].low < points[4][1].high - points[4][1].low
    lately, whole = (over_time(played(), "plain", 10, n)[-1][1] for n in (24, None))
    assert lately.pairs == 24 and lately.ratio < whole.ratio

"""One configuration of the matrix and a dozen requests, in every run of the suite.

Suffix drafts as an operator first writes them, without a number. Speculation switched off for one
request makes the target's own answer on the same server, which the drafted one must equal.
"""

from __future__ import annotations

import pytest

from tests.matrix import findings
from tests.matrix.asks import some, without_speculation
from tests.matrix.drive import send_all
from tests.matrix.setups import SETUPS, TOGETHER, hybrid

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]


def test_suffix_drafts_without_a_number_serve(tmp_path_factory: pytest.TempPathFactory) -> None:
    setup, asks = SETUPS[0], some()
    assert setup.speculative_config == {"method": "suffix"} and len(asks) == 12
    with hybrid(setup, tmp_path_factory.mktemp(setup.name)) as server:
        expected = send_all(server.url, [without_speculation(a) for a in asks], TOGETHER)
        assert server.metric("hvd_drafted_total") == 0
        found = [f"{name}: {r}" for name, r in expected.items() if r.status != 200]
        got = send_all(server.url, asks, TOGETHER)
        found += findings.of_replies(asks, got, expected)
        found += findings.of_the_end(server, setup.drafts, {"cache"})
    assert found == [], "\n".join(found)

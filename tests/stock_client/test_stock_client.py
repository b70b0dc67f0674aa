"""OpenAI's own client sees no difference between stock vLLM and the hybrid, policies swapping.

Both serve in float32. With ``-s`` a run prints its row as docs/vllm.md tells them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoder.contracts.errors import ProcessError
from tests.conftest import until
from tests.end_to_end.service import embedded_scope
from tests.matrix import findings
from tests.matrix.answers import Answer, answers_of
from tests.stock_client.served import (
    STREAMS,
    all_asks,
    faults,
    hybrid,
    policies,
    stock,
    under_load,
)

pytestmark = [pytest.mark.engine, pytest.mark.stack]

ASKS = all_asks()
SECONDS = (
    pytest.param(60.0, marks=pytest.mark.long),
    pytest.param(600.0, marks=[pytest.mark.release, pytest.mark.timeout(3000)]),
)
DRAFTS = 64


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What stock vLLM answers, twice alike in other company; a second one, if the first gives up:
    what is compared with may fail, once, and says how."""
    folder = tmp_path_factory.mktemp("stock")
    try:
        found, again = _both_ways_round(folder)
    except ProcessError as error:
        print(f"stock vLLM: {error}")
        found, again = _both_ways_round(folder)
    (folder / "answers.json").write_text(json.dumps([found, again]))
    unlike = [what for ask in ASKS for what in faults(ask, again[ask.name], found[ask.name])]
    assert not unlike, "stock vLLM differs from itself:\n" + "\n".join(unlike)
    return found


def _both_ways_round(folder: Path) -> tuple[dict[str, Answer], dict[str, Answer]]:
    with stock(folder) as server:
        found = answers_of(server.url, ASKS, STREAMS)
        return found, answers_of(server.url, ASKS[::-1], STREAMS)


@pytest.mark.long
@pytest.mark.release
def test_what_is_asked_is_all_that_clients_use(expected: dict[str, Answer]) -> None:
    refused = [ask.name for ask in ASKS if "refused" in expected[ask.name]]
    assert sorted(refused) == ["refused-0", "refused-1"]
    streams = [ask for ask in ASKS if ask.body["stream"]]
    assert len(streams) > 60 and len(ASKS) - len(streams) > 60
    for fields in ({"tools"}, {"response_format"}, {"logprobs"}, {"n"}, {"seed", "n"}, {"prompt"}):
        for way in (True, False):
            of_kind = [a for a in ASKS if a.body["stream"] is way and fields <= a.body.keys()]
            assert of_kind and any("choices" in expected[a.name] for a in of_kind), (fields, way)


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_stock_client_sees_no_difference(
    seconds: float, expected: dict[str, Answer], tmp_path: Path
) -> None:
    scope = embedded_scope()
    with hybrid(tmp_path) as (server, kafka):
        found = under_load(server.url, kafka, scope, ASKS, expected, seconds)
        until(lambda: server.metric("hvd_publication") >= found.publication, "the last policy")
        applied = int(server.metric("hvd_swaps_total"))
        print(f"\n{found.row(applied)}")
        wrong = [*found.failures, *found.differences]
        wrong += findings.of_the_end(server, DRAFTS, {"cache", "model"})
        assert not wrong, "\n".join(wrong)
        assert server.metric("hvd_refusals_total") == server.metric("hvd_ignored_total") == 0
    assert found.answers >= len(ASKS)
    assert found.pushed > len(policies(scope))
    assert found.pushed // 2 < applied <= found.tried, "the worker missed policies"

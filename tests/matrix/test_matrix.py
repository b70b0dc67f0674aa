"""Every speculative configuration an operator may write, given everything a client may ask.

Plain vLLM answers once; each configuration must then say what it said, in float32 token for token,
while requests are aborted, preempted, and run into the end of the context around it.
"""

from __future__ import annotations

import json

import pytest

from tests.matrix import findings
from tests.matrix.answers import Answer, answers_of
from tests.matrix.asks import everything, without_seed
from tests.matrix.setups import SETUPS, TOGETHER, Setup, hybrid, plain

pytestmark = [pytest.mark.long, pytest.mark.engine]

ASKS = everything()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Plain vLLM's answers, to asks without seeds: a seeded request whose prompt it reads in
    several steps ends it on a CPU, and of what is drawn only the outline is compared."""
    folder = tmp_path_factory.mktemp("plain")
    assert not [ask.name for ask in ASKS if ask.exact and "seed" in ask.body]
    with plain(folder) as server:
        replies = answers_of(server.url, [without_seed(ask) for ask in ASKS], TOGETHER)
        assert server.metric("vllm:num_preemptions_total") > 0
    (folder / "replies.json").write_text(json.dumps(replies))
    return replies


def test_plain_vllm_answers_what_the_matrix_asks(expected: dict[str, Answer]) -> None:
    assert len(ASKS) == len(expected) >= 60
    for ask in ASKS:
        wanted = (400, 422) if ask.kind == "refused" else (None,)
        assert expected[ask.name].get("refused") in wanted, (ask.name, expected[ask.name])
    assert list(findings.of_replies(ASKS, expected, expected)) == []


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)
def test_a_configuration_serves_everything(
    setup: Setup, expected: dict[str, Answer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(setup.name)
    arms = {"cache", "model"} if setup.drafter else {"cache"}
    with hybrid(setup, folder) as server:
        got = answers_of(server.url, ASKS, TOGETHER)
        (folder / "replies.json").write_text(json.dumps(got))
        found = list(findings.of_replies(ASKS, got, expected))
        found += findings.of_the_end(server, setup.drafts, arms)
        if server.lives():
            if not server.metric("vllm:num_preemptions_total"):
                found.append("nothing was preempted: the matrix leaves too much memory")
            first = [next(ask for ask in ASKS if ask.kind == "copy")]
            found += findings.of_replies(first, answers_of(server.url, first, 1), expected)
    assert found == [], "\n".join(found)

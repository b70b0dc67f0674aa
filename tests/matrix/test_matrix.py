"""Every speculative configuration an operator may write, given everything a client may ask.

Plain vLLM answers once; each configuration must then say what it said, in float32 token for token,
while requests are aborted, preempted, and run into the end of the context around it.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import httpx
import pytest

from tests.matrix import findings
from tests.matrix.asks import everything, without_seed
from tests.matrix.findings import Reply, send, send_all
from tests.matrix.setups import SETUPS, TOGETHER, Setup, hybrid, plain

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.timeout(1200)]

ASKS = everything()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reply]:
    """Plain vLLM's answers, to asks without seeds: a seeded request whose prompt it reads in
    several steps ends it on a CPU, and of what is drawn only the outline is compared."""
    folder = tmp_path_factory.mktemp("plain")
    assert not [ask.name for ask in ASKS if ask.exact and "seed" in ask.body]
    with plain(folder) as server:
        replies = send_all(server.url, [without_seed(ask) for ask in ASKS], TOGETHER)
        assert server.metric("vllm:num_preemptions_total") > 0
    (folder / "replies.json").write_text(json.dumps({n: asdict(r) for n, r in replies.items()}))
    return replies


def test_plain_vllm_answers_what_the_matrix_asks(expected: dict[str, Reply]) -> None:
    assert len(ASKS) == len(expected) >= 60
    for ask in ASKS:
        wanted = (400, 422) if ask.kind == "refused" else (200,)
        assert expected[ask.name].status in wanted, (ask.name, expected[ask.name])
    assert list(findings.of_replies(ASKS, expected, expected)) == []


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)
def test_a_configuration_serves_everything(
    setup: Setup, expected: dict[str, Reply], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(setup.name)
    arms = {"cache", "model"} if setup.drafter else {"cache"}
    with hybrid(setup, folder) as server:
        got = send_all(server.url, ASKS, TOGETHER)
        (folder / "replies.json").write_text(json.dumps({n: asdict(r) for n, r in got.items()}))
        found = list(findings.of_replies(ASKS, got, expected))
        found += findings.of_the_end(server, setup.drafts, arms)
        if server.lives():
            if not server.metric("vllm:num_preemptions_total"):
                found.append("nothing was preempted: the matrix leaves too much memory")
            with httpx.Client(base_url=server.url, timeout=60.0) as client:
                first = next(ask for ask in ASKS if ask.kind == "copy")
                found += findings.of_replies([first], {first.name: send(client, first)}, expected)
    assert found == [], "\n".join(found)

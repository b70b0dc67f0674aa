"""What one tenant's hostile drafts teach costs the others next to nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from decoder.policy.first import first_policy
from decoder.settings import WorkerSettings
from pipelines.lab.drift.stream import Learning, Worker, decode
from pipelines.lab.drift.traffic import Machine, Request, misleading
from pipelines.lab.replay.engine import model_acceptance
from pipelines.lab.replay.traces import Trace
from tests.pipelines.lab.replay.samples import copying_traces, token_classes

REQUESTS = 160
LOSS = 0.02
HONEST, HOSTILE = "honest", "hostile"
BROKEN = 4
"""A hostile tenant's prompts hold its outputs with one of so many tokens wrong."""


def named(trace: Trace, name: str) -> Trace:
    return replace(trace, session=name, model_accepted=model_acceptance(trace, 2.2))


def honest_rate(requests: list[Request], learning: Learning) -> float:
    """Tokens a microsecond of the honest ones, while a learner hears of all of them."""
    costs, first = [Machine().costs], first_policy("drift")
    served = Worker(WorkerSettings())
    found = decode(requests, costs, first, served, token_classes(), learning.told)
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
    taught, untaught = (Learning.begun(first_policy("drift")) for _ in range(2))
    beside = honest_rate(both, taught)
    alone = honest_rate([r for r in both if r.tenant == HONEST], untaught)
    assert taught.promotions, "nothing was learned, so nothing was shown"
    assert beside >= (1.0 - LOSS) * alone

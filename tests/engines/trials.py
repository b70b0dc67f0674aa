"""Trials: requests run to their end on an engine whose policy is swapped under them.

The contract suite reads a trial without knowing the engine. ``drafts`` holds every cache draft the
router was offered, by request and position, so that labels can be recomputed from what came out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoder.contracts.bundle import Policy, frequency_policy
from tests.conftest import random_policy
from tests.engines.plugged import run_apart
from tests.engines.tiny import labelling, learned_policy, session_of, tiny_engine, tiny_prompt

Drafts = dict[tuple[str, int], list[int]]


@dataclass(frozen=True)
class Ask:
    """One request; ``workload`` names it, in its events too. Token ids."""

    workload: str
    prompt: list[int]
    max_tokens: int
    stop_ids: list[int] = field(default_factory=list)
    speculate: bool = True


@dataclass(frozen=True)
class Trial:
    """What an engine made of its requests; events and counts as the router told them."""

    max_model_len: int
    arms: set[str]
    """Arms the engine has drafts for."""
    asks: list[Ask]
    tokens: list[list[int]]
    finish: list[str]
    events: list[dict[str, Any]]
    drafts: Drafts
    counts: dict[str, Any]
    logits_missed: list[float]
    """By how much the tokens fell short of the most probable ones, at worst, in each request."""
    beside: dict[str, Any] = field(default_factory=dict)
    """What else its process has shown."""


def swapped_policies() -> list[Policy]:
    """Always cache, never, counting, and two networks; used in turns."""
    learned = [replace(random_policy(), threshold=0.5), learned_policy()]
    return [frequency_policy("s", t) for t in (0.0, 1e9, 2.0)] + learned


def note_drafts(router: Any) -> list[tuple[str, int, list[int]]]:
    """From now on, what the router's cache proposes: request, tokens before it, tokens of it.

    Requests are named as events name them.
    """
    noted: list[tuple[str, int, list[int]]] = []
    choose = router.choose

    def choosing(report: Any) -> Any:
        decisions = choose(report)
        found = drafts_in(router, report.names)
        noted.extend((told, at, tokens) for _, told, at, tokens in found)
        return decisions

    router.choose = choosing
    return noted


def drafts_in(router: Any, names: Sequence[str]) -> list[tuple[str, str, int, list[int]]]:
    """The cache drafts that were just proposed: of whom, under which name events tell of it, tokens
    before it, and its own."""
    found = []
    for name in names:
        if name in router:
            table, slot = router.requests.table, router.requests.slots[name]
            cycle = table.requests["cycle"][slot]
            length = int(table.rows[cycle]["draft_len"]) if cycle >= 0 else 0
            if length:
                told = router.requests.options[slot].opaque or name
                at = int(table.requests["length"][slot])
                found.append((name, told, at, table.drafts[cycle, :length].tolist()))
    return found


def by_workload(
    noted: Sequence[tuple[str, int, list[int]]], events: Sequence[dict[str, Any]], asks: list[Ask]
) -> Drafts:
    """Drafts by the names of the asks, and by output tokens committed before."""
    workloads = {e["request"]: e["workload"] for e in events}
    prompts = {a.workload: len(a.prompt) for a in asks}
    return {
        (workloads[request], before - prompts[workloads[request]]): tokens
        for request, before, tokens in noted
    }


@torch.inference_mode()
def logits_missed(model: Any, asks: list[Ask], tokens: list[list[int]]) -> list[float]:
    """Each output read by the target alone, in one pass: 0 where every token was its choice."""
    missed = []
    for ask, output in zip(asks, tokens, strict=True):
        ids = torch.tensor([[*ask.prompt, *output[:-1]]])
        logits = model(ids, logits_to_keep=len(output)).logits[0]
        said = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        missed.append(float((logits.max(-1).values - said).max()))
    return missed


def tiny_trial(model: bool) -> Trial:
    """The reference engine in this process, on a random model of twelve tokens."""
    limit = 96
    engine = tiny_engine(2, max_model_len=limit)
    session, log = session_of(engine, labelling(0.0, model))
    asks = [Ask(f"free-{i}", tiny_prompt(i), 40) for i in range(4)]
    asks += [Ask(f"off-{i}", tiny_prompt(i), 40, speculate=False) for i in range(2)]
    asks += [Ask(f"stop-{i}", tiny_prompt(i), 40, stop_ids=[3, 8]) for i in range(4)]
    asks += [Ask(f"short-{n}", tiny_prompt(5), n) for n in (1, 2, 5)]
    asks += [Ask(f"context-{i}", tiny_prompt(i, 80), 500) for i in range(2)]
    noted = note_drafts(session.router)
    _swap_at_every_choice(session.router)
    made = [
        session.generate(
            ask.prompt, ask.max_tokens, stop_ids=frozenset(ask.stop_ids), workload=ask.workload,
            speculate=ask.speculate,
        )
        for ask in asks
    ]  # fmt: skip
    events = [e._asdict() for e in log.every if e.draft_len]
    arms = {"cache", "model"} if model else {"cache"}
    tokens, finish = [g.tokens for g in made], [g.finish for g in made]
    return Trial(
        limit, arms, asks, tokens, finish, events, by_workload(noted, events, asks),
        counts_of(session.router, faults=0), logits_missed(engine.target.model, asks, tokens),
    )  # fmt: skip


def counts_of(router: Any, faults: int) -> dict[str, Any]:
    """What the router has counted, as JSON."""
    counters = router.counters
    return {
        "started": counters.started, "stopped": counters.stopped, "tokens": counters.tokens,
        "labelled": counters.labelled, "cycles": dict(counters.cycles),
        "accepted": dict(counters.accepted), "faults": faults,
        "last_version": router.policy.version,
    }  # fmt: skip


def _swap_at_every_choice(router: Any) -> None:
    policies, version = itertools.cycle(swapped_policies()), itertools.count(1)
    choose = router.choose

    def choosing(report: Any) -> Any:
        router.policy = replace(next(policies), version=next(version))
        return choose(report)

    router.choose = choosing


def vllm_trial(folder: Path, method: str, runner: Mapping[str, Any], beside: str) -> Trial:
    """vLLM with a random model of few tokens, in a process of its own: on its V2 runner,
    interpreted, where ``runner`` has ``ahead``; ``beside`` is for :mod:`tests.engines.decode`."""
    from transformers import LlamaForCausalLM

    from tests.engines import interpreted, two_heads

    target, drafter = two_heads.write_models(folder, FEW, FEW * 2 // 3)
    limit = 160
    asks = two_heads_asks(limit)
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 12}
    if method == "eagle3":
        speculative |= {"model": str(drafter)}
    # by the clock the floor may put one arm in force for long
    variables = {"HVD_WORKER_ENABLED": "1", "HVD_WORKER_FLOOR": "0", "MY_X": "1", "OUR_X": "1"}
    job = {
        "model": str(target), "max_model_len": limit, "asks": [asdict(a) for a in asks],
        "speculative_config": speculative, "beside": beside, **runner,
    }  # fmt: skip
    if runner:
        variables |= interpreted.VARIABLES
    else:
        speculative["disable_padded_drafter_batch"] = True
    result = run_apart("tests.engines.decode", folder, job, **variables)
    model = LlamaForCausalLM.from_pretrained(target).eval()
    drafts = by_workload(result["noted"], result["events"], asks)
    return Trial(
        limit, {"cache", "model"} if method == "eagle3" else {"cache"}, asks, result["tokens"],
        result["finish"], result["events"], drafts, result["counts"],
        logits_missed(model, asks, result["tokens"]), result["beside"],
    )  # fmt: skip


FEW = 12
"""Tokens of such a model."""


def two_heads_asks(limit: int) -> list[Ask]:
    """Requests to a random model, which repeats itself before long."""
    from tests.engines.two_heads import prompts

    texts = prompts(4, FEW)
    asks = [Ask(f"free-{i}", ids, 40) for i, ids in enumerate(texts)]
    asks += [Ask("off-0", texts[0], 40, speculate=False)]
    asks += [Ask(f"stop-{i}", ids, 40, stop_ids=[3, 8]) for i, ids in enumerate(texts)]
    asks += [Ask(f"short-{n}", texts[0], n) for n in (1, 2, 5)]
    long = list(itertools.islice(itertools.cycle(texts[1]), limit - 24))
    return [*asks, Ask("context-0", long, 500)]


def prefix_matched(draft: Sequence[int], continuation: Sequence[int]) -> int:
    """Tokens of ``draft`` that were committed: the definition of a label."""
    wrong = [a != b for a, b in zip(draft, continuation, strict=False)]
    return int(np.argmax(wrong)) if any(wrong) else len(wrong)

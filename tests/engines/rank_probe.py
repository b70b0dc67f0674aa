"""What a test does to each rank of a running engine, in the rank's own process.

``begin`` is called on every rank before a round of prompts, ``end`` after it. A round's name says
what befalls the ranks in it:

==================  ==============================================================================
``steady``          rank 0 keeps its policy, so that sides play their rounds to the end
``swapping``        rank 0 changes its policy at every third choice, as in all that follow
``leader fails``    rank 0 cannot choose, now and then, or makes a plan that nobody can read
``one breaks``      a pass fails on the last rank alone
==================  ==============================================================================
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

EVERY = 7
"""Calls from one fault to the next."""
_seen: dict[str, Any] = {}


def begin(worker: Any, name: str) -> None:
    """Watch this rank, and give it its faults."""
    from decoder.engines.vllm.hooks import adapter_of
    from tests.engines.plugged import keep_events

    runner = worker.model_runner
    adapter = adapter_of(runner)
    assert adapter is not None
    _restore(runner, adapter)
    _seen.clear()
    _seen.update(proposals=[], adapter=adapter, passes=[])
    _note_proposals(runner)
    _note_passes(runner)
    if adapter.worker is not None:
        adapter.worker.faults = 0
        _seen["ring"] = keep_events(adapter.worker)
        if name != "steady":
            _swap(adapter.worker.router)
    if name == "leader fails" and adapter.worker is not None:
        _now_and_then(adapter.worker.router, "choose", 0)
        _now_and_then(adapter, "_decided", 3, lambda: "no plan at all")
    elif name == "one breaks" and adapter.worker is None:
        _now_and_then(runner.drafter, "_greedy_sample", 0)


def end(worker: Any) -> dict[str, Any]:
    """What happened on this rank since ``begin``, as JSON."""
    adapter = _seen["adapter"]
    ours = adapter.worker
    told: dict[str, Any] = {
        "rank": adapter.ranks.rank, "proposals": _seen["proposals"], "passes": _seen["passes"],
        "decides": ours is not None,
        "modules": sorted({"decoder.worker", "decoder.core.router", "kafka"} & set(sys.modules)),
        "threads": sorted(t.name for t in threading.enumerate()),
    }  # fmt: skip
    if ours is not None:
        counters = ours.router.counters
        told["faults"] = ours.faults
        told["cycles"], told["accepted"] = dict(counters.cycles), dict(counters.accepted)
        told["events"] = len(_seen["ring"])
        told["versions"] = ours.router.policy.version
        told["sides"] = {name: sums.tokens for name, sums in ours.router.interleaver.totals.items()}
    return told


def _note_proposals(runner: Any) -> None:
    propose = type(runner).propose_draft_token_ids

    def noting(*arguments: Any, **named: Any) -> Any:
        drafts = propose(runner, *arguments, **named)
        _seen["proposals"].append([list(runner.input_batch.req_ids), drafts])
        return drafts

    runner.propose_draft_token_ids = noting


def _note_passes(runner: Any) -> None:
    forward = runner.drafter.model.forward

    def noting(*arguments: Any, **named: Any) -> Any:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        _seen["passes"].append(0 if ids is None else len(ids))
        return forward(*arguments, **named)

    runner.drafter.model.forward = noting
    _seen["restore"] = lambda: setattr(runner.drafter.model, "forward", forward)


def _swap(router: Any) -> None:
    from decoder.contracts.bundle import frequency_policy

    policies = itertools.cycle([frequency_policy(router.policy.scope, t) for t in (0.0, 1e9, 2.0)])
    choose, calls = type(router).choose, itertools.count(1)

    def swapping(*arguments: Any, **named: Any) -> Any:
        call = next(calls)
        if call % 3 == 0:
            router.policy = replace(next(policies), version=call)
        return choose(router, *arguments, **named)

    router.choose = swapping


def _now_and_then(
    owner: Any, name: str, offset: int, instead: Callable[[], Any] | None = None
) -> None:
    """Every so many calls ``owner.name`` raises, or returns what it should not."""
    original, calls = getattr(owner, name), itertools.count(offset)

    def failing(*arguments: Any, **named: Any) -> Any:
        if next(calls) % EVERY == EVERY - 1:
            if instead is not None:
                return instead()
            raise RuntimeError(f"{name} fails")
        return original(*arguments, **named)

    setattr(owner, name, failing)


def _restore(runner: Any, adapter: Any) -> None:
    """Take back what earlier rounds put in the way."""
    if "restore" in _seen:
        _seen.pop("restore")()
    for owner, names in (
        (runner, ["propose_draft_token_ids"]),
        (runner.drafter, ["_greedy_sample"]),
        (adapter, ["_decided"]),
        *([(adapter.worker.router, ["choose"])] if adapter.worker is not None else []),
    ):
        for name in names:
            vars(owner).pop(name, None)

"""The figures of ``hvd bench decode``. Definitions follow the paper (Appendix A, G).

With T decoded tokens, decoding time S and C cycles over a set of prompts: throughput ``T / S``,
``1000 C / T`` cycles per 1K tokens, ``S / C`` a cycle, and ``T / C - 1`` draft tokens accepted a
cycle. A prompt's first token comes with its prefill and is in none of these.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from pipelines.lab.bench.results import Cycle, Labelled, Measured, Outcome, Results
from pipelines.stats import against_best, columns, interval, loops, median, over, rate

CONTRACT: Final = "hvd.bench.decode.v1"
HIGH_PAYOFF: Final = 6
"""Accepted tokens from which the paper calls a cache draft high-payoff (Appendix G)."""

ByMethod = Mapping[str, Outcome]


def typical(prompts: Sequence[ByMethod]) -> dict[str, list[tuple[float, float]]]:
    """Decoded tokens and microseconds of each method, by prompt, if every cycle took the median
    time of its kind.

    On a machine that does other work a few stalled cycles can outweigh all others, and a busy
    minute falls on one method. With times over all methods neither moves a ratio by much. Cycles
    of one kind do about the same work: the same arm, and as many binary digits of verified length.
    """

    def kind(cycle: Cycle) -> tuple[str, int]:
        return cycle.arm, cycle.verified.bit_length()

    kinds = defaultdict(list)
    for cycle in (c for p in prompts for o in p.values() for c in o.cycles):
        kinds[kind(cycle)].append(cycle.draft_us + cycle.verify_us)
    times = {each: float(np.median(found)) for each, found in kinds.items()}
    return {
        name: [(p[name].decoded, sum(times[kind(c)] for c in p[name].cycles)) for p in prompts]
        for name in prompts[0]
    }


def payoff(drafts: Sequence[Labelled]) -> dict[str, float | int | None]:
    """How well a policy tells high-payoff cache drafts, over all that were proposed (Table 2).

    A censored label counts where its bound already decides: at ``HIGH_PAYOFF`` or more it is high,
    below that it says nothing and is left out.
    """
    known = [d for d in drafts if not d.censored or d.accepted >= HIGH_PAYOFF]
    high = sum(d.accepted >= HIGH_PAYOFF for d in known)
    picked = [d.accepted >= HIGH_PAYOFF for d in known if d.predicted >= HIGH_PAYOFF]
    return {
        "drafts": len(known),
        "high_payoff_share": over(high, len(known)),
        "selected_share": over(len(picked), len(known)),
        "precision_at_6": over(sum(picked), len(picked)),
        "recall_at_6": over(sum(picked), high),
    }


def speeds(prompts: Sequence[ByMethod], method: str) -> dict[str, Any]:
    """Throughput, cycles and arms of ``method``."""
    mine, usual = [p[method] for p in prompts], typical(prompts)
    spent, oracle, greedy = (
        [p[name].spent for p in prompts if name in p] for name in (method, "oracle", "greedy")
    )
    cycles = [c for o in mine for c in o.cycles]
    tokens = sum(o.decoded for o in mine)
    accepted = {arm: [c.accepted for c in cycles if c.arm == arm] for arm in ("cache", "model")}
    return {
        "prompts": len(mine),
        "tokens": sum(len(o.tokens) for o in mine),
        "tok_per_s": rate(spent),
        "speedup_vs_greedy": over(rate(spent), rate(greedy)),
        "speedup_vs_greedy_interval": interval(columns(spent), columns(greedy)) if greedy else None,
        "tok_per_s_typical": rate(usual[method]),
        "speedup_vs_greedy_typical": over(rate(usual[method]), rate(usual.get("greedy", []))),
        "fraction_of_oracle": over(rate(spent), rate(oracle)),
        "cycles_per_1k": over(1000 * len(cycles), tokens),
        "ms_per_cycle": over(sum(o.decode_us for o in mine) / 1000, len(cycles)),
        "ms_per_cycle_drafting": over(sum(c.draft_us for c in cycles) / 1000, len(cycles)),
        "mean_accepted": over(tokens - len(cycles), len(cycles)),
        **{f"mean_accepted_{arm}": over(sum(n), len(n)) for arm, n in accepted.items()},
        **{f"{arm}_share": over(len(n), len(cycles)) for arm, n in accepted.items()},
        "prefill_ms_median": over(median(o.prefill_us for o in mine), 1000),
    }


def _over_best(prompts: Sequence[ByMethod], method: str) -> dict[str, Any]:
    """A learned method over the best rule, which is picked on the other half of the prompts; every
    cycle at the median time of its kind."""
    found = None
    if method.startswith("hybrid"):
        spent = {name: columns(pairs) for name, pairs in typical(prompts).items()}
        rules = {m: s for m, s in spent.items() if not m.startswith(("hybrid", "oracle"))}
        found = against_best(spent[method], rules)
    return {
        "over_best_rule": found and found.ratio,
        "over_best_rule_interval": found and (found.low, found.high),
        "best_rules": found and found.rivals,
    }


def measure(prompts: Sequence[ByMethod], method: str) -> dict[str, Any]:
    """Every figure of ``method`` over ``prompts``; those that loop and those that do not, apart.

    Returns:
        the record of one (dataset, method), without its names. A figure that cannot be had (no
        cycles, no greedy run, no cache drafts) is None.
    """
    looping = [p for p in prompts if loops(p[method].tokens)]
    straight = [p for p in prompts if not loops(p[method].tokens)]
    equal = [p[method].tokens == p["greedy"].tokens for p in prompts if "greedy" in p]
    drafts = [d for p in prompts for d in p[method].drafts]
    return {
        **speeds(prompts, method),
        "exact": all(equal) if equal else None,
        "loop_share": over(len(looping), len(prompts)),
        **payoff(drafts),
        "looping": speeds(looping, method) if looping else None,
        "not_looping": speeds(straight, method) if straight else None,
    }


def differing(results: Results) -> list[str]:
    """One sentence for each generation that is not greedy's, token for token."""
    found = []
    for key, prompt in results.prompts.items():
        for name, outcome in prompt.outcomes.items():
            plain = prompt.outcomes.get("greedy", outcome)
            pairs = itertools.zip_longest(outcome.tokens, plain.tokens)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if at is not None:
                found.append(
                    f"{name} differs from greedy on prompt {key.prompt} of {key.dataset}, "
                    f"from output token {at} on."
                )
    return found


def _pooled(
    results: Results, name: str, of: Callable[[Measured], str], by_dataset: bool = False
) -> list[dict[str, Any]]:
    """One record for each (group, method), in run order; ``name`` is the group's column.

    Those of datasets say what the dataset is, too, and compare with the best rule.
    """
    groups: dict[str, list[Measured]] = defaultdict(list)
    for prompt in results.prompts.values():
        groups[of(prompt)].append(prompt)
    made = []
    for group, found in groups.items():
        prompts = [p.outcomes for p in found]
        for method in results.settings["methods"]:
            record = {name: group, "method": method} | measure(prompts, method)
            if by_dataset:
                record |= {"family": found[0].family}
                record |= _over_best(prompts, method)
            made.append(record)
    return made


def summary(results: Results) -> dict[str, Any]:
    """Everything that ``--json`` writes."""
    return {
        "contract": CONTRACT,
        "began": results.began,
        "settings": results.settings,
        "prompts": len(results.prompts),
        "prompts_cut": sum(p.cut > 0 for p in results.prompts.values()),
        "interrupted": results.interrupted,
        "out_of_time": results.out_of_time,
        "problems": results.problems,
        "differing": differing(results),
        "records": _pooled(results, "dataset", lambda p: p.key.dataset, by_dataset=True),
        "families": _pooled(results, "family", lambda p: p.family),
        "overall": _pooled(results, "group", lambda p: "all"),
    }

"""The figures of ``hvd bench decode``. Definitions follow the paper (Appendix A, G).

With T decoded tokens, decoding time S and C cycles over a set of prompts: throughput ``T / S``,
``1000 C / T`` cycles per 1K tokens, ``S / C`` a cycle, and ``T / C - 1`` draft tokens accepted a
cycle. A prompt's first token comes with its prefill and is in none of these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from pipelines.bench.results import CONTRACT, Cycle, Labelled, Outcome, PromptFacts, Results
from pipelines.bench.stats import loops, over, quartiles, rate, ratio_interval
from pipelines.replay.baseline import Spent, against_best
from pipelines.replay.calibration import calibration

HIGH_PAYOFF: Final = 6
"""Accepted tokens from which the paper calls a cache draft high-payoff (Appendix G)."""

ByMethod = Mapping[str, Outcome]
Kind = tuple[str, int]
"""Arm of a cycle, and how many binary digits its verified length has: cycles of one kind do about
the same work."""


def _kind(cycle: Cycle) -> Kind:
    return cycle.arm, cycle.verified.bit_length()


def typical_times(outcomes: Iterable[Outcome]) -> dict[Kind, float]:
    """Median microseconds of a cycle of each kind."""
    kinds: dict[Kind, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for c in outcome.cycles:
            kinds[_kind(c)].append(c.draft_us + c.verify_us)
    return {kind: float(np.median(times)) for kind, times in kinds.items()}


def typical_rate(outcomes: Sequence[Outcome], times: Mapping[Kind, float]) -> float | None:
    """Tokens a second if every cycle took the time of its kind; None without cycles.

    On a machine that does other work a few stalled cycles can outweigh all others, and a busy
    minute falls on one method. With ``times`` over all methods neither moves a ratio by much.
    """
    micros = sum(times[_kind(c)] for outcome in outcomes for c in outcome.cycles)
    return sum(o.decoded for o in outcomes) / micros * 1e6 if micros else None


def payoff(drafts: Sequence[Labelled]) -> dict[str, float | int | None]:
    """How well a policy tells high-payoff cache drafts, over all that were proposed (Table 2).

    A censored label counts where its bound already decides: at ``HIGH_PAYOFF`` or more it is high,
    below that it says nothing and is left out.
    """
    known = [d for d in drafts if not d.censored or d.accepted >= HIGH_PAYOFF]
    high = [d.accepted >= HIGH_PAYOFF for d in known]
    picked = [d.predicted >= HIGH_PAYOFF for d in known]
    both = sum(h and p for h, p in zip(high, picked, strict=True))
    return {
        "drafts": len(known),
        "high_payoff_share": over(sum(high), len(known)),
        "selected_share": over(sum(picked), len(known)),
        "precision_at_6": over(both, sum(picked)),
        "recall_at_6": over(both, sum(high)),
    }


def _deciles(drafts: Iterable[Labelled]) -> list[dict[str, float]]:
    known = [d for d in drafts if not d.censored]
    return calibration([d.predicted for d in known], [d.accepted for d in known])


def speeds(prompts: Sequence[ByMethod], method: str) -> dict[str, Any]:
    """Throughput, cycles and arms of ``method`` over prompts that every method decoded."""
    mine = [p[method] for p in prompts]
    pairs = [(p[method], p["greedy"]) for p in prompts if "greedy" in p]
    own, greedy = ([pair[side] for pair in pairs] for side in (0, 1))
    single = [over(rate([a.spent]), rate([b.spent])) for a, b in pairs]
    cycles = [c for o in mine for c in o.cycles]
    tokens = sum(o.decoded for o in mine)
    speed, greedy_speed = rate(o.spent for o in mine), rate(o.spent for o in greedy)
    times = typical_times(o for p in prompts for o in p.values())
    accepted = {arm: [c.accepted for c in cycles if c.arm == arm] for arm in ("cache", "model")}
    each = [r for o in mine if (r := rate([o.spent])) is not None]
    return {
        "prompts": len(mine),
        "tokens": sum(len(o.tokens) for o in mine),
        "tok_per_s": speed,
        "tok_per_s_quartiles": quartiles(each),
        "speedup_vs_greedy": over(rate(o.spent for o in own), greedy_speed),
        "speedup_vs_greedy_interval": ratio_interval(
            [o.spent for o in own], [o.spent for o in greedy]
        ),
        "speedup_vs_greedy_quartiles": quartiles([s for s in single if s is not None]),
        "tok_per_s_typical": typical_rate(mine, times),
        "speedup_vs_greedy_typical": over(typical_rate(mine, times), typical_rate(greedy, times)),
        "fraction_of_oracle": over(
            speed, rate(p["oracle"].spent for p in prompts if "oracle" in p)
        ),
        "cycles_per_1k": over(1000 * len(cycles), tokens),
        "ms_per_cycle": over(sum(o.decode_us for o in mine) / 1000, len(cycles)),
        "ms_per_cycle_drafting": over(sum(c.draft_us for c in cycles) / 1000, len(cycles)),
        "mean_accepted": over(tokens - len(cycles), len(cycles)),
        **{f"mean_accepted_{arm}": over(sum(n), len(n)) for arm, n in accepted.items()},
        **{f"{arm}_share": over(len(n), len(cycles)) for arm, n in accepted.items()},
        "prefill_ms_median": float(np.median([o.prefill_us for o in mine])) / 1000,
    }


def _over_best(prompts: Sequence[ByMethod], method: str) -> dict[str, Any]:
    """A learned method over the best rule, which is picked on the other half of the prompts; every
    cycle at the median time of its kind.
    """
    if not method.startswith("hybrid"):
        return dict.fromkeys(("over_best_rule", "over_best_rule_interval", "best_rules"))
    rules = [m for m in prompts[0] if not m.startswith(("hybrid", "oracle"))]
    times = typical_times(o for p in prompts for o in p.values())

    def spent(name: str) -> Spent:
        made = [p[name] for p in prompts]
        micros = [sum(times[_kind(c)] for c in o.cycles) for o in made]
        return np.array([o.decoded for o in made], float), np.array(micros, float)

    found = against_best(spent(method), {m: spent(m) for m in rules})
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
    greedy = [p for p in prompts if "greedy" in p]
    drafts = [d for p in prompts for d in p[method].drafts]
    return {
        **speeds(prompts, method),
        "exact": all(p[method].tokens == p["greedy"].tokens for p in greedy) if greedy else None,
        "loop_share": over(len(looping), len(prompts)),
        **payoff(drafts),
        "calibration": {
            "cache": _deciles(drafts),
            "model": _deciles(d for p in prompts for d in p[method].model_drafts),
        },
        "looping": speeds(looping, method) if looping else None,
        "not_looping": speeds(straight, method) if straight else None,
    }


def differing(results: Results) -> list[str]:
    """One sentence for each generation that is not greedy's, token for token."""
    found = []
    for key, by_method in results.whole().items():
        for name, outcome in by_method.items():
            greedy = by_method.get("greedy")
            if greedy is not None and outcome.tokens != greedy.tokens:
                pairs = enumerate(zip(outcome.tokens, greedy.tokens, strict=False))
                shorter = min(len(outcome.tokens), len(greedy.tokens))
                at = next((i for i, (a, b) in pairs if a != b), shorter)
                note = "" if key.template == "chat" else f" (template {key.template})"
                found.append(
                    f"{name} differs from greedy on prompt {key.prompt} of {key.dataset}{note}, "
                    f"from output token {at} on."
                )
    return found


def _pooled(
    results: Results, by: Callable[[PromptFacts], str], name: str, by_dataset: bool = False
) -> list[dict[str, Any]]:
    """One record for each (template, group, method), in run order; ``name`` is the group's column.

    Those of datasets say what the dataset is, too, and compare with the best rule.
    """
    made = []
    for template in results.settings["templates"]:
        groups: dict[str, list[ByMethod]] = defaultdict(list)
        facts: dict[str, PromptFacts] = {}
        for key, by_method in results.whole().items():
            if key.template == template:
                group = by(results.prompts[key])
                groups[group].append(by_method)
                facts[group] = results.prompts[key]
        for group, prompts in groups.items():
            what = {"family": facts[group].family, "standin_for": facts[group].standin_for or None}
            for method in results.settings["methods"]:
                record = {name: group, **(what if by_dataset else {}), "template": template}
                record |= {"method": method, **measure(prompts, method)}
                made.append(record | (_over_best(prompts, method) if by_dataset else {}))
    return made


def summary(results: Results) -> dict[str, Any]:
    """Everything that ``--json`` writes."""
    whole = results.whole()
    return {
        "contract": CONTRACT,
        "began": results.began,
        "settings": results.settings,
        "prompts": len(whole),
        "prompts_cut": sum(results.prompts[k].cut > 0 for k in whole),
        "interrupted": results.interrupted,
        "out_of_time": results.out_of_time,
        "problems": results.problems,
        "differing": differing(results),
        "records": _pooled(results, lambda f: f.key.dataset, "dataset", by_dataset=True),
        "families": _pooled(results, lambda f: f.family, "family"),
        "overall": _pooled(results, lambda f: "all", "group"),
    }

"""The figures of a benchmark, from its generations. Definitions follow the paper (Appendix A, G).

With T decoded tokens, decoding time S and C cycles over a set of prompts: throughput ``T / S``,
``1000 C / T`` cycles per 1K tokens, ``S / C`` a cycle, and ``T / C - 1`` draft tokens accepted a
cycle. A prompt's first token comes with its prefill and is in none of these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from pipelines.bench.known import over
from pipelines.bench.results import Key, Labelled, Outcome, PromptFacts, Results
from pipelines.replay.baseline import Spent, against_best, interval
from pipelines.watch.calibration import calibration

HIGH_PAYOFF: Final = 6
"""Accepted tokens from which the paper calls a cache draft high-payoff (Appendix G)."""
LOOP: Final = 32
"""An output in which a run of this many tokens comes twice is one that loops."""

ByMethod = Mapping[str, Outcome]


def loops(tokens: Sequence[int]) -> bool:
    """Whether ``tokens`` hold the same run of ``LOOP`` tokens twice, overlapping or not."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(tokens) - LOOP + 1):
        run = tuple(tokens[start : start + LOOP])
        if run in seen:
            return True
        seen.add(run)
    return False


class Spell(Protocol):
    """Tokens and the time that they took."""

    @property
    def decoded(self) -> int:
        """Tokens."""

    @property
    def decode_us(self) -> float:
        """Microseconds."""


def rate(outcomes: Iterable[Spell]) -> float | None:
    """Tokens a second over all of ``outcomes``; None where nothing was decoded."""
    tokens = micros = 0.0
    for outcome in outcomes:
        tokens += outcome.decoded
        micros += outcome.decode_us
    return tokens / micros * 1e6 if tokens and micros else None


class Timed(Protocol):
    """A decoding cycle, of this package or of the engine."""

    @property
    def arm(self) -> str:
        """What it verified."""

    @property
    def verified(self) -> int:
        """Draft tokens verified."""

    @property
    def draft_us(self) -> float:
        """Microseconds of proposing, deciding and drafting."""

    @property
    def verify_us(self) -> float:
        """Microseconds of the target's pass, and of acceptance."""


class Decoded(Protocol):
    """Tokens and the cycles that made them."""

    @property
    def decoded(self) -> int:
        """Tokens that the cycles committed."""

    @property
    def cycles(self) -> Sequence[Timed]:
        """All of them."""


Kind = tuple[str, int]
"""Arm of a cycle, and how many binary digits its verified length has."""


def kind_of(cycle: Timed) -> Kind:
    """Cycles of one kind do about the same work."""
    return cycle.arm, cycle.verified.bit_length()


def typical_times(outcomes: Iterable[Decoded]) -> dict[Kind, float]:
    """Median microseconds of a cycle of each kind."""
    kinds: dict[Kind, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for c in outcome.cycles:
            kinds[kind_of(c)].append(c.draft_us + c.verify_us)
    return {kind: float(np.median(times)) for kind, times in kinds.items()}


def typical_rate(outcomes: Iterable[Decoded], times: Mapping[Kind, float]) -> float | None:
    """Tokens a second if every cycle took the time of its kind; None without cycles.

    On a machine that does other work a few stalled cycles can outweigh all others, and a busy
    minute falls on one method. With ``times`` over all methods neither moves a ratio by much.
    """
    found = list(outcomes)
    micros = sum(times[kind_of(c)] for outcome in found for c in outcome.cycles)
    return sum(o.decoded for o in found) / micros * 1e6 if micros else None


def quartiles(values: Sequence[float]) -> tuple[float, float, float] | None:
    """First quartile, median and third quartile."""
    if not values:
        return None
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float(low), float(middle), float(high)


def ratio_interval(mine: Sequence[Spell], theirs: Sequence[Spell]) -> tuple[float, float] | None:
    """95% bootstrap interval of ``rate(mine) / rate(theirs)``, resampling them in pairs."""
    return interval(_spent(mine), _spent(theirs))


def _spent(side: Sequence[Spell]) -> Spent:
    return np.array([o.decoded for o in side], float), np.array([o.decode_us for o in side], float)


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


def _deciles(drafts: Sequence[Labelled]) -> list[dict[str, float]]:
    known = [d for d in drafts if not d.censored]
    return calibration([d.predicted for d in known], [d.accepted for d in known])


def speeds(prompts: Sequence[ByMethod], method: str) -> dict[str, Any]:
    """Throughput, cycles and arms of ``method`` over prompts that every method decoded."""
    mine = [p[method] for p in prompts]
    cycles = [c for o in mine for c in o.cycles]
    tokens = sum(o.decoded for o in mine)
    own = rate(mine)
    times = typical_times(o for p in prompts for o in p.values())
    by_arm = {arm: [c.accepted for c in cycles if c.arm == arm] for arm in ("cache", "model")}
    return {
        "prompts": len(mine),
        "tokens": sum(len(o.tokens) for o in mine),
        "tok_per_s": own,
        "tok_per_s_quartiles": quartiles([r for o in mine if (r := rate([o])) is not None]),
        **_against(prompts, method, "greedy"),
        "tok_per_s_typical": typical_rate(mine, times),
        "speedup_vs_greedy_typical": over(
            typical_rate(mine, times),
            typical_rate((p["greedy"] for p in prompts if "greedy" in p), times),
        ),
        "fraction_of_oracle": over(own, rate([p["oracle"] for p in prompts if "oracle" in p])),
        "cycles_per_1k": over(1000 * len(cycles), tokens),
        "ms_per_cycle": over(sum(o.decode_us for o in mine) / 1000, len(cycles)),
        "ms_per_cycle_drafting": over(sum(c.draft_us for c in cycles) / 1000, len(cycles)),
        "mean_accepted": over(tokens - len(cycles), len(cycles)),
        "mean_accepted_cache": over(sum(by_arm["cache"]), len(by_arm["cache"])),
        "mean_accepted_model": over(sum(by_arm["model"]), len(by_arm["model"])),
        "cache_share": over(len(by_arm["cache"]), len(cycles)),
        "model_share": over(len(by_arm["model"]), len(cycles)),
        "prefill_ms_median": float(np.median([o.prefill_us for o in mine])) / 1000,
    }


def _against(prompts: Sequence[ByMethod], method: str, other: str) -> dict[str, Any]:
    pairs = [(p[method], p[other]) for p in prompts if other in p]
    mine, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    single = [over(rate([a]), rate([b])) for a, b in pairs]
    return {
        f"speedup_vs_{other}": over(rate(mine), rate(theirs)),
        f"speedup_vs_{other}_interval": ratio_interval(mine, theirs),
        f"speedup_vs_{other}_quartiles": quartiles([s for s in single if s is not None]),
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
        micros = [sum(times[kind_of(c)] for c in o.cycles) for o in made]
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
    same = all(p[method].tokens == p["greedy"].tokens for p in greedy)
    return {
        **speeds(prompts, method),
        "exact": same if greedy else None,
        "loop_share": over(len(looping), len(prompts)),
        **payoff([d for p in prompts for d in p[method].drafts]),
        "calibration": {
            "cache": _deciles([d for p in prompts for d in p[method].drafts]),
            "model": _deciles([d for p in prompts for d in p[method].model_drafts]),
        },
        "looping": speeds(looping, method) if looping else None,
        "not_looping": speeds(straight, method) if straight else None,
    }


def differing(results: Results) -> list[str]:
    """One sentence for each generation that is not greedy's, token for token."""
    found = []
    for (dataset, template, prompt), by_method in results.whole().items():
        for name, outcome in by_method.items():
            greedy = by_method.get("greedy")
            if greedy is not None and outcome.tokens != greedy.tokens:
                at = first_difference(outcome.tokens, greedy.tokens)
                note = "" if template == "chat" else f" (template {template})"
                found.append(
                    f"{name} differs from greedy on prompt {prompt} of {dataset}{note}, from "
                    f"output token {at} on."
                )
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token in which the two differ, the end of the shorter included."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


Group = Callable[[PromptFacts], str]


def grouped(results: Results, by: Group, template: str) -> dict[str, list[ByMethod]]:
    """The whole prompts of one template, by what ``by`` says of them, in run order."""
    groups: dict[str, list[ByMethod]] = defaultdict(list)
    for key, by_method in results.whole().items():
        if key[1] == template:
            groups[by(results.prompts[key])].append(by_method)
    return groups


def records(results: Results) -> list[dict[str, Any]]:
    """One record for each (dataset, template, method)."""
    facts = {(f.dataset, f.template): f for f in results.prompts.values()}
    return [
        {
            "dataset": dataset,
            "family": facts[dataset, template].family,
            "standin_for": facts[dataset, template].standin_for or None,
            "template": template,
            "method": method,
            **measure(prompts, method),
            **_over_best(prompts, method),
        }
        for template in results.settings["templates"]
        for dataset, prompts in grouped(results, lambda f: f.dataset, template).items()
        for method in results.settings["methods"]
    ]


def pooled(results: Results, by: Group, name: str) -> list[dict[str, Any]]:
    """One record for each (group, template, method); ``name`` is the column of the group."""
    return [
        {name: group, "template": template, "method": method, **measure(prompts, method)}
        for template in results.settings["templates"]
        for group, prompts in grouped(results, by, template).items()
        for method in results.settings["methods"]
    ]


def summary(results: Results) -> dict[str, Any]:
    """Everything that ``--json`` writes."""
    keys: list[Key] = list(results.whole())
    return {
        "contract": "hvd.bench.decode.v1",
        "began": results.began,
        "settings": results.settings,
        "prompts": len(keys),
        "prompts_cut": sum(results.prompts[k].cut > 0 for k in keys),
        "interrupted": results.interrupted,
        "out_of_time": results.out_of_time,
        "problems": results.problems,
        "differing": differing(results),
        "records": records(results),
        "families": pooled(results, lambda f: f.family, "family"),
        "overall": pooled(results, lambda f: "all", "group"),
    }

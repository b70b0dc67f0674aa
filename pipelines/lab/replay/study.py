"""``hvd replay``: trains a policy on recordings and compares it with every rule.

A set's recordings are decoded in order, from an empty or warmed-up cache, by a router that keeps
learning, as in ``hvd bench decode``. Times come from a cost table, so figures have no measurement
noise. Policies learn from the cycles of simulated decoders, since a server sees only the positions
where it stops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from decoder.contracts.bundle import Kind, Policy, frequency_policy
from decoder.contracts.errors import SettingsError, TraceError
from decoder.contracts.features import FEATURES, TOKEN_CLASSES, FloatArray
from decoder.policy.estimate import PAPER_THRESHOLD
from learner.evaluation.costs import MIN_ARM, NOMINAL
from learner.evaluation.skill import Skill, skill_of
from learner.evaluation.tune import tune_policy
from learner.training import train
from learner.training.rows import Rows, joined
from pipelines.lab.replay import recording
from pipelines.lab.replay.regressions import RIVALS
from pipelines.lab.replay.traces import Parts, read, split
from pipelines.prompts import fitting, read_folder
from pipelines.replay.engine import CycleCosts, Simulator, Trace, oracle_cycles
from pipelines.replay.method import Method
from pipelines.replay.rivals import NEVER, PAPER_FACTOR, method
from pipelines.replay.rules import HYBRID, by_trace, spent_by_rule
from pipelines.reports import Step
from pipelines.stats import Spent, against_best
from pipelines.workloads import prompt_sets

ORACLE: Final = "oracle"
SHOWN: Final = ("hybrid", "oracle", "suffix")
"""Rules in the table, which fits 80 columns; the JSON holds all."""


def over_greedy(spent: Mapping[str, Spent]) -> dict[str, float]:
    """Each rule's tokens a unit of time, over greedy's."""
    rates = {rule: float(n.sum() / time.sum()) for rule, (n, time) in spent.items()}
    return {rule: rate / rates["greedy"] for rule, rate in rates.items()}


def with_oracle(
    traces: Sequence[Trace], policy: Policy, simulator: Simulator, warm_up: Sequence[Trace] = (),
    router_us: Callable[[str], float] = lambda rule: 0.0,
) -> dict[str, Spent]:  # fmt: skip
    """:func:`spent_by_rule`, and the oracle's tokens and time."""
    n, warm, every = len(traces), len(warm_up), [*warm_up, *traces]
    settings, mean = simulator.settings, simulator.model_mean
    spent = spent_by_rule(traces, policy, simulator, warm_up, router_us, others=RIVALS)
    prices = [CycleCosts(simulator.costs, settings)] * len(every)
    best = list(oracle_cycles(every, prices, settings, mean, warm))
    index = np.array([c.trace - warm for c, _ in best], np.int64)
    spent[ORACLE] = by_trace(index, n, [c.committed for c, _ in best], [time for _, time in best])
    return spent


def summary(sets: Mapping[str, Mapping[str, Spent]]) -> dict[str, Any]:
    """Rates over greedy's by set and rule, and the hybrid's over the best rules.

    ``hybrid_over_picked`` compares with the rule that was best on the other half of the prompts,
    ``hybrid_over_best_single`` with the one rule that is best over all sets.
    """
    over = {name: over_greedy(spent) for name, spent in sets.items()}
    means = {
        rule: _geometric([o[rule] for o in over.values()]) for rule in next(iter(over.values()))
    }
    rules = [rule for rule in means if rule not in (HYBRID, ORACLE)]
    best = {name: max(rules, key=o.__getitem__) for name, o in over.items()}
    single = max(rules, key=means.__getitem__)
    against = {name: o[HYBRID] / o[best[name]] for name, o in over.items()}
    held_out = {
        name: found
        for name, spent in sets.items()
        if (found := against_best(spent[HYBRID], {r: spent[r] for r in rules}))
    }
    ratios = [one.ratio for one in held_out.values()]
    return {
        "x_greedy": over,
        "hybrid_over_picked": {name: asdict(one) for name, one in held_out.items()},
        "hybrid_over_picked_mean": _geometric(ratios) if ratios else None,
        "best_rule": best,
        "hybrid_over_best": against,
        "x_greedy_mean": means,
        "hybrid_over_best_mean": _geometric(list(against.values())),
        "best_single": single,
        "hybrid_over_best_single": means[HYBRID] / means[single],
    }


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def table(figures: dict[str, Any], title: str = "Tokens a unit of time, over greedy's") -> Table:
    """Rates over greedy's, by set."""
    means = figures["x_greedy_mean"]

    def cells(over: dict[str, float]) -> list[str]:
        model = max(rate for rule, rate in over.items() if rule.startswith("eagle3"))
        return [f"{rate:.2f}" for rate in (*map(over.__getitem__, SHOWN), model)]

    rates = Table(title=title, caption=_CAPTION, box=SIMPLE, padding=0, pad_edge=False)
    rates.add_column("set", overflow="fold", min_width=10)
    for heading in (*SHOWN, "eagle3", "best", "/ best", "/ picked"):
        rates.add_column(heading, justify="right", no_wrap=True)
    for name, over in figures["x_greedy"].items():
        at = figures["hybrid_over_picked"].get(name)
        picked = f"{at['ratio']:.3f} ({at['low']:.2f}-{at['high']:.2f})" if at else "-"
        best, ratio = figures["best_rule"][name], f"{figures['hybrid_over_best'][name]:.3f}"
        rates.add_row(escape(name), *cells(over), best, ratio, picked)
    mean = figures["hybrid_over_picked_mean"]
    last = f"{figures['hybrid_over_best_mean']:.3f}", "-" if mean is None else f"{mean:.3f}"
    rates.add_row("mean", *cells(means), figures["best_single"], *last)
    return rates


_CAPTION: Final = (
    "eagle3: its best length. @2: two draft tokens for each one matched. / best: over it, "
    "/ picked: over the one that was best on the other half of the prompts. Means are geometric."
)


CONTEXT: Final = 16_384  # most tokens of a prompt with its output
PROMPTS: Final = 12  # prompts recorded of each set by default
Sets = Mapping[str, Parts]


def of_files(
    paths: Sequence[Path], tokenizer: Any, limit: int | None, notices: list[str], step: Step
) -> Sets:
    """Each of ``paths``, split. Unusable files become notices.

    Raises:
        TraceError: no file is usable.
    """
    sets = dict[str, Parts]()
    for path in paths:
        try:
            result = read(path, tokenizer, CONTEXT, partial(step, f"reading {path.name}"))
        except TraceError as error:
            notices.append(str(error))
            continue
        notices += result.notices + result.too_long
        parts = split(result.traces, limit=limit)
        if parts.train and parts.test:
            sets[str(path) if path.stem in sets else path.stem] = parts
        else:
            side = "test" if parts.train else "training"
            notices.append(f"{path}: left out, none of its sessions falls to {side}.")
    if not sets:
        raise TraceError(f"nothing to measure: {notices[-1]}")
    return sets


def of_prompts(
    folder: Path | None, tokenizer: Any, limit: int | None, notices: list[str], step: Step
) -> Sets:
    """The embedded model's answers to the first ``limit`` prompts of each set in ``folder``, by
    default of the project's workloads. Long prompts are cut in the middle; missing answers are
    recorded first.

    Raises:
        SettingsError: there is no such folder, or no usable prompt in it.
    """
    wanted, many = dict[str, list[tuple[int, ...]]](), limit or PROMPTS
    own = prompt_sets((), many, notices)
    for each in own if folder is None else read_folder(folder, (), notices):
        fits = fitting(each, tokenizer, recording.PROMPT, "truncate", notices.append)
        if ids := [prompt.ids for prompt in itertools.islice(fits, many)]:
            wanted[each.name] = ids
    if not wanted:
        source = folder or "the own workloads"
        raise SettingsError(f"no prompt in {source} can be used: {notices[-1:]}")
    folder_used = recording.record(wanted, step)
    notices.append(f"The recordings are in {folder_used}.")
    return {n: Parts([], [], recording.traces_of(folder_used, n, ids)) for n, ids in wanted.items()}


MIN_ROWS: Final = 500  # fewest labelled drafts to train a survival policy on
EPOCHS: Final = 30
TRAINING_FACTOR: Final = 2.0
"""Factor by which training drafts are longer than a worker's. A policy that has seen longer drafts
cuts better, by one to three per cent at a CPU's costs."""
PAPER_MIN_ROWS: Final = 200
PAPER_EPOCHS: Final = 20
PAPER_MAX_ROWS: Final = 200_000
"""Most drafts to train the paper's network on; more take minutes and change little."""


def behaviour_policies() -> tuple[Method, Method]:
    """The behaviour policies of the training data.

    The model arm is observed only where it is taken. One policy always takes it, the other where
    counting rejects the cache draft.
    """
    counting = Method("frequency", method("frequency").policy)  # with the hybrid's drafts
    return Method("model", method("eagle3").policy), counting


def with_longer_drafts(simulator: Simulator) -> Simulator:
    """``simulator`` with cache drafts ``TRAINING_FACTOR`` times as long as a worker's."""
    factor = TRAINING_FACTOR * simulator.settings.suffix_max_factor
    longer = simulator.settings.model_copy(update={"suffix_max_factor": factor})
    return replace(simulator, settings=longer)


def taught(simulator: Simulator, traces: Sequence[Trace], warm_up: Sequence[Trace] = ()) -> Rows:
    """The labelled drafts of ``traces``, decoded by each of the :func:`behaviour_policies`."""
    return joined([simulator.decode(traces, each, warm_up)[1] for each in behaviour_policies()])


def learned(
    rows: Rows, scope: str, kind: Kind = "survival", epochs: int = EPOCHS,
    probes: FloatArray | None = None,
) -> Policy:  # fmt: skip
    """Train a policy of version 0. Kind ``payoff`` gets the threshold that suits ``rows`` best at
    nominal costs.

    Args:
        probes: features [n, features] to probe the bundle with; by default those of the rows.

    Raises:
        TraceError: there are too few labelled drafts.
    """
    _require_rows(rows, MIN_ROWS)
    probes = rows.features if probes is None else probes
    policy = train.export(train.fit(rows, kind, epochs), scope, PAPER_THRESHOLD, probes)
    seen = np.isfinite(rows.model_accepted)
    if not seen.any():
        return tune_policy(policy, NOMINAL, policy, rows)
    arms = 0, max(int(seen.sum()), MIN_ARM), 0
    mean, length = rows.model_accepted[seen].mean(), np.median(rows.verified_len[seen])
    costs = replace(NOMINAL, model_accepted=float(mean), model_len=float(length), seen=arms)
    return tune_policy(policy, costs, policy, rows)


TABLE_9: Final = (
    *("log_score", "log_match", "log_len", "score", "match_len", "draft_len"),  # cache match
    *("log_prompt_len", "log_generated_len", "relative_position"),  # decode state
    *("cache_share", "payoff_last", "payoff_2nd_last", "payoff_3rd_last"),  # recent history
    *("payoff_mean", "payoff_max"),
    *(f"{of}_{name}" for of in ("share", "first") for name in TOKEN_CLASSES if name != "digit"),
)
"""Our features that are in the paper's Table 9."""
POSITIONS: Final = Method(
    "positions", frequency_policy("", NEVER), model=False, draft_factor=PAPER_FACTOR
)
"""Proposes a cache draft at every token position and verifies none (paper, Appendix B)."""
TABLE_2: Final = {
    "Qwen3-8B": (0.048, 0.038, 0.782, 0.614),
    "Qwen3-4B": (0.066, 0.054, 0.829, 0.678),
    "Llama3.1-8B": (0.089, 0.081, 0.876, 0.798),
}
"""The paper's Table 2: shares of high-payoff and of selected drafts, precision, recall."""


def paper(rows: Rows, scope: str, features: Sequence[str] = FEATURES) -> Policy:
    """Train the paper's network, which predicts accepted length from ``features``, with its
    threshold.

    Raises:
        TraceError: there are too few labelled drafts.
    """
    _require_rows(rows, PAPER_MIN_ROWS)
    if len(rows) > PAPER_MAX_ROWS:
        chosen = np.random.default_rng(train.SEED).permutation(len(rows))[:PAPER_MAX_ROWS]
        rows = rows.take(np.sort(chosen))
    others = ~np.isin(FEATURES, features)
    known = np.where(others, np.float32(0.0), rows.features)
    trainer = train.fit(replace(rows, features=known), "payoff", PAPER_EPOCHS)
    trainer.layers()[0][0][others] = 0.0  # unused inputs still have their initial weights
    return train.export(trainer, scope, PAPER_THRESHOLD, rows.features)


def _require_rows(rows: Rows, least: int) -> None:
    if len(rows) < least:
        raise TraceError(
            f"the recordings give {len(rows)} labelled drafts, {least} are needed: give more "
            "traces, or raise the limit."
        )


def with_paper_drafts(simulator: Simulator) -> Simulator:
    """``simulator`` with cache drafts as long as the paper's (Table 7)."""
    settings = simulator.settings.model_copy(update={"suffix_max_factor": PAPER_FACTOR})
    return replace(simulator, settings=settings)


def train_on(
    sets: Sets, kind: Literal["paper", "payoff", "survival"], simulator: Simulator, step: Step
) -> Policy:
    """Train a policy on the training sessions of all ``sets``. Kind ``paper`` uses every token
    position and the features of the paper's Table 9.

    Raises:
        TraceError: there are too few labelled drafts.
    """
    step("decoding what is learned from", 0, 1)
    parts = sets.values()
    if kind == "survival":
        longer = with_longer_drafts(simulator)
        return learned(joined([taught(longer, p.train, p.warm_up) for p in parts]), "replay")
    teacher = POSITIONS if kind == "paper" else behaviour_policies()[1]
    seen = joined([simulator.decode(p.train, teacher, p.warm_up)[1] for p in parts])
    return paper(seen, "replay", TABLE_9 if kind == "paper" else FEATURES)


def replay_sets(
    sets: Sets, policy: Policy, simulator: Simulator, step: Step,
    router_us: Callable[[str], float] = lambda rule: 0.0, states: Method | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Decode the test sessions of ``sets`` by every rule, and evaluate ``policy``'s predictions on
    the drafts of ``states``, by default of its own cycles; JSON-ready."""
    spent, skills = dict[str, dict[str, Spent]](), dict[str, dict[str, float]]()
    whole = Skill()
    for done, (name, parts) in enumerate(sets.items()):
        step(f"decoding {name}", done, len(sets))
        spent[name] = with_oracle(parts.test, policy, simulator, parts.warm_up, router_us)
        by = states or Method(HYBRID, policy)
        rows = simulator.decode(parts.test, by, parts.warm_up)[1]
        whole.update(policy, rows)
        skills[name] = skill_of(policy, rows).table()
    counts = {name: {"sessions": len({t.session for t in parts.test}),
                     "generations": len(parts.test)} for name, parts in sets.items()}  # fmt: skip
    return {"sets": counts, **summary(spent), "predicts": {**skills, "all": whole.table()}}


def table_2(figures: dict[str, Any]) -> Table:
    """Precision and recall of finding high-payoff drafts, by set, with the paper's figures."""
    title = "Cache drafts of six accepted tokens or more (paper, Table 2)"
    table = Table(title=title, box=SIMPLE, padding=0, pad_edge=False)
    table.add_column("set", overflow="fold", min_width=10)
    for heading in ("drafts", "high-payoff", "selected", "precision", "recall"):
        table.add_column(heading, justify="right", no_wrap=True)
    columns = ("high_payoff", "selected", "precision", "recall")
    for name, of in figures["predicts"].items():
        table.add_row(escape(name), f"{of['drafts']:.0f}", *(f"{of[c]:.1%}" for c in columns))
    for name, shares in TABLE_2.items():
        table.add_row(f"paper, {name}", "", *(f"{each:.1%}" for each in shares))
    return table

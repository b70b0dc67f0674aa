"""The decode benchmark of the embedded model on an accelerator, through the reference engine.

That engine launches one kernel after another from Python, so a small model waits for the host. What
it would be with CUDA graphs is computed from the cycles it counted and the measured cost tables;
these figures are marked as computed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from decoder.contracts.errors import HvdError

if TYPE_CHECKING:
    from pipelines.lab.bench.results import Outcome

Say = Callable[[str], None]
METHODS: Final = (
    "greedy", "eagle3", "eagle3-tree", "suffix", "frequency", "arctic", "hybrid", "oracle",
)  # fmt: skip


@dataclass(frozen=True)
class Decode:
    """What to decode: ``each`` prompts of every workload; no model is the embedded one."""

    dtypes: tuple[str, ...]
    device: str
    each: int = 2
    max_tokens: int = 96
    methods: tuple[str, ...] = METHODS
    model: str | None = None
    drafter: str | None = None
    policy: str | None = None


def run(
    asked: Decode, costs: Sequence[dict[str, Any]], deadline: float, say: Say
) -> dict[str, Any]:
    """Decode until ``deadline`` (:func:`time.monotonic`), which the dtypes share evenly.

    Args:
        costs: records of :func:`pipelines.lab.bench.gpu.costs.measure` of the embedded shape.

    Returns:
        ``runs``, the report of ``hvd bench decode`` for each dtype, and ``notes``, one sentence for
        whatever was left out.
    """
    notes: list[str] = []
    runs: list[dict[str, Any]] = []
    methods = list(asked.methods)
    for index, dtype in enumerate(asked.dtypes):
        say(f"decoding in {dtype}")
        now = time.monotonic()
        until = now + (deadline - now) / (len(asked.dtypes) - index)
        try:
            if (found := _one(asked, methods, dtype, costs, until, notes, say)) is not None:
                runs.append(found)
        except ImportError as error:
            notes.append(
                f"nothing was decoded: the Python package {error.name!r} is missing. The decode "
                "part needs what pyproject.toml names; the cost tables need torch alone."
            )
            break
        except HvdError as error:
            notes.append(f"nothing was decoded in {dtype}: {error}")
    return {"runs": runs, "notes": notes}


def _one(
    asked: Decode,
    methods: list[str],
    dtype: str,
    costs: Sequence[dict[str, Any]],
    deadline: float,
    notes: list[str],
    say: Say,
) -> dict[str, Any] | None:
    from decoder.contracts.errors import ModelError
    from pipelines.lab.bench.decode import launch
    from pipelines.lab.bench.decode import run as decode
    from pipelines.lab.bench.metrics import summary
    from pipelines.lab.bench.options import Engine, Options, Selection
    from pipelines.lab.bench.results import Results
    from pipelines.lab.bench.serve.prompts import from_workloads
    from pipelines.stats import rate

    policies = () if asked.policy is None else (asked.policy,)
    choice = Options(
        selection=Selection(limit=asked.each, warmup=1),
        engine=Engine(asked.model, asked.drafter, policies, dtype, asked.device),
        max_tokens=asked.max_tokens,
    )
    try:
        ready = launch.prepare(choice, methods)
    except ModelError as error:
        learned = [m for m in methods if m.startswith("hybrid")]
        if not learned:
            raise
        methods[:] = [m for m in methods if m not in learned]
        notes.append(f"{', '.join(learned)} left out: {error}")
        ready = launch.prepare(choice, methods)
    if (minutes := (deadline - time.monotonic()) / 60) <= 0:
        notes.append(f"nothing was decoded in {dtype}: the time was over.")
        return None
    plan = decode.Plan(ready.methods, choice.selection, asked.max_tokens, minutes)
    sets = from_workloads(asked.each + 1)
    results = decode.run(ready.engine, sets, plan, Results(ready.settings), say)
    if results.interrupted:
        raise KeyboardInterrupt
    if results.out_of_time:
        notes.append(f"{dtype}: {len(results.prompts)} prompts decoded when the time was over.")
    figures = summary(results)
    outcomes = [p.outcomes for p in results.prompts.values()]
    for record in figures["overall"]:
        mine = [by[record["method"]] for by in outcomes]
        record["computed_with_graphs_tok_per_s"] = computed_rate(mine, costs)
        record["measured_tok_per_s"] = rate(o.spent for o in mine)
    return figures


def computed_rate(outcomes: Sequence[Outcome], costs: Sequence[dict[str, Any]]) -> float | None:
    """Tokens a second if every cycle cost what the tables say, at the smallest context measured.

    Proposing and deciding on the host are left out. None where the tables do not reach.
    """
    tables = {
        step: _table(costs, step) for step in ("verify", "verify-tree", "draft", "draft-tree")
    }
    tokens = milliseconds = 0.0
    for outcome in outcomes:
        tree = outcome.method.endswith("-tree")
        for cycle in outcome.cycles:
            by_tree = tree and cycle.arm == "model"
            verify = _at(tables["verify-tree" if by_tree else "verify"], 1 + cycle.verified)
            draft = 0.0
            if cycle.arm == "model":
                found = _at(tables["draft-tree" if by_tree else "draft"], cycle.verified)
                if found is None:
                    return None
                draft = found
            if verify is None:
                return None
            milliseconds += verify + draft
        tokens += outcome.decoded
    return 1e3 * tokens / milliseconds if milliseconds else None


def _table(costs: Sequence[dict[str, Any]], step: str) -> list[tuple[int, float]]:
    rows = [r for r in costs if r["step"] == step and r["batch"] == 1]
    nearest = min((r["context"] for r in rows), default=None)
    return sorted((r["tokens"], r["ms"]) for r in rows if r["context"] == nearest)


def _at(table: list[tuple[int, float]], tokens: int) -> float | None:
    """Linear between measured points; a single point, a tree's, stands for any size of it."""
    if len(table) == 1:
        return table[0][1]
    for (left, low), (right, high) in itertools.pairwise(table):
        if left <= tokens <= right:
            return low + (high - low) * (tokens - left) / (right - left)
    return None

"""``hvd replay``; it imports what it needs when it is called."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from pipelines.options import AsJson, Tokenizer, options_of
from pipelines.reports import Shown, complain, print_json

if TYPE_CHECKING:
    from decoder.contracts.bundle import Policy
    from pipelines.lab.replay.study import Sets
    from pipelines.replay.engine import Simulator

out, err = Console(), Console(stderr=True)


@dataclass(frozen=True)
class ReplayOptions:
    """Options of ``hvd replay``."""

    traces: Annotated[list[Path] | None, typer.Argument(help="Trace files: JSON Lines.")] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Instead of traces a folder of prompts: the embedded model answers them, once, "
            "and every rule decodes the recordings. Without either: own workloads."
        ),
    ] = None
    tokenizer: Tokenizer = None
    model_accepts: Annotated[
        float, typer.Option(min=0.0, help="Model draft's mean accepted length, where not recorded.")
    ] = 2.2
    policy: Annotated[
        Path | None, typer.Option(help="Measure this bundle; default: train one.")
    ] = None
    kind: Annotated[
        Literal["payoff", "survival"],
        typer.Option(help="Kind to train: payoff (the paper's, with a threshold) or survival."),
    ] = "payoff"
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            help="Train and draft as the paper does: features of Table 9, every token position, "
            "factor 1; reports its Table 2.",
        ),
    ] = False
    costs: Annotated[
        str | None,
        typer.Option(
            help="Estimate for a GPU from its step times: a file that 'hvd bench gpu' wrote, or "
            "'h100-8b'; the router's time is charged."
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Generations of each file, in whole sessions; of prompts, answers of each "
            "workload (12).",
        ),
    ] = None
    as_json: AsJson = False


@options_of(ReplayOptions)
def replay(o: ReplayOptions) -> None:
    """Compare decoding policies on recorded generations; with traces it needs no model.

    Lines hold messages, a prompt and its output, or token ids; sessions are
    split by name into training, warm-up and test. Without trace files the
    embedded model first answers sixty prompts, once, which takes minutes.
    Example: hvd replay traces/*.jsonl --limit 200 --json
    """
    from decoder.contracts.bundle import ANY_SCOPE
    from decoder.core.payoff.token_classes import token_classes_of
    from decoder.policy.first import first_policy
    from decoder.settings import WorkerSettings
    from pipelines.embedded import load_tokenizer
    from pipelines.lab.replay import study
    from pipelines.policy.moves import load_policy
    from pipelines.replay.engine import Simulator

    if o.traces and o.prompts is not None:
        raise typer.BadParameter("name trace files, or prompts with --prompts")
    if o.paper and not o.traces:
        raise typer.BadParameter("--paper trains on traces: name trace files")
    policy = load_policy(o.policy) if o.policy else None
    ids, notices = load_tokenizer(o.tokenizer if o.traces else None), list[str]()
    simulator = Simulator(token_classes_of(ids), WorkerSettings.load(), o.model_accepts)
    simulator = study.with_paper_drafts(simulator) if o.paper else simulator
    with Shown(err) as shown:
        if not o.traces:
            sets = study.of_prompts(o.prompts, ids, o.limit, notices, shown.step)
            policy = policy or first_policy(ANY_SCOPE)
        else:
            sets = study.of_files(o.traces, ids, o.limit, notices, shown.step)
            kind = "paper" if o.paper else o.kind
            policy = policy or study.train_on(sets, kind, simulator, shown.step)
        figures = _replayed(o, sets, policy, simulator, shown)
    complain(err, notices)
    if o.as_json:
        settings = {
            "model_accepts": o.model_accepts,
            "limit": o.limit,
            "policy": f"{policy.kind} v{policy.version}",
        }
        print_json({**figures, "settings": settings, "notices": notices})
        return
    for one in figures.get("expected", [figures]):
        title = "Tokens a unit of time, over greedy's"
        if o.costs:
            title = f"Expected on {figures['expected_on']}: {one['shape']}, batch {one['batch']}"
        out.print(study.table(one, title))
        if o.paper:
            out.print(study.table_2(one))


def _replayed(
    o: ReplayOptions, sets: Sets, policy: Policy, simulator: Simulator, shown: Shown
) -> dict[str, Any]:
    """The figures: one set of them, or with ``--costs`` one for each measured shape and batch."""
    from pipelines.lab.replay import study
    from pipelines.lab.replay.costs import measured

    if not o.costs:
        states = study.POSITIONS if o.paper else None
        return study.replay_sets(sets, policy, simulator, shown.step, states=states)
    gpu, cells = measured(o.costs)
    expected = [
        {"shape": cell.shape, "batch": cell.batch} | study.replay_sets(
            sets, policy, replace(simulator, costs=cell.table), shown.step, cell.router_us
        ) for cell in cells
    ]  # fmt: skip
    return {"expected_on": gpu, "expected": expected}

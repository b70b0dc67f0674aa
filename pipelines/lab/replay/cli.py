"""``hvd replay``: its options; its imports are done when it is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from pipelines.reports import complain, print_json

out, err = Console(), Console(stderr=True)


def replay(
    traces: Annotated[list[Path] | None, typer.Argument(help="Trace files: JSON Lines.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="In their place a folder of prompts: the embedded model answers them, once, and "
            "every rule decodes the recordings. Without either: own workloads."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    model_accepts: Annotated[
        float, typer.Option(min=0.0, help="Model draft's mean accepted length, where not recorded.")
    ] = 2.2,
    policy: Annotated[
        Path | None, typer.Option(help="Measure this bundle; default: train one.")
    ] = None,
    kind: Annotated[
        Literal["payoff", "survival"],
        typer.Option(help="What is trained: payoff (the paper's, by a threshold) or survival."),
    ] = "payoff",
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            help="Train and draft as the paper does: features of Table 9, every token position, "
            "factor 1; reports its Table 2.",
        ),
    ] = False,
    costs: Annotated[
        str | None,
        typer.Option(
            help="What is expected on a card: its step times, a file that 'hvd bench gpu' wrote, "
            "or 'h100-8b'; the router's time is charged."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Generations of each file, in whole sessions; of prompts, answers of each "
            "workload (12).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Try decoding policies on recorded generations; for traces it needs no model.

    Lines hold messages, a prompt and its output, or token ids; sessions are
    parted by name into training, warm-up and test. Without trace files the
    embedded model first answers sixty prompts, once, which takes minutes.
    Example: hvd replay traces/*.jsonl --limit 200 --json
    """
    from decoder.contracts.bundle import ANY_SCOPE
    from decoder.core.payoff.token_classes import token_classes_of
    from decoder.policy.first import first_policy
    from decoder.settings import WorkerSettings
    from pipelines.embedded import load_tokenizer
    from pipelines.lab.replay import study
    from pipelines.lab.replay.costs import measured
    from pipelines.policy.moves import load_policy
    from pipelines.replay.engine import Simulator
    from pipelines.reports import Shown

    if traces and prompts is not None:
        raise typer.BadParameter("name trace files, or prompts with --prompts")
    if paper and not traces:
        raise typer.BadParameter("--paper trains on traces: name trace files")
    bundle = load_policy(policy) if policy else None
    card, cells = measured(costs) if costs else ("", [])
    ids, notices = load_tokenizer(tokenizer if traces else None), list[str]()
    simulator = Simulator(token_classes_of(ids), WorkerSettings.load(), model_accepts)
    simulator = study.as_the_paper(simulator) if paper else simulator
    with Shown(err) as shown:
        if not traces:
            sets = study.of_prompts(prompts, ids, limit, notices, shown.step)
            bundle = bundle or first_policy(ANY_SCOPE)
        else:
            sets = study.of_files(traces, ids, limit, notices, shown.step)
            bundle = bundle or study.trained(
                sets, "paper" if paper else kind, simulator, shown.step
            )
        if cells:
            expected = [
                {"shape": cell.shape, "batch": cell.batch, **study.replayed(
                    sets, bundle, replace(simulator, costs=cell.table), shown.step, cell.router_us
                )} for cell in cells
            ]  # fmt: skip
            found: dict[str, Any] = {"expected_on": card, "expected": expected}
        else:
            states = study.POSITIONS if paper else None
            found = study.replayed(sets, bundle, simulator, shown.step, states=states)
    complain(err, notices)
    if as_json:
        settings = {
            "model_accepts": model_accepts,
            "limit": limit,
            "policy": f"{bundle.kind} v{bundle.version}",
        }
        print_json({**found, "settings": settings, "notices": notices})
    for one in () if as_json else found.get("expected", [found]):
        where = f"Expected on {card}: {one['shape']}, batch {one['batch']}" if cells else ""
        out.print(study.table(one, where or "Tokens a unit of time, over greedy's"))
        if paper:
            out.print(study.table_2(one))

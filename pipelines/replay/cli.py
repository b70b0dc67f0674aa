"""``hvd replay``: its options; its imports are done when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from pipelines.reports import print_json

out, err = Console(), Console(stderr=True)


def replay(
    traces: Annotated[list[Path] | None, typer.Argument(help="Trace files: JSON Lines.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="In their place a folder of prompts: the embedded model answers them, once, and "
            "every rule decodes the recordings."
        ),
    ] = None,
    nominal: Annotated[
        bool, typer.Option("--nominal", help="Prompts: nominal costs, not those measured here.")
    ] = False,
    drawn: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=4.0,
            help="Prompts: a drafter by lot, which has so many tokens accepted, for the real one.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    every_token: Annotated[
        bool,
        typer.Option(
            "--every-token/--cycles",
            help="Train and measure on every token position, or on simulated cycles.",
        ),
    ] = True,
    model_accepts: Annotated[
        float, typer.Option(help="Model draft's mean accepted length, where not recorded.")
    ] = 2.2,
    policy: Annotated[
        Path | None, typer.Option(help="Measure this bundle; default: train one.")
    ] = None,
    kind: Annotated[
        str,
        typer.Option(help="What is trained: payoff (the paper's, by a threshold) or survival."),
    ] = "payoff",
    train_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of sessions to train on.")
    ] = 0.6,
    warm_up_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of sessions that only fill the cache.")
    ] = 0.1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Generations of each file, in whole sessions.")
    ] = None,
    context: Annotated[
        int, typer.Option(min=2, help="Tokens that a prompt and its output may have.")
    ] = 16_384,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Try decoding policies on recorded generations; needs no model.

    Lines hold messages, a prompt and its output, or token ids; sessions are parted by name into
    training, warm-up and test.
    Example: hvd replay traces/*.jsonl --limit 200 --json
    """
    from pipelines.embedded import load_tokenizer
    from pipelines.replay import command
    from pipelines.replay.bundles import load_policy
    from pipelines.replay.split import Shares
    from pipelines.replay.study import Plan

    if train_share + warm_up_share >= 1.0:
        raise typer.BadParameter("leave sessions for the test", param_hint="--train-share")
    bundle = load_policy(policy) if policy else None
    if prompts is not None:
        ruled = command.by_rules(command.Asked(prompts, limit or 12, bundle, nominal, drawn), err)
        if as_json:
            print_json(ruled)
        else:
            for table in command.rule_tables(ruled):
                out.print(table)
        return
    if not traces:
        raise typer.BadParameter("name trace files, or prompts with --prompts")
    shares = Shares(train_share, warm_up_share)
    if kind not in ("payoff", "survival"):
        raise typer.BadParameter("choose payoff or survival", param_hint="--kind")
    chosen: Literal["payoff", "survival"] = "payoff" if kind == "payoff" else "survival"
    plan = Plan(shares, not every_token, model_accepts, limit, context, bundle, chosen)
    reports, notices = command.run(traces, plan, load_tokenizer(tokenizer), err)
    command.show_notices(notices, err)
    if as_json:
        figures = command.as_dict(reports, plan, notices)
        print_json(figures)
    else:
        for table in command.tables(reports):
            out.print(table)

"""``hvd drift``: its options; its imports are done when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pipelines.reports import print_json

out, err = Console(), Console(stderr=True)


def drift(
    traces: Annotated[
        Path | None,
        typer.Option(help="Folder of trace files (*.jsonl); default: the project's own."),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="A scenario's name or file; may be given again. Default: all that ship."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between them.")] = "1,2,3",
    policies: Annotated[
        str, typer.Option(help="Policies, with commas between them; default: all.")
    ] = "",
    first: Annotated[
        Path | None, typer.Option(help="First policy to start from; default: the one that ships.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    scale: Annotated[
        float,
        typer.Option(min=0.01, max=100.0, help="Times all generations: below 1 for a quick look."),
    ] = 1.0,
    folder: Annotated[Path, typer.Option("--out", help="Where runs are kept.")] = Path(
        "reports/drift"
    ),
    resume: Annotated[
        bool, typer.Option("--resume/--anew", help="Go on where an earlier run stopped.")
    ] = True,
    record: Annotated[
        int,
        typer.Option(min=0, help="First let the embedded model answer, so many of each workload."),
    ] = 0,
    false_alarms: Annotated[
        int, typer.Option(min=0, help="Instead: alarms in so many drafts of unchanging traffic.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure what learning is worth when traffic changes, on recordings; needs no engine.

    Writes results.json. What is done is kept: Ctrl-C loses one run.
    Example: hvd drift --traces traces --scenario agents-to-chat --seeds 1
    """
    from pipelines.drift import command
    from pipelines.embedded import load_tokenizer
    from pipelines.progress import Shown

    options = command.Options(traces, scenario or [], seeds, policies, scale, folder, resume)
    ids, policy = load_tokenizer(tokenizer), command.first_of(first)
    if record:
        from pipelines.replay import own

        with Shown(err) as progress:
            made = own.record(record, progress.step)
        err.print(f"Recordings: {made}", highlight=False, soft_wrap=True)
    if false_alarms:
        summary = command.false_alarms(options, false_alarms, ids, policy, err)
        shown, written = command.alarmed(summary), "false-alarms.json"
    else:
        summary = command.run(options, ids, policy, err)
        for notice in summary["notices"]:
            err.print(escape(notice), style="yellow", highlight=False, soft_wrap=True)
        shown, written = command.outcome(summary), "results.json"
    if as_json:
        print_json(summary)
    else:
        out.print(shown)
        out.print(f"Report: [bold]{folder / written}[/bold]")

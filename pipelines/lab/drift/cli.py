"""``hvd drift``: its options; its imports are done when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipelines.reports import complain, print_json

out, err = Console(), Console(stderr=True)


def drift(
    traces: Annotated[Path, typer.Option(help="Folder of trace files (*.jsonl).")],
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="A scenario's name or file; may be given again. Default: all that ship."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between them.")] = "1,2,3",
    policies: Annotated[
        str, typer.Option(help="Policies, with commas between them; default: all.")
    ] = "",
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    false_alarms: Annotated[
        int,
        typer.Option(
            min=0, help="Instead: alarms in so many drafts of unchanging traffic, as JSON."
        ),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure what learning is worth when traffic changes, on recordings; needs no engine.

    Takes minutes a scenario and seed.
    Example: hvd drift --traces traces --scenario agents-to-chat --seeds 1
    """
    from decoder.policy.first import first_policy
    from pipelines.embedded import load_tokenizer
    from pipelines.lab.bench.methods import numbers
    from pipelines.lab.drift import measure, study
    from pipelines.lab.drift.traffic import chosen as scenarios_of
    from pipelines.reports import Shown

    drawn, names = numbers(seeds, "--seeds"), study.named(policies)
    chosen = scenarios_of(scenario or [])
    policy = first_policy("drift")
    with Shown(err) as shown:
        source = study.Recordings(traces, load_tokenizer(tokenizer), shown.step)
        if false_alarms:
            summary = study.false_alarms(false_alarms, source, policy, shown.step)
        else:
            summary = study.study(chosen, drawn, names, source, policy, shown.step)
    complain(err, summary.get("notices", ()))
    if as_json or false_alarms:
        print_json(summary)
    else:
        out.print(measure.table(summary))

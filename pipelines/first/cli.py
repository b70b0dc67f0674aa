"""``hvd bootstrap``: its options; its imports are done when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipelines.reports import print_json

out, err = Console(), Console(stderr=True)


def bootstrap(
    traces: Annotated[
        list[Path], typer.Option(help="Trace files, or a folder of them; may be given again.")
    ],
    licence: Annotated[
        list[str] | None,
        typer.Option(help="Learn from rows whose license is this; default: MIT and Apache-2.0."),
    ] = None,
    generations: Annotated[
        int, typer.Option(min=1, help="Generations of each file, in whole sessions.")
    ] = 100,
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="The policy to write, or to check; default: where it ships.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing: compare with refits and counting.")
    ] = False,
    model_accepts: Annotated[
        float,
        typer.Option(min=0.0, help="Check: model drafts' mean accepted length; 0: no drafter."),
    ] = 2.2,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a check's figures as JSON.")
    ] = False,
) -> None:
    """Make the first policy, which any model serves with until it has its own, or check it.

    It is trained on recorded generations of many kinds (JSON Lines as for hvd replay) and written
    where it ships from, with a card of what it was made of. --check compares it with policies
    refitted to each file, leaving out of its training what it is compared on.
    Example: hvd bootstrap --traces traces --check
    """
    from decoder.policy.first import SHIPPED
    from pipelines.first import command
    from pipelines.first.sets import ALLOWED

    asked = command.Asked(traces, tuple(licence or ALLOWED), generations, tokenizer)
    place = bundle or SHIPPED
    if not check:
        made = command.make(asked, place, err)
        out.print(f"wrote {place}", soft_wrap=True)
        out.print_json(data=made.provenance)
        return
    found = command.check(asked, place, model_accepts, err)
    if as_json:
        print_json(command.figures(found, model_accepts))
    else:
        out.print(command.table(found))

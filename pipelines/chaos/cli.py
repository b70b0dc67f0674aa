"""``hvd chaos`` and ``hvd soak``."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from decoder.contracts.errors import SettingsError
from pipelines.reports import print_json, write_json
from pipelines.stack import broker

Standin = Annotated[
    bool,
    typer.Option(
        "--standin", help="A worker without a model: seconds to start, and no word on vLLM."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder of the stack and of what is found.")]
WriteDocs = Annotated[bool, typer.Option("--write-docs", help="Into docs/reliability.md, too.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what is found as JSON.")]


def chaos(
    only: Annotated[
        list[str] | None, typer.Option(help="Troubles whose name holds this; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the moments at which trouble comes.")] = 1,
    standin: Standin = False,
    broker_away: Annotated[float, typer.Option(min=1, help="Seconds without a broker.")] = 60.0,
    other: Annotated[
        Path | None,
        typer.Option(help="Checkout of another version: a rolling restart goes there and back."),
    ] = None,
    out: Out = Path("reports/chaos"),
    write_docs: WriteDocs = False,
    as_json: AsJson = False,
) -> None:
    """Kill, starve and damage every part of a stack while clients ask; say what was seen.

    Starts a stack of its own on free ports. With the embedded model in float32 every answer is
    compared, token for token, with the one given before. Exit status 1: a wrong answer, a request
    that failed though its worker lived, an event counted twice, or a publication out of order.
    """
    from pipelines.chaos import page, run
    from pipelines.chaos.troubles import troubles

    err = Console(stderr=True)
    chosen = [
        each
        for each in troubles(other, broker_away)
        if not only or any(word in each.name for word in only)
    ]
    if not chosen:
        names = "; ".join(each.name for each in troubles(other, broker_away))
        raise SettingsError(f"--only chooses none of the troubles: {names}.")
    _refuse_what_is_not_ours()
    draw = random.Random(seed)
    found: list[run.Incident] = []
    with run.scene(out / "stack", standin, err) as scene:
        for each in chosen:
            if not {*each.heals, *each.kills} <= {*scene.stage.watches}:
                err.print(f"  [dim]{each.name}: left out, that part is not ours[/dim]")
                continue
            err.print(f"  [dim]{each.name}[/dim]", highlight=False)
            found.append(run.make_trouble(scene, each, draw))
            record = run.record(found, scene.heard, seed, standin)
            write_json(record, out / "chaos.json")
    if not found:
        raise SettingsError("every chosen trouble needs a part that is not ours: choose others.")
    _said(record, page.chaos_table(record), "hvd chaos", run.faults_of(record), write_docs, as_json)


def soak(
    minutes: Annotated[float, typer.Option(min=5, help="How long.")] = 30.0,
    standin: Standin = False,
    out: Out = Path("reports/soak"),
    write_docs: WriteDocs = False,
    as_json: AsJson = False,
) -> None:
    """Run a stack under steady load; say what of files, threads, memory and backlog grows.

    Every ten seconds a sample, a line through them after a quarter for warming up. Exit status 1:
    something grows, a request failed or was answered wrongly, or a part ended.
    """
    from pipelines.chaos import page, run
    from pipelines.chaos import soak as long
    from pipelines.progress import Shown

    _refuse_what_is_not_ours()
    err = Console(stderr=True)
    with run.scene(out / "stack", standin, err) as scene, Shown(err) as shown:
        tell = partial(shown.step, "seconds under load", whole=60 * minutes)
        record = long.soak(scene, minutes, tell)
    record["worker"] = "stand-in" if standin else "vLLM, embedded model, float32"
    write_json(record, out / "soak.json")
    _said(record, page.soak_table(record), "hvd soak", long.faults_of(record), write_docs, as_json)


def _refuse_what_is_not_ours() -> None:
    if broker.is_external():
        raise SettingsError(
            f"{broker.VARIABLE} names a broker that may be others': unset it, since trouble is "
            "made on a stack of its own."
        )


def _said(
    record: dict[str, Any], table: str, name: str, faults: list[str], write: bool, as_json: bool
) -> None:
    from pipelines.chaos import page

    if as_json:
        print_json(record)
    else:
        sys.stdout.write(table)
    if write:
        page.write(name, table)
    for fault in faults:
        sys.stderr.write(f"{fault}\n")
    raise typer.Exit(1 if faults else 0)

"""``hvd chaos``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from decoder.contracts.errors import SettingsError
from pipelines import machine
from pipelines.reports import write_json


def chaos(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only faults whose name contains this; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the times of injection.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the stack and the report.")] = Path(
        "reports/chaos"
    ),
) -> None:
    """Inject faults into a running stack under load: kill, starve and damage its parts.

    Starts a stack of its own on free ports. With the embedded model in float32
    every answer is compared, token for token, with an earlier one. Exit status
    1: a wrong answer, a failed request though its worker lived, an event that
    is lost or counted twice, or a publication out of order.
    Takes minutes a fault. Example: hvd chaos --only broker
    """
    from pipelines.lab.chaos import run
    from pipelines.lab.chaos.injections import FAULTS

    chosen = [t for t in FAULTS if not only or any(word in t.name for word in only)]
    if not chosen:
        names = "; ".join(each.name for each in FAULTS)
        raise SettingsError(f"--only matches no fault: choose from {names}.")
    if named := {"HVD_KAFKA_BOOTSTRAP_SERVERS", "HVD_LEARNER_MLFLOW_TRACKING_URI"} & {*os.environ}:
        raise SettingsError(f"unset {named.pop()}: hvd chaos runs a stack of its own.")
    err, rows, faults = Console(stderr=True), list[dict[str, Any]](), list[str]()
    record = {"date": time.strftime("%F"), "machine": machine.description(), "seed": seed}
    record |= {"rows": rows, "faults": faults}
    with run.staged(out / "stack", seed, err) as stage:
        for each in chosen:
            err.print(f"  [dim]{each.name}[/dim]", highlight=False)
            rows.append(run.inject(stage, each))
            faults += [f"{each.name}: {fault}" for fault in rows[-1]["faults"]]
            write_json(record | {"events": stage.audit.counts}, out / "chaos.json")
    for line in (rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)):
        sys.stdout.write(f"| {' | '.join(map(_cell, line))} |\n")
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    raise typer.Exit(1 if faults else 0)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items() if each)
    return "; ".join(sorted(set(value))) or "none" if isinstance(value, list) else str(value)

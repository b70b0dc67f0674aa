"""``hvd train-drafter``: its options; its imports are done when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def train_drafter(
    folder: Annotated[Path, typer.Option(help="Working directory; every step resumes.")] = Path(
        "var"
    ),
    save_to: Annotated[
        Path | None, typer.Option("--out", help="Where the head goes; default: where it ships.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1000, help="Answer tokens that the target writes.")
    ] = 400_000,
    minutes: Annotated[float, typer.Option(help="Minutes of training.")] = 60.0,
    only: Annotated[
        str | None,
        typer.Option(help="One step: compose, written or train."),
    ] = None,
) -> None:
    """Make an EAGLE3 drafter for the embedded model: its states, training, export."""
    from typing import get_args

    from pipelines import embedded
    from pipelines.drafter import command as drafting
    from pipelines.progress import Shown

    stage = next((s for s in get_args(drafting.Stage) if s == only), None)
    if only is not None and stage is None:
        known = ", ".join(get_args(drafting.Stage))
        raise typer.BadParameter(f"choose one of {known}", param_hint="--only")
    target, head = embedded.ensure_model(), save_to or embedded.DRAFTER
    console = Console(stderr=True)
    with Shown(console) as shown:
        drafting.make_drafter(target, folder, head, tokens, minutes, stage, shown.step, console)

"""``hvd train-drafter``: the steps of :mod:`pipelines.lab.drafter`, over one folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from pipelines.lab.drafter.train import Acceptance, Run


def train_drafter(
    folder: Annotated[Path, typer.Option(help="Every step resumes in it.")] = Path("var"),
    save_to: Annotated[
        Path | None, typer.Option("--out", help="For the head; default: where it ships.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1000, help="Answer tokens to write.")] = 400_000,
    minutes: Annotated[float, typer.Option(help="Minutes of training.")] = 60.0,
) -> None:
    """Make an EAGLE3 drafter for the embedded model: its states, training, export.

    Takes hours. Example: hvd train-drafter --minutes 60 --out drafter
    """
    import torch

    from pipelines import embedded, machine
    from pipelines.lab.drafter.compose import compose, load
    from pipelines.lab.drafter.train import Settings, Target, export, train
    from pipelines.lab.drafter.unroll import read_shards
    from pipelines.reports import Shown

    model, out, states = embedded.ensure_model(), save_to or embedded.DRAFTER, folder / "states"
    settings = Settings(minutes=minutes, dtype=machine.serving_dtype(machine.cpu_flags()))
    console = Console(stderr=True)

    def judged(run: Run, found: Acceptance, best: bool) -> None:
        places = " ".join(f"{a:.2f}" for a in found.by_step)
        console.print(f"batch {run.batch}: {found.accepted:.2f} accepted a cycle ({places})")
        if best:
            export(run, out, settings, there, found)
            console.print(f"the best so far: {out}")

    with Shown(console) as shown:
        compose(model, states, tokens, getattr(torch, settings.dtype), shown.step)
        there, m = read_shards(states), load(model)
        target = Target(m.model.embed_tokens.weight, m.model.norm.weight, m.config)
        train(target, there, folder / "head.pt", settings, shown.step, judged)

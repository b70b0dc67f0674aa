"""``hvd bootstrap``; it imports what it needs when it is called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from pipelines.options import Tokenizer, options_of


@dataclass(frozen=True)
class BootstrapOptions:
    """Options of ``hvd bootstrap``."""

    traces: Annotated[
        list[Path] | None,
        typer.Option(
            help="Trace files, or a folder of them; may be given again. Default: what 'hvd replay' "
            "recorded, with --licence ''."
        ),
    ] = None
    licence: Annotated[
        list[str] | None,
        typer.Option(
            help="Use rows with this license, '' for those without one; default: MIT and "
            "Apache-2.0."
        ),
    ] = None
    generations: Annotated[
        int, typer.Option(min=1, help="Generations of each file, in whole sessions.")
    ] = 100
    tokenizer: Tokenizer = None
    kind: Annotated[
        Literal["survival", "payoff"],
        typer.Option(help="Network: survival, or payoff (the paper's) with a tuned threshold."),
    ] = "survival"
    copies: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of each set to train on again, once as copies that are rejected early and "
            "once as filled-in forms.",
        ),
    ] = 0.0
    bundle: Annotated[
        Path | None, typer.Option(help="The policy to write; default: where it ships.")
    ] = None


@options_of(BootstrapOptions)
def bootstrap(o: BootstrapOptions) -> None:
    """Train the first policy, which any model serves with until it has its own.

    It is trained on recorded generations of many kinds (JSON Lines as for hvd
    replay). A card in it describes them, and its scores with each file left
    out. Takes minutes.
    Example: hvd bootstrap --traces traces --bundle mine.safetensors
    """
    from decoder.contracts.errors import SettingsError
    from decoder.core.payoff.token_classes import token_classes_of
    from decoder.policy.first import SHIPPED
    from decoder.policy.probes import to_bytes
    from decoder.settings import WorkerSettings
    from pipelines.embedded import load_tokenizer
    from pipelines.lab.first import make
    from pipelines.lab.replay import recording
    from pipelines.lab.replay.traces import files_of
    from pipelines.replay.engine import Simulator
    from pipelines.reports import Shown, atomic_write

    if not (o.traces or (recorded := recording.folder_of()).is_dir()):
        raise SettingsError("name traces with --traces, or let 'hvd replay' record some first.")
    files = files_of(o.traces or [recorded])
    path, ids = o.bundle or SHIPPED, load_tokenizer(o.tokenizer)
    simulator = Simulator(token_classes_of(ids), WorkerSettings.load())
    with Shown(Console(stderr=True)) as shown:
        sets = make.read_sets(files, ids, o.licence or make.ALLOWED, shown.step)
        samples = make.samples_of(sets, o.generations, simulator, shown.step, o.copies)
        named = o.tokenizer or "the embedded model's"
        policy = make.make(samples, named, simulator, shown.step, o.kind, o.copies)
        atomic_write(path, lambda part: part.write_bytes(to_bytes(policy)))
    out = Console()
    out.print(f"wrote {path}", soft_wrap=True)
    out.print_json(data=policy.provenance)

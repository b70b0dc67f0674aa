"""``hvd telemetry``: the topics for those who read them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help=(
        "Follow, describe, export and ask the topics; the broker is HVD_KAFKA_BOOTSTRAP_SERVERS. "
        "What every column means: docs/telemetry.md."
    ),
    no_args_is_help=True,
    add_completion=False,
)
out, err = Console(), Console(stderr=True)


@app.command()
def schemas(
    folder: Annotated[Path, typer.Option("--out", help="Where they are written.")] = Path(
        "deploy/schemas"
    ),
    release: Annotated[
        bool, typer.Option("--release", help="Also as what later ones may only add to.")
    ] = False,
) -> None:
    """Write the topics' JSON Schemas and their AsyncAPI description, made of the code.

    Refuses a change that is no addition to the last release.
    """
    from pipelines.telemetry.publish import publish

    for path in publish(folder, release):
        out.print(str(path), highlight=False, soft_wrap=True)

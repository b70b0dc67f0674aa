"""``hvd policy``: commands on the registry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.options import Json
from pipelines.reports import print_json

if TYPE_CHECKING:
    from pipelines.policy.moves import Model

app = typer.Typer(
    help=(
        "List policies, and change what is served. The registry is "
        "HVD_LEARNER_MLFLOW_TRACKING_URI, or that of 'hvd up' in mlruns/."
    ),
    no_args_is_help=True,
    add_completion=False,
)
out, err = Console(), Console(stderr=True)

Scope = Annotated[str | None, typer.Option(help="Scope, its first digits, or the model's name.")]
Why = Annotated[str, typer.Option(help="Kept with the move.")]
Wanted = Annotated[str, typer.Argument(help="A version's number, or an alias.")]


@contextmanager
def _asking() -> Iterator[ModuleType]:
    """Show a status while MLflow is imported, which takes seconds; yields the moves."""
    with err.status("asking the registry"):
        from pipelines.policy import moves

        yield moves


@app.command("list")
def list_(scope: Scope = None, as_json: Json = False) -> None:
    """List all versions, newest first; the served one is bold."""
    with _asking() as moves:
        models = [_plain(model) for model in moves.models(scope)]
    if as_json:
        return print_json(models)
    for model in models:
        out.print(_table(model))
    if not models:
        err.print(moves.NONE_YET, soft_wrap=True)
    return None


@app.command()
def promote(
    version: Annotated[str, typer.Argument(help="A version's number, an alias, or a bundle.")],
    force: Annotated[
        bool,
        typer.Option("--force", help="Also if it has not passed the gate, or another is pinned."),
    ] = False,
    why: Why = "",
    scope: Scope = None,
    as_json: Json = False,
) -> None:
    """Make a version champion; a bundle (*.safetensors) is registered first.

    Example: hvd policy promote 3 --why "it was faster"
    """
    with _asking() as moves:
        done = moves.promote(moves.one_model(scope), version, why, force=force)
    _say(done, as_json)


@app.command()
def rollback(why: Why = "", scope: Scope = None, as_json: Json = False) -> None:
    """Make the previous champion champion again."""
    with _asking() as moves:
        done = moves.rollback(moves.one_model(scope), why)
    _say(done, as_json)


@app.command()
def pin(version: Wanted, why: Why = "", scope: Scope = None, as_json: Json = False) -> None:
    """Serve a version whatever wins, until it is unpinned."""
    with _asking() as moves:
        done = moves.pin(moves.one_model(scope), version, why)
    _say(done, as_json)


@app.command()
def unpin(why: Why = "", scope: Scope = None, as_json: Json = False) -> None:
    """Serve the champion again."""
    with _asking() as moves:
        done = moves.pin(moves.one_model(scope), None, why)
    _say(done, as_json)


def _say(move: dict[str, Any], as_json: bool) -> None:
    """Print what was moved, and what is served now."""
    if as_json:
        return print_json(move)
    before, after = (f"version {n}" if (n := move[end]) else "nothing" for end in ("from", "to"))
    out.print(
        f"{move['name']}: {move['alias']} went from {before} to {after}. "
        f"Served: version {move['served']}, on workers as soon as a learner publishes it.",
        highlight=False,
        soft_wrap=True,
    )
    return None


def _plain(model: Model) -> dict[str, Any]:
    """A model and its versions, ascending."""
    standing = model.standing
    return {
        "name": standing.name,
        "scope": standing.scope,
        "target": standing.tags.get("target", ""),
        "drafter": standing.tags.get("drafter", ""),
        "served": standing.served,
        "versions": [
            {
                "version": version.number,
                "aliases": list(version.aliases),
                "made": datetime.fromtimestamp(version.created, UTC).isoformat(),
                "tags": dict(version.tags),
            }
            for version in model.versions
        ],
    }


def _table(model: dict[str, Any]) -> Table:
    """The versions of a :func:`_plain`, newest first."""
    table = Table(title=escape(model["name"]), caption=f"scope {model['scope']}")
    for heading in ("version", "alias", "kind", "made", "origin", "why"):
        table.add_column(heading, overflow="fold")
    for version in reversed(model["versions"]):
        tags, number = version["tags"], str(version["version"])
        table.add_row(
            f"[bold]{number}[/bold]" if version["version"] == model["served"] else number,
            ", ".join(version["aliases"]),
            tags.get("kind", ""),
            version["made"][:19].replace("T", " "),
            tags.get("origin", ""),
            escape(tags.get("why") or tags.get("verdict", "")),
        )
    return table

"""``hvd policy``: a few lines each on the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape

from pipelines.reports import print_json

app = typer.Typer(
    help=(
        "What is served, who made it so, and the moves that a person makes. The registry is "
        "HVD_LEARNER_MLFLOW_TRACKING_URI, or what 'hvd up' keeps in mlruns/."
    ),
    no_args_is_help=True,
    add_completion=False,
)
out, err = Console(), Console(stderr=True)

Scope = Annotated[
    str | None,
    typer.Option(help="Scope, its first digits, or the model's name; needed where there are two."),
]
Why = Annotated[str, typer.Option(help="Kept with the move.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Wanted = Annotated[str, typer.Argument(help="A version's number, or an alias.")]


@app.command("list")
def list_(scope: Scope = None, as_json: Json = False) -> None:
    """Every version, newest first; what is served is bold."""
    from pipelines.policy import asked, shown

    if scope is None:
        held = asked.registry()
        models = [
            asked.Model(held, standing, held.versions(name))
            for name, standing in held.standings().items()
        ]
    else:
        models = [asked.model(scope)]
    if as_json:
        print_json([shown.listed(model) for model in models])
    for model in models if not as_json else []:
        out.print(shown.list_table(model))
    if not models:
        err.print("No policy is registered yet: a learner makes them.")


@app.command()
def show(version: Wanted = "champion", scope: Scope = None, as_json: Json = False) -> None:
    """One version: what it decides, where it comes from, its figures."""
    from pipelines.policy import asked, shown

    model = asked.model(scope)
    found = model.version(version)
    policy = model.registry.load(model.scope, found.number)
    told = shown.told(model, found, policy, model.registry.figures(found))
    if as_json:
        return print_json(told)
    aliases = f" ({', '.join(found.aliases)})" if found.aliases else ""
    out.print(f"[bold]{escape(model.standing.name)}[/bold] version {found.number}{aliases}\n")
    out.print(Markdown(found.description or "No description: a version of before."))
    for title, values in (("tags", told["tags"]), ("metrics", told["metrics"])):
        out.print(f"\n[bold]{title}[/bold]")
        for key, value in sorted(values.items()):
            what = f"{value:.4g}" if isinstance(value, float) else str(value)
            out.print(f"  {key:<22} {escape(what)}", highlight=False, soft_wrap=True)
    return None


@app.command()
def diff(
    one: Wanted,
    other: Wanted,
    traces: Annotated[
        Path | None, typer.Option(help="Trace file or folder of them; default: the project's own.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Generations of each file.")] = 20,
    model_accepts: Annotated[
        float, typer.Option(help="Model draft's mean accepted length, where not recorded.")
    ] = 2.2,
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    scope: Scope = None,
    as_json: Json = False,
) -> None:
    """Two versions on recorded drafts: where they decide otherwise, and what it brought."""
    from decoder.payoff.token_classes import token_classes_of
    from pipelines.embedded import load_tokenizer
    from pipelines.policy import asked, compared
    from pipelines.progress import Shown

    model = asked.model(scope)
    numbers = [model.version(each).number for each in (one, other)]
    policies = [model.registry.load(model.scope, number) for number in numbers]
    paths = compared.recordings(traces)
    known = load_tokenizer(tokenizer)
    classes = token_classes_of(known)
    with Shown(err) as bar:
        found = compared.compare(
            policies[0], policies[1], paths, known, classes, limit, model_accepts, bar.step
        )
    if as_json:
        return print_json({"versions": numbers, "recordings": compared.as_dict(found)})
    names = [f"version {number}" for number in numbers]
    out.print(compared.rates_table(found, *names))
    out.print(compared.otherwise_table(found[0], *names))
    return None


@app.command()
def promote(
    version: Annotated[str, typer.Argument(help="A version's number, an alias, or a bundle.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also what has not passed the gate, or behind a pin.")
    ] = False,
    why: Why = "",
    scope: Scope = None,
    as_json: Json = False,
) -> None:
    """Make a version champion; a bundle (*.safetensors) is registered first."""
    from pipelines.policy import asked, moved

    model = asked.model(scope)
    number = moved.promote(model, version, why, force=force)
    _moved(model, "champion", model.standing.champion, number, as_json)


@app.command()
def rollback(why: Why = "", scope: Scope = None, as_json: Json = False) -> None:
    """Make the version champion that was so before."""
    from pipelines.policy import asked, moved

    model = asked.model(scope)
    before, number = moved.rollback(model, why)
    _moved(model, "champion", before, number, as_json)


@app.command()
def trial(
    version: Annotated[str | None, typer.Argument(help="A version's number, or an alias.")] = None,
    end: Annotated[bool, typer.Option("--end", help="End the trial under way.")] = False,
    why: Why = "",
    scope: Scope = None,
    as_json: Json = False,
) -> None:
    """Compare a version with what is served, on a share of the steps; --end stops that."""
    from pipelines.policy import asked, moved

    if (version is None) != end:
        raise typer.BadParameter("name a version, or give --end", param_hint="VERSION")
    model = asked.model(scope)
    number = moved.name(model, "trial", version, why)
    _moved(model, "trial", model.standing.trial, number, as_json)
    if number is not None and not as_json:
        out.print(
            f"Version {number} is compared as soon as a learner reads this; one with "
            "HVD_LEARNER_ROLLOUT=off compares nothing.",
            highlight=False,
            soft_wrap=True,
        )


@app.command()
def pin(version: Wanted, why: Why = "", scope: Scope = None, as_json: Json = False) -> None:
    """Serve a version whatever wins, until it is unpinned."""
    from pipelines.policy import asked, moved

    model = asked.model(scope)
    number = moved.name(model, "pinned", version, why)
    _moved(model, "pinned", model.standing.pinned, number, as_json)


@app.command()
def unpin(why: Why = "", scope: Scope = None, as_json: Json = False) -> None:
    """Serve the champion again."""
    from pipelines.policy import asked, moved

    model = asked.model(scope)
    moved.name(model, "pinned", None, why)
    _moved(model, "pinned", model.standing.pinned, None, as_json)


@app.command()
def history(scope: Scope = None, as_json: Json = False) -> None:
    """Who moved which alias, when, and why; newest first."""
    from pipelines.policy import asked, shown

    model = asked.model(scope)
    moves = model.registry.history(model.scope)
    if as_json:
        return print_json(shown.history(moves))
    out.print(shown.history_table(model, moves))
    return None


def _moved(model: Any, alias: str, before: int | None, after: int | None, as_json: bool) -> None:
    """Say what was moved, and what is served now."""
    standing = model.registry.standing(model.scope)
    if as_json:
        print_json(
            {
                "name": standing.name,
                "scope": standing.scope,
                "alias": alias,
                "from": before,
                "to": after,
                "served": standing.served,
            }
        )
        return
    ends = [f"version {end}" if end is not None else "nothing" for end in (before, after)]
    out.print(
        f"{standing.name}: {alias} went from {ends[0]} to {ends[1]}. "
        f"Served: version {standing.served}, on workers as soon as a learner publishes it.",
        highlight=False,
        soft_wrap=True,
    )

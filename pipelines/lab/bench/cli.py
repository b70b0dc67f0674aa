"""``hvd bench``: measure decoding methods. Each command imports what it needs when it is called."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from pipelines.lab.bench.options import DecodeOptions, ServingOptions
from pipelines.options import AsJson, options_of
from pipelines.reports import complain, print_json, write_json

app = typer.Typer(help="Measure decoding methods.", no_args_is_help=True, add_completion=False)
out, err = Console(), Console(stderr=True)


@app.command()
@options_of(DecodeOptions)
def decode(o: DecodeOptions) -> None:
    """Compare methods in the reference engine, prompt by prompt.

    Each prompt is decoded by every method in turn, in rotating order. Ctrl-C
    reports the prompts so far. Takes minutes, also with --limit 2.
    Example: hvd bench decode --limit 2 --methods greedy,suffix,hybrid
    """
    from decoder.contracts.errors import SettingsError
    from pipelines.lab.bench import metrics
    from pipelines.lab.bench.decode import launch
    from pipelines.lab.bench.methods import names

    if o.hub and o.prompts is not None:
        raise SettingsError("--hub loads datasets and --prompts reads a folder: give one of them.")
    if o.check and "greedy" not in names(o.methods):
        raise SettingsError("--check compares with greedy: name it among --methods.")
    results = launch(o, err)
    summary = metrics.summary(results)
    write_json(summary, o.as_json)
    title = f"{summary['prompts']} prompts, speed over greedy's"
    out.print(metrics.table(title, metrics.COLUMNS, summary["overall"]))
    out.print(f"Report: [bold]{o.as_json}[/bold]", soft_wrap=True)
    differing = summary["differing"]
    for sentence in differing:
        err.print(f"[red]{escape(sentence)}[/red]", highlight=False, soft_wrap=True)
    if o.check and not differing:
        err.print("Every output equals greedy's.")
    if results.interrupted:
        err.print("Not every prompt was decoded.")
    raise typer.Exit(130 if results.interrupted else int(o.check and bool(differing)))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
@options_of(ServingOptions)
def serve(context: typer.Context, o: ServingOptions) -> None:
    """Compare real servers: stock vLLM without speculation, suffix, eagle3; and ours.

    Interrupted, it reports the servers that were done. Arguments after -- go
    to every server. Each server takes minutes a round.
    Example: hvd bench serve --limit 8 --rounds 1 -- --max-model-len 4096
    """
    from pipelines.lab.bench.metrics import table
    from pipelines.lab.bench.serve import run as bench
    from pipelines.lab.bench.serve.setups import planned
    from pipelines.lab.bench.serve.summary import WIDTH, table_columns, unequal

    problems: list[str] = []
    plan = planned(o, context.args, problems)
    complain(err, problems)
    report = bench.run(plan, o.as_json, err)
    records = report["records"]
    Console(width=max(WIDTH, out.width)).print(table("", table_columns(records), records))
    differing = unequal(report)
    complain(err, differing)
    out.print(f"Report: [bold]{o.as_json}[/bold]", soft_wrap=True)
    unproven = differing or report["skipped"] or any(r["failed"] for r in records)
    raise typer.Exit(1 if o.check and unproven else 0)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def gpu(context: typer.Context) -> None:
    """Time steps on a GPU at real shapes, and compare methods there; see --help."""
    from pipelines.lab.bench.gpu import main

    raise typer.Exit(main(context.args))


def _show(title: str, figures: dict[str, Any], as_json: bool) -> None:
    from pipelines.lab.bench.metrics import facts

    print_json(figures) if as_json else out.print(facts(title, figures))


@app.command()
def decide(
    steps: Annotated[int, typer.Option(min=20, help="Steps timed.")] = 300,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Also time the delay by prompts of 32k."),
    ] = False,
    requests: Annotated[int, typer.Option(min=1, max=4096, help="Requests of a step.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1_000,
    loops: Annotated[bool, typer.Option("--loops", help="Texts repeat two tokens.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time this project's part of a vLLM step: microseconds a request, processor time.

    Lookups, decisions, labels, events, delivery counters and vLLM's adapter.
    Budget: 12 us a request of 64, and with --whole a delay of 2 ms.
    """
    from pipelines.lab.bench.step_cost import Batch, measure

    batch = Batch(requests, prompt, loops)
    figures = measure(steps, 7 if whole else 0, batch=batch)
    _show(f"This project's part of a step of {requests} requests", figures, as_json)


@app.command()
def memory(
    outputs: Annotated[
        int, typer.Option(min=1, help="Output tokens of earlier requests of the tenant.")
    ] = 10_000_000,
    requests: Annotated[int, typer.Option(min=1, help="Running requests.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 131_072,
    as_json: AsJson = False,
) -> None:
    """Measure the memory for a tenant's text: as accounted, and as the process grows."""
    from pipelines.lab.bench.step_cost import memory as measure

    _show("Memory for a tenant's text", measure(outputs, requests, prompt), as_json)


@app.command()
def learner(
    events: Annotated[
        int, typer.Option(min=10_000, help="Events for each combination.")
    ] = 10_000_000,
    scopes: Annotated[str, typer.Option(help="Numbers of scopes, separated by commas.")] = "1,10",
    intakes: Annotated[
        str,
        typer.Option(help="Numbers of separate intakes, with commas; 0: the learner's own."),
    ] = "0,1",
    as_json: AsJson = False,
) -> None:
    """Measure the events a second that a learner reads on one core, and its memory.

    Needs no broker and no registry. Separate intakes forward a sixteenth of
    the requests; their rate is summed, each on a core of its own.

    Aims: 50,000 events a second, and as much memory after ten million events
    as after one.
    """
    from pipelines.lab.bench.learner import measure
    from pipelines.reports import Shown

    try:
        pairs = [(int(n), int(k)) for n in scopes.split(",") for k in intakes.split(",")]
        if any(n < 1 or k < 0 for n, k in pairs):
            raise ValueError("at least one scope")
    except ValueError as error:
        raise typer.BadParameter("whole numbers, separated by commas") from error
    figures = {}
    with Shown(err) as shown:
        for n, k in pairs:
            name = f"{n} scopes, {k} intakes"
            figures[name] = measure(events, n, partial(shown.step, name, whole=events), k)
    _show("Events read by a learner", figures, as_json)

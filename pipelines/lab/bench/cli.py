"""``hvd bench``: what each decoding method is worth. Each command imports when it is called."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from pipelines.lab.bench.options import Clock, Dtype, Engine, Selection
from pipelines.lab.bench.serve import command as serve_cli
from pipelines.prompts import TooLong
from pipelines.reports import print_json, write_json

app = typer.Typer(
    help="Measure decoding methods against each other.", no_args_is_help=True, add_completion=False
)
out, err = Console(), Console(stderr=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


@app.command()
def decode(
    prompts: Annotated[
        Path | None,
        typer.Option(help="Folder of <dataset>.jsonl files; default: the hub's sixteen datasets."),
    ] = None,
    datasets: Annotated[str, typer.Option(help="Only these, separated by commas.")] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="Separated by commas; 'frequency:4' sets a parameter, 'suffix@2' lengthens drafts."
        ),
    ] = "greedy,eagle3,suffix,frequency,arctic,hybrid,oracle",
    limit: Annotated[int, typer.Option(min=1, help="Measured prompts of each dataset.")] = 20,
    warmup: Annotated[
        int, typer.Option(min=0, help="Further prompts of each that only fill the caches.")
    ] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a prompt.")] = 128,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=2, help="Prompts longer than this count as too long.")
    ] = None,
    too_long: Annotated[
        TooLong, typer.Option(help="Skip a prompt that is too long, or truncate its middle.")
    ] = "skip",
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="EAGLE3 head made for the model, or 'none'.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Bundle for 'hybrid'; 'name=FILE' makes a method 'hybrid:name'."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="What is computed in.")] = "float32",
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")] = None,
    clock: Annotated[
        Clock, typer.Option(help="'cpu' counts processor time, for a machine that does other work.")
    ] = "wall",
    as_json: Annotated[Path, typer.Option("--json", help="Where the figures go.")] = Path(
        "reports/bench/decode.json"
    ),
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Start no further prompt after these.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit status 1 unless all outputs equal greedy's.")
    ] = False,
) -> None:
    """Methods against each other in the reference engine, prompt by prompt.

    Each prompt is decoded by every method in turn, in rotating order. Ctrl-C reports what is there.
    """
    from decoder.contracts.errors import SettingsError
    from pipelines.lab.bench import metrics, render
    from pipelines.lab.bench.decode import launch
    from pipelines.lab.bench.methods import names
    from pipelines.lab.bench.options import words

    wanted = names(methods)
    if check and "greedy" not in wanted:
        raise SettingsError("--check compares with greedy: name it among --methods.")
    selection = Selection(
        prompts, words(datasets), limit, warmup, max_prompt_tokens, too_long, max_tokens, minutes
    )
    engine = Engine(model, drafter, tuple(policy or ()), dtype, device, threads, clock)
    results = launch(wanted, selection, engine, err)
    summary = metrics.summary(results)
    write_json(summary, as_json)
    title = f"{summary['prompts']} prompts, speed over greedy's"
    out.print(render.table(title, render.COLUMNS, summary["overall"]))
    out.print(f"Report: [bold]{as_json}[/bold]", soft_wrap=True)
    differing = summary["differing"]
    for sentence in differing:
        err.print(f"[red]{escape(sentence)}[/red]", highlight=False, soft_wrap=True)
    if check and not differing:
        err.print("Every output equals greedy's.")
    if results.interrupted or results.out_of_time:
        err.print("Not every prompt was decoded.")
    raise typer.Exit(130 if results.interrupted else int(check and bool(differing)))


app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(
    serve_cli.serve
)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def gpu(context: typer.Context) -> None:
    """Costs of steps on a GPU at real shapes, and methods there with the real router; --help."""
    from pipelines.lab.bench.gpu import main

    raise typer.Exit(main(context.args))


def _show(title: str, found: dict[str, Any], as_json: bool) -> None:
    from pipelines.lab.bench.render import facts

    print_json(found) if as_json else out.print(facts(title, found))


@app.command()
def decide(
    steps: Annotated[int, typer.Option(min=20, help="Steps timed.")] = 300,
    whole: Annotated[
        bool, typer.Option("--whole", help="And how long prompts of 32k make the others wait.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """All that is ours in a vLLM step of 64 requests: microseconds a request, processor time.

    Real lookups, decisions, labels, events, accounts and vLLM's adapter. Budget: 20 us a
    request, and with --whole 2 ms of waiting.
    """
    from pipelines.lab.bench.step_cost import measure

    _show("A step of 64 requests, all that is ours", measure(steps, 7 if whole else 0), as_json)


@app.command()
def learner(
    events: Annotated[
        int, typer.Option(min=10_000, help="Events taken in, with one scope and with ten.")
    ] = 10_000_000,
    as_json: AsJson = False,
) -> None:
    """What a learner takes in on one core, with one scope and with ten; no broker, no registry.

    Then with an intake apart, a sixteenth of the requests: events a second of that, and of the
    learner, by what the intake reads.

    Aims: 50,000 events a second, and as much memory after ten million events as after one.
    """
    from pipelines.lab.bench.learner import SAMPLED, measure
    from pipelines.progress import Shown

    with Shown(err) as shown:
        one, ten = (
            measure(events, n, partial(shown.step, f"events of {n} scopes", whole=events))
            for n in (1, 10)
        )
        apart = measure(events, 1, partial(shown.step, "events apart", whole=events), SAMPLED)
    told = {**one, "ten_scopes": ten, "intake_apart": apart}
    _show("What a learner takes in", told, as_json)

"""``hvd bench``: what each decoding method is worth. Each command imports when it is called."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pipelines.bench.gpu import command as gpu_cli
from pipelines.bench.options import Clock, Dtype, Engine, Options, Selection, Templates
from pipelines.bench.serve import command as serve_cli
from pipelines.prompts import TooLong
from pipelines.reports import print_json, write_json

app = typer.Typer(
    help="Measure decoding methods against each other.", no_args_is_help=True, add_completion=False
)
out, err = Console(), Console(stderr=True)


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
    template: Annotated[
        Templates, typer.Option(help="With a chat template, with none, or both.")
    ] = "chat",
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
    save_to: Annotated[
        Path | None, typer.Option("--out", help="Folder of generations and results.json.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file, too.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Start no further prompt after these.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier run there.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit status 1 unless all outputs equal greedy's.")
    ] = False,
) -> None:
    """Methods against each other in the reference engine, prompt by prompt.

    Each prompt is decoded by every method in turn, in rotating order. Figures go to --json, and
    with the generations to --out; run again, it goes on where it stopped. Ctrl-C reports what is
    there.
    """
    from pipelines.bench import metrics, render
    from pipelines.bench.commas import words
    from pipelines.bench.decode import launch

    selection = Selection(
        prompts, words(datasets), limit, warmup, max_prompt_tokens, too_long, template
    )
    engine = Engine(model, drafter, tuple(policy or ()), dtype, device, threads, clock)
    options = Options(methods, selection, engine, max_tokens, minutes, save_to, fresh)
    results, folder = launch.launch(options, err)
    summary = metrics.summary(results)
    for path in filter(None, (folder / "results.json", as_json)):
        write_json(summary, path)
    title = f"{summary['prompts']} prompts, speed over greedy's"
    out.print(render.table(title, render.COLUMNS, summary["overall"]))
    out.print(f"Report: [bold]{folder / 'results.json'}[/bold]", soft_wrap=True)
    for sentence in summary["differing"]:
        err.print(f"[red]{escape(sentence)}[/red]", highlight=False, soft_wrap=True)
    if results.interrupted or results.out_of_time:
        err.print("Not every prompt was decoded: the same command goes on from here.")
    if results.interrupted:
        raise typer.Exit(130)
    raise typer.Exit(1 if check and not launch.proven(results, err) else 0)


app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(
    serve_cli.serve
)
app.command()(gpu_cli.gpu)


@app.command()
def decide(
    rounds: Annotated[int, typer.Option(min=100, help="Decisions timed for each kind.")] = 3_000,
    whole: Annotated[
        bool, typer.Option(help="All that is ours in a vLLM step of 64 requests.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the timings as JSON.")] = False,
) -> None:
    """What one decision costs a decoding cycle, the suffix lookup aside; one thread.

    Budget: 49 us for a lone request, 10 us a request in a batch of 64. With --whole, lookups in
    real trees, labels, events, accounts and vLLM's adapter are in it, and how long a prompt of 32k
    tokens makes the others wait. Budget: 20 us a request, 2 ms.
    """
    from pipelines.bench.decide import KINDS, measure
    from pipelines.bench.render import facts

    if whole:
        from pipelines.bench import step_cost

        step = step_cost.measure(max(rounds // 10, 100))
        print_json(step.as_dict()) if as_json else out.print(step_cost.table(step))
        return
    found = {kind: measure(kind, rounds) for kind in KINDS}
    print_json(found) if as_json else out.print(facts("us a decision", found))


@app.command()
def learner(
    events: Annotated[
        int, typer.Option(min=10_000, help="Events taken in, with one scope and with ten.")
    ] = 10_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """What a learner takes in on one core, with one scope and with ten; no broker, no registry.

    Aims: 50,000 events a second, and as much memory after ten million events as after one.
    """
    from pipelines.bench.learner import measure
    from pipelines.bench.render import facts
    from pipelines.progress import Shown

    with Shown(err) as shown:
        what = "events of {} scopes"
        runs = [
            measure(events, n, partial(shown.step, what.format(n), whole=events)) for n in (1, 10)
        ]
    found = {**runs[0], "ten_scopes": runs[1]}
    print_json(found) if as_json else out.print(facts("What a learner takes in", found))


@app.command()
def telemetry(
    rate: Annotated[float, typer.Option(min=100, help="Events a second of the worker.")] = 10_000,
    seconds: Annotated[float, typer.Option(min=2, help="Length, half of it with events.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """What telemetry costs the thread that decodes, and the machine; with a broker.

    A thread does work of the router's kind and emits the events of 64 requests a step, in every
    other second. Aim: it loses at most 1% of its rate at 10,000 events a second.
    """
    from pipelines.bench.render import facts
    from pipelines.bench.telemetry import measure
    from pipelines.progress import Shown

    with Shown(err) as shown:
        tell = partial(shown.step, "seconds of emitting events", whole=seconds)
        found = measure(rate, seconds, tell)
    print_json(found) if as_json else out.print(facts("Telemetry of one worker", found))

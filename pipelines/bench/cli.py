"""``hvd bench``: what each decoding method is worth. Each command imports when it is called."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pipelines.bench.gpu import command as gpu_cli
from pipelines.bench.serve import command as serve_cli
from pipelines.bench.sessions import command as sessions_cli
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
        str, typer.Option(help="'skip' a prompt that is too long, or 'truncate' its middle.")
    ] = "skip",
    template: Annotated[
        str, typer.Option(help="Chat template: chat, none, or both to compare them.")
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
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")] = None,
    clock: Annotated[
        str, typer.Option(help="'cpu' counts processor time, for a machine that does other work.")
    ] = "wall",
    save_to: Annotated[
        Path | None, typer.Option("--out", help="Folder of generations and report.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
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

    Each prompt is decoded by every method in turn, in rotating order. Figures go to --json,
    generations and an HTML report to --out; run again, it goes on where it stopped. Ctrl-C
    reports what is there.
    """
    from pipelines.bench import metrics, tables
    from pipelines.bench.asked import Asked
    from pipelines.bench.commas import words
    from pipelines.bench.decode import launch, report

    asked = Asked(
        prompts, words(datasets), methods, limit, warmup, max_tokens, max_prompt_tokens,
        too_long, template, model, drafter, tuple(policy or ()), dtype, device, threads, save_to,
        fresh, minutes, clock,
    )  # fmt: skip
    results, folder = launch.launch(asked, err)
    summary = metrics.summary(results)
    page = report.write(results, summary, folder)
    if as_json is not None:
        write_json(summary, as_json)
    for table in tables.shown(summary):
        out.print(table)
    out.print(f"Report: [bold]{page}[/bold]", soft_wrap=True)
    for sentence in summary["differing"]:
        err.print(f"[red]{escape(sentence)}[/red]", highlight=False, soft_wrap=True)
    if results.interrupted or results.out_of_time:
        err.print("Not every prompt was decoded: the same command goes on from here.")
    if results.interrupted:
        raise typer.Exit(130)
    raise typer.Exit(1 if check and not launch.proven(results, err) else 0)


for of_servers in (serve_cli.serve, sessions_cli.sessions):
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(
        of_servers
    )
app.command()(gpu_cli.gpu)


@app.command()
def decide(
    rounds: Annotated[int, typer.Option(min=100, help="Decisions timed for each kind.")] = 3_000,
    whole: Annotated[
        bool, typer.Option(help="All that the router does in a step of 64 requests.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the timings as JSON.")] = False,
) -> None:
    """What one decision costs a decoding cycle, the suffix lookup aside; one thread.

    Budget: 49 us for a lone request, 10 us a request in a batch of 64. With --whole, lookups in
    real trees, labels, events and accounts are in it, and how long a prompt of 32k tokens makes
    the others wait. Budget: 20 us a request, 2 ms.
    """
    if whole:
        from pipelines.bench import whole as step

        found = step.measure(max(rounds // 10, 100))
        if as_json:
            print_json(found.as_dict())
        else:
            out.print(step.table(found))
        return
    from pipelines.bench.decide import measure_all, table

    timings = measure_all(rounds)
    if as_json:
        print_json({t.kind: t.as_dict() for t in timings})
    else:
        out.print(table(timings))


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
    from pipelines.bench.learner import measure, table
    from pipelines.progress import Shown

    with Shown(err) as shown:
        what = "events of {} scopes"
        runs = [
            measure(events, n, partial(shown.step, what.format(n), whole=events)) for n in (1, 10)
        ]
    if as_json:
        found = {**runs[0].as_dict(), "ten_scopes": runs[1].as_dict()}
        print_json(found)
    else:
        out.print(table(runs))


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
    from pipelines.bench.telemetry import measure, table
    from pipelines.progress import Shown

    with Shown(err) as shown:
        tell = partial(shown.step, "seconds of emitting events", whole=seconds)
        found = measure(rate, seconds, tell)
    if as_json:
        print_json(found.as_dict())
    else:
        out.print(table(found))


@app.command()
def trial(
    traces: Annotated[
        list[Path] | None,
        typer.Option(help="Recordings (.jsonl); default: those that `hvd drift --record` makes."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Recordings of each file.")] = 40,
    runs: Annotated[int, typer.Option(min=1, help="Simulated runs of a side and itself.")] = 200,
    live: Annotated[
        float, typer.Option(min=0.0, help="Minutes of a side against itself on the embedded model.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Whether a comparison by turns holds what it promises, and how long it takes.

    A side is compared with itself in simulated runs on recordings, looked at after every round: how
    often does the interval ever exclude 1? Then with one that is faster by 20%, 5% and 2%: rounds
    and steps until that is seen. Then each stock side alone, beside what turns say of it. With
    --live the embedded model decodes, and the noise of its steps is what the runs are made with.
    """
    from pipelines.bench import trial_cli, trial_live
    from pipelines.bench.trial import table

    with err.status("") as shown:
        found, real = trial_cli.run(traces or [], limit, runs, live, shown.update)
    if as_json:
        figures = {**found.as_dict(), "live": real.as_dict() if real is not None else None}
        print_json(figures)
        return
    out.print(table(found))
    if real is not None:
        out.print(trial_live.table(real))


@app.command()
def trouble(
    arms: Annotated[
        str, typer.Option(help="What to break in turn: drafter, cache, batch (four vLLM servers).")
    ] = "drafter,cache",
    prompts: Annotated[int, typer.Option(min=1, help="Measured prompts of each phase.")] = 5,
    crowd: Annotated[int, typer.Option(min=2, help="Requests at a time that fill a batch.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 96,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Break an arm while the embedded model decodes, then mend it: what the hybrid makes of it.

    'drafter' and 'cache' break in the reference engine; 'batch' is a crowd of requests at vLLM
    servers, with --prompts for each of those under way. The hybrid's rate is held to that of the
    best fixed arm, 200 cycles after each change. Ctrl-C reports what is there.
    """
    from pipelines.bench.commas import words
    from pipelines.bench.trouble.run import measure_all, table

    stretches, ended = measure_all(words(arms), prompts, max_tokens, threads, crowd, err)
    if as_json is not None:
        write_json({"stretches": [s.as_dict() for s in stretches]}, as_json)
    out.print(table(stretches))
    raise typer.Exit(0 if ended else 130)

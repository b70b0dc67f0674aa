"""``hvd``: the project's commands. Each does its imports when it is called."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from decoder.contracts.errors import HvdError
from pipelines.bench.cli import app as bench_app
from pipelines.policy.command import app as policy_app

app = typer.Typer(
    name="hvd",
    help=(
        "Adaptive decoding for LLM serving: a worker chooses, cycle by cycle, between a draft "
        "copied from a suffix cache and one of a draft model; a learner keeps learning the choice "
        "from what was really accepted.\n\n"
        "Begin with [bold]hvd doctor[/bold], then [bold]hvd demo[/bold]."
    ),
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(policy_app, name="policy")
out, err = Console(), Console(stderr=True)

REPORTS = Path("reports/demo")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def serve(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="EAGLE3 head made for the model, or 'none'.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    host: str = "127.0.0.1",
    dtype: Annotated[str, typer.Option(help="auto chooses what is fastest here.")] = "auto",
) -> None:
    """Serve one model with hybrid decoding: an OpenAI-compatible API.

    Arguments after -- go to 'vllm serve' as they are.
    Example: hvd serve --model ./llama-8b --drafter ./llama-8b-eagle3 -- --max-model-len 8192
    """
    from pipelines.serve import command as worker

    worker.serve(worker.chosen(model, drafter, host, port, dtype, context.args))


@app.command()
def learn() -> None:
    """Learn from the draft events on Kafka until Ctrl-C; publishes better policies."""
    from learner.__main__ import main as learner_main

    raise typer.Exit(learner_main())


@app.command()
def up(
    api_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    kafka_port: Annotated[int, typer.Option(min=1, max=65535)] = 9092,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535)] = 5000,
    page_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Of the page that shows what it brings, live.")
    ] = 8010,
) -> None:
    """Start broker, registry, worker and learner, and keep them up until Ctrl-C.

    What ends is started again, and said. Once all is ready it prints what to try first: a request,
    a page, a topic, a rollback. Topics, versions and what was learned are kept for the next time.
    """
    from pipelines.stack.running import Home, Ports
    from pipelines.stack.up import up as stay

    stay(Ports(api_port, kafka_port, mlflow_port), page_port, Home.of_checkout(), out)


@app.command()
def demo(
    minutes: Annotated[
        float | None, typer.Option(min=0.5, help="Minutes of traffic; default: 7, or less.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Serve, learn and watch for a few minutes; writes reports/demo/report.html.

    Needs no network, no GPU and no free port. Ends by itself within ten minutes. Exit status 1: an
    event was lost, no learned policy came into force, or it was not shown to be faster than plain
    decoding.
    """
    from pipelines.demo import dashboard
    from pipelines.demo import run as whole

    run = whole.run(minutes, err if as_json else out)
    page = whole.write(run, REPORTS)
    if as_json:
        sys.stdout.write(json.dumps(run.summary.as_dict(), indent=1) + "\n")
    else:
        out.print(dashboard.outcome(run.summary))
        out.print(f"Report: [bold]{page}[/bold]")
        out.print(
            f"Registry: mlflow ui --backend-store-uri sqlite:///{whole.HOME}/mlruns/mlflow.db"
        )
    for failing in run.summary.failings:
        err.print(f"[red]{escape(failing)}[/red]")
    raise typer.Exit(1 if run.summary.failings else 0)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine and environment; each failing line names its fix."""
    from dataclasses import asdict

    from pipelines.doctor import examine

    checks = examine()
    if as_json:
        sys.stdout.write(json.dumps([asdict(c) for c in checks], indent=1) + "\n")
    else:
        signs = {True: "[red]bad [/red]", False: "[yellow]note[/yellow]"}
        for c in checks:
            sign = "[green]ok  [/green]" if c.ok else signs[c.blocks]
            fix = "" if c.ok else f"\n     {escape(c.fix)}"
            out.print(f"{sign} {c.name}: {escape(c.found)}{fix}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if any(c.blocks and not c.ok for c in checks) else 0)


@app.command()
def model() -> None:
    """Expand the embedded model into the cache, once; prints where it is."""
    from pipelines.embedded import ensure_model

    out.print(str(ensure_model()), soft_wrap=True, highlight=False)


@app.command()
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
        typer.Option(help="One step: generate, compose, written, extract or train."),
    ] = None,
) -> None:
    """Make an EAGLE3 drafter for the embedded model: its states, training, export."""
    from typing import get_args

    from pipelines import embedded
    from pipelines.drafter import command as drafting

    step = next((s for s in get_args(drafting.Step) if s == only), None)
    if only is not None and step is None:
        known = ", ".join(get_args(drafting.Step))
        raise typer.BadParameter(f"choose one of {known}", param_hint="--only")
    target, head = embedded.ensure_model(), save_to or embedded.DRAFTER
    drafting.make_drafter(target, folder, head, tokens, minutes, step)


@app.command()
def bootstrap(
    traces: Annotated[
        list[Path], typer.Option(help="Trace files, or a folder of them; may be given again.")
    ],
    licence: Annotated[
        list[str] | None,
        typer.Option(help="Learn from rows whose license is this; default: MIT and Apache-2.0."),
    ] = None,
    generations: Annotated[
        int, typer.Option(min=1, help="Generations of each file, in whole sessions.")
    ] = 100,
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="The policy to write, or to check; default: where it ships.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing: compare with refits and counting.")
    ] = False,
    model_accepts: Annotated[
        float,
        typer.Option(min=0.0, help="Check: model drafts' mean accepted length; 0: no drafter."),
    ] = 2.2,
    vocabulary: Annotated[
        int | None,
        typer.Option(min=300, help="Check with a tokenizer of so many entries, trained here."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a check's figures as JSON.")
    ] = False,
) -> None:
    """Make the first policy, which any model serves with until it has its own, or check it.

    It is trained on recorded generations of many kinds (JSON Lines as for hvd replay) and written
    where it ships from, with a card of what it was made of. --check compares it with policies
    refitted to each file, leaving out of its training what it is compared on.
    Example: hvd bootstrap --traces traces --check
    """
    from decoder.policy.first import SHIPPED
    from pipelines.first import command
    from pipelines.first.sets import ALLOWED

    asked = command.Asked(traces, tuple(licence or ALLOWED), generations, tokenizer)
    place = bundle or SHIPPED
    if not check:
        made = command.make(asked, place, err)
        out.print(f"wrote {place}", soft_wrap=True)
        out.print_json(data=made.provenance)
        return
    found = command.check(asked, place, model_accepts, vocabulary, err)
    if as_json:
        figures = command.figures(found, model_accepts, vocabulary)
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    else:
        out.print(command.table(found))


@app.command()
def replay(
    traces: Annotated[list[Path] | None, typer.Argument(help="Trace files: JSON Lines.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="In their place a folder of prompts: the embedded model answers them, once, and "
            "every rule decodes the recordings."
        ),
    ] = None,
    nominal: Annotated[
        bool, typer.Option("--nominal", help="Prompts: nominal costs, not those measured here.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    every_token: Annotated[
        bool,
        typer.Option(
            "--every-token/--cycles",
            help="Train and measure on every token position, or on simulated cycles.",
        ),
    ] = True,
    model_accepts: Annotated[
        float, typer.Option(help="Model draft's mean accepted length, where not recorded.")
    ] = 2.2,
    policy: Annotated[
        Path | None, typer.Option(help="Measure this bundle; default: train one.")
    ] = None,
    kind: Annotated[
        str,
        typer.Option(help="What is trained: payoff (the paper's, by a threshold) or survival."),
    ] = "payoff",
    train_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of sessions to train on.")
    ] = 0.6,
    warm_up_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of sessions that only fill the cache.")
    ] = 0.1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Generations of each file, in whole sessions.")
    ] = None,
    context: Annotated[
        int, typer.Option(min=2, help="Tokens that a prompt and its output may have.")
    ] = 16_384,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Try decoding policies on recorded generations; needs no model.

    Lines hold messages, a prompt and its output, or token ids; sessions are parted by name into
    training, warm-up and test.
    Example: hvd replay traces/*.jsonl --limit 200 --json
    """
    from pipelines.replay import command
    from pipelines.replay.split import Shares
    from pipelines.replay.study import Plan

    if train_share + warm_up_share >= 1.0:
        raise typer.BadParameter("leave sessions for the test", param_hint="--train-share")
    bundle = command.load_policy(policy) if policy else None
    if prompts is not None:
        ruled = command.by_rules(command.Asked(prompts, limit or 12, bundle, nominal), err)
        if as_json:
            sys.stdout.write(json.dumps(ruled, indent=1) + "\n")
        else:
            for table in command.rule_tables(ruled):
                out.print(table)
        return
    if not traces:
        raise typer.BadParameter("name trace files, or prompts with --prompts")
    shares = Shares(train_share, warm_up_share)
    if kind not in ("payoff", "survival"):
        raise typer.BadParameter("choose payoff or survival", param_hint="--kind")
    chosen: Literal["payoff", "survival"] = "payoff" if kind == "payoff" else "survival"
    plan = Plan(shares, not every_token, model_accepts, limit, context, bundle, chosen)
    reports, notices = command.run(traces, plan, command.load_tokenizer(tokenizer), err)
    command.show_notices(notices, err)
    if as_json:
        figures = command.as_dict(reports, plan, notices)
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    else:
        for table in command.tables(reports):
            out.print(table)


@app.command()
def drift(
    traces: Annotated[
        Path | None,
        typer.Option(help="Folder of trace files (*.jsonl); default: the project's own."),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="A scenario's name or file; may be given again. Default: all that ship."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between them.")] = "1,2,3",
    policies: Annotated[
        str, typer.Option(help="Policies, with commas between them; default: all.")
    ] = "",
    first: Annotated[
        Path | None, typer.Option(help="First policy to start from; default: the one that ships.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    scale: Annotated[
        float,
        typer.Option(min=0.01, max=100.0, help="Times all generations: below 1 for a quick look."),
    ] = 1.0,
    folder: Annotated[
        Path, typer.Option("--out", help="Where runs are kept and the page is written.")
    ] = Path("reports/drift"),
    resume: Annotated[
        bool, typer.Option("--resume/--anew", help="Go on where an earlier run stopped.")
    ] = True,
    record: Annotated[
        int,
        typer.Option(min=0, help="First let the embedded model answer, so many of each workload."),
    ] = 0,
    false_alarms: Annotated[
        int, typer.Option(min=0, help="Instead: alarms in so many drafts of unchanging traffic.")
    ] = 0,
    live: Annotated[
        bool,
        typer.Option("--live", help="Instead: the live scenarios, on a stack that it starts."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure what learning is worth when traffic changes, on recordings; needs no engine.

    Writes report.html and results.json. What is done is kept: Ctrl-C loses one run. --live plays
    two short scenarios through vLLM, Kafka and MLflow, six minutes each.
    Example: hvd drift --traces traces --scenario agents-to-chat --seeds 1
    """
    from pipelines.drift import command
    from pipelines.replay.command import load_tokenizer

    options = command.Options(traces, scenario or [], seeds, policies, scale, folder, resume)
    if record:
        from pipelines.drift import recording

        recording.record(command.recordings(), record)
    if live:
        summary = command.live(options, err)
        shown, written = command.compared(summary), "live.json"
    elif false_alarms:
        ids = load_tokenizer(tokenizer)
        summary = command.false_alarms(options, false_alarms, ids, command.first_of(first), err)
        shown, written = command.alarmed(summary), "false-alarms.json"
    else:
        summary = command.run(options, load_tokenizer(tokenizer), command.first_of(first), err)
        for notice in summary["notices"]:
            err.print(escape(notice), style="yellow", highlight=False, soft_wrap=True)
        shown, written = command.outcome(summary), "report.html"
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    else:
        out.print(shown)
        out.print(f"Report: [bold]{folder / written}[/bold]")


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt  # the same way out as Ctrl-C: everything started is stopped


def main() -> None:
    """Entry point: an error of ours is one sentence and exit status 2, Ctrl-C is 130."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _terminated)
    try:
        app(prog_name="hvd")
    except HvdError as error:
        name = type(error).__name__
        err.print(f"[red]{name}:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()

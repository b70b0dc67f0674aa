"""``hvd``: the project's commands. Each imports what it needs when it is called."""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from importlib.metadata import entry_points, version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from decoder.contracts.errors import HvdError
from pipelines.options import Drafter, DType, Model
from pipelines.policy.command import app as policy_app
from pipelines.reports import print_json
from pipelines.telemetry.cli import app as telemetry_app

app = typer.Typer(
    name="hvd",
    help=(
        "Adaptive decoding for LLM serving: in each cycle a worker chooses between a draft from a "
        "suffix cache and one of a draft model; a learner keeps training the choice on accepted "
        "lengths.\n\n"
        "Begin with [bold]hvd doctor[/bold], then [bold]hvd demo[/bold]."
    ),
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"hvd {version('hybrid-verified-decoding')}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.add_typer(policy_app, name="policy")
app.add_typer(telemetry_app, name="telemetry")
out, err = Console(), Console(stderr=True)

REPORTS = Path("reports/demo")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def serve(
    context: typer.Context,
    model: Model = None,
    drafter: Drafter = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    host: str = "127.0.0.1",
    dtype: DType = "auto",
) -> None:
    """Serve one model with hybrid decoding: an OpenAI-compatible API.

    Arguments after -- go to 'vllm serve' as they are.
    Example: hvd serve --model ./llama-8b --drafter ./llama-8b-eagle3 -- --max-model-len 8192
    """
    from pipelines.serve import command as worker

    worker.serve(worker.chosen(model, drafter, host, port, dtype, context.args))


@app.command()
def learn() -> None:
    """Learn from the draft events on Kafka until Ctrl-C, and publish better policies.

    One learner serves all workers; 'hvd up' starts one itself.
    Example: HVD_KAFKA_BOOTSTRAP_SERVERS=kafka:9092 hvd learn
    """
    from learner.__main__ import main as learner_main

    raise typer.Exit(learner_main())


@app.command()
def up(
    api_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    kafka_port: Annotated[int, typer.Option(min=1, max=65535)] = 9092,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535)] = 5000,
    page_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the live page.")] = 8010,
) -> None:
    """Start broker, registry, worker and learner, and keep them up until Ctrl-C.

    A start takes one to three minutes. Parts that end are restarted. When all
    are ready, it prints what to try first. Topics, versions and the learner's
    state are kept for the next start.
    Example: hvd up --page-port 8011
    """
    from pipelines.stack.running import Home, Ports
    from pipelines.stack.up import up as stay

    home = Home(Path("var"), Path("mlruns"))  # as a checkout has them
    stay(Ports(api_port, kafka_port, mlflow_port), page_port, home, out)


@app.command()
def demo(
    minutes: Annotated[
        float | None, typer.Option(min=0.5, help="Minutes of traffic at most; default: 6.5.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Serve, learn and watch for a few minutes; writes reports/demo/report.html.

    Needs no network, no GPU and no free port, and takes about nine minutes on
    two cores. A slow machine leaves phases out, and says which. At the end each
    rule decodes the answers again in virtual time. Exit status 1: a request
    failed, an event was lost, or a part died.
    Example: hvd demo --minutes 5
    """
    from pipelines.demo import run as whole

    summary = whole.run(minutes, err if as_json else out, REPORTS)
    if as_json:
        print_json(summary)
    else:
        for sentence in summary["sentences"]:
            out.print(sentence, markup=False, highlight=False)
        out.print(f"Report: [bold]{REPORTS / 'report.html'}[/bold]")
        out.print(
            f"Registry: mlflow ui --backend-store-uri sqlite:///{whole.HOME}/mlruns/mlflow.db"
        )
    for failing in summary["failings"]:
        err.print(f"[red]{escape(failing)}[/red]")
    raise typer.Exit(1 if summary["failings"] else 0)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine and environment; each failing line names its fix.

    Every variable that a process reads: docs/reference/settings.md.
    """
    from dataclasses import asdict

    from pipelines.doctor import examine

    checks = examine()
    if as_json:
        print_json([asdict(c) for c in checks])
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


for point in entry_points(group="hvd.commands"):  # the laboratory's
    try:
        further = point.load()
    except AttributeError:  # the installed version still lists a removed command
        continue
    if isinstance(further, typer.Typer):
        app.add_typer(further, name=point.name)
    else:
        app.command(point.name)(further)


UNWRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF)


def open_streams() -> None:
    """Make sure that all three standard streams are open and encode every character.

    A file opened while one is closed would get its number, and receive what is printed. Characters
    that an encoding lacks become ``?``.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is used; vLLM inherits it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def run() -> int:
    """Run this process's command. Returns its exit status: 2 after an error of ours or for a
    missing package, 130 after Ctrl-C."""
    try:
        app(prog_name="hvd")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0
    except HvdError as error:
        name = type(error).__name__
        err.print(f"[red]{name}:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
    except ModuleNotFoundError as error:
        err.print(
            f"{error.name or error} is not installed: pip install "
            "'hybrid-verified-decoding[service]' installs what all commands need, except vLLM.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return 2


def main() -> None:
    """Entry point: :func:`run`, with streams that may be closed, full, or without a reader."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            # as Ctrl-C: everything started is stopped
            signal.signal(number, signal.default_int_handler)
    open_streams()
    try:
        status = run()
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITTEN:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for remaining output
        status = 1  # a reader such as head has closed it
        if error.errno != errno.EPIPE:
            status = 2
            with suppress(OSError):
                sys.stderr.write(f"The output cannot be written: {error.strerror}.\n")
    sys.exit(status)


if __name__ == "__main__":
    main()

"""``hvd telemetry``: exports and follows the topics, and deletes a tenant."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from decoder.contracts.errors import SettingsError
from decoder.contracts.settings import KafkaSettings
from pipelines.options import Json
from pipelines.reports import print_json

app = typer.Typer(
    help=(
        "Export and follow the topics of the broker HVD_KAFKA_BOOTSTRAP_SERVERS. Their columns: "
        "docs/reference/topics.md."
    ),
    no_args_is_help=True,
    add_completion=False,
)
out, err = Console(), Console(stderr=True)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Folder of this export alone; it is resumed.")],
    as_json: Json = False,
) -> None:
    """Write all draft events on the topic into FOLDER as Parquet.

    Run again, it adds new events. An interrupted export is kept: run it again.
    An event that a worker sent twice is there twice, with one life and number.
    Queries for DuckDB: docs/telemetry.md.
    Example: hvd telemetry export events
    """
    from pipelines.reports import Shown
    from pipelines.telemetry.export import export as write

    with Shown(err) as shown:
        exported = write(KafkaSettings.load(), folder, shown.step)
    files, counts = len(exported.files), exported.counts
    if as_json:
        return print_json({"folder": str(folder), "files": files, "rows": exported.rows, **counts})
    return _say(
        f"{exported.rows} rows in {files} file{'s' * (files != 1)} of {folder}; "
        f"{counts['records']} records read, {counts['refused']} refused, "
        f"{counts['unreadable']} that cannot be unpacked, {counts['removed']} removed by age"
    )


@app.command()
def watch(
    past: Annotated[bool, typer.Option("--past", help="Start with the existing records.")] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Read the existing records, print a summary, and end.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Follow accepted length and calibration error by workload, until Ctrl-C.

    It prints a line for each change that ADWIN detects. The error is the
    serving policy's prediction less the accepted length.
    Example: hvd telemetry watch --past
    """
    from pipelines.telemetry.watch import Followed, follow

    followed = Followed()
    try:
        for change in follow(KafkaSettings.load(), followed, past=past or once, on=not once):
            _say(json.dumps(asdict(change)) if as_json else str(change), out)
    except KeyboardInterrupt:
        _say("")
    summary = followed.summary()
    if as_json:
        return _say(json.dumps(summary), out)
    for name, of in summary["workloads"].items():
        _say(
            f"{name or '(no workload)'}: {of['drafts']} drafts, {of['accepted']:.2f} tokens "
            f"accepted, calibration error {of['calibration']:+.2f}",
            out,
        )
    return _say(f"{summary['refused']} records refused") if summary["refused"] else None


@app.command()
def forget(
    tenant: Annotated[
        str,
        typer.Option(
            help="Pseudonym; with HVD_WORKER_ID_KEY also the name, or - to read it from standard "
            "input: others could read an API key in the command line."
        ),
    ],
    delete: Annotated[
        bool,
        typer.Option(
            "--delete-records", help="Delete now, with others' records up to its last one."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Find a tenant's records on the topics, say when they expire, and delete them on request.

    Without --delete-records it changes nothing, and records expire with their
    topic's retention. It says what it cannot reach.
    Example: hvd telemetry forget --tenant 5f1c0a...
    By its API key: hvd telemetry forget --tenant - <the-file-with-the-key
    """
    from pipelines.telemetry import forget as forgetting

    kafka = KafkaSettings.load()
    pseudonyms = forgetting.pseudonyms_of(_name(tenant))
    held, unreadable = forgetting.found(kafka, pseudonyms)
    if not as_json:
        nothing = f"Nothing of {', '.join(pseudonyms)} is on the topics."
        _say("\n".join(map(forgetting.sentence, held)) or nothing, out)
    for topic, count in unreadable.items():
        _say(
            f"{count} records of {topic} cannot be unpacked: they may hold it, and stay until they "
            "expire."
        )
    if delete and held:
        others = sum(each.others for each in held)
        if not yes:
            typer.confirm(f"Delete these and {others} records of others before them?", abort=True)
        forgetting.delete(kafka, held)
        _say("Deleted up to the last of them.")
    if as_json:
        rest = {"unreadable": unreadable, "deleted": bool(delete and held)}
        report = {"pseudonyms": pseudonyms, "held": [asdict(each) for each in held]}
        return print_json({**report, **rest})
    return _say(forgetting.ELSEWHERE)


def _name(given: str) -> str:
    """The tenant's name: ``given``, or for ``-`` the first line of standard input; on a terminal
    it is prompted for and not shown. A command line is visible in the list of processes."""
    if given == "-" and sys.stdin.isatty():
        given = str(typer.prompt("The tenant's API key or name", hide_input=True, err=True))
    elif given == "-":
        given = sys.stdin.readline().rstrip("\r\n")
    if not given:
        raise SettingsError(
            "no tenant is named: give --tenant a pseudonym or name, or - and its API key on "
            "standard input."
        )
    return given


def _say(text: str, console: Console = err) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)

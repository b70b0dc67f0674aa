"""``hvd telemetry``: the topics for those who read them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from decoder.contracts.settings import KafkaSettings
from pipelines.reports import print_json

app = typer.Typer(
    help=(
        "Follow, describe, export and ask the topics; the broker is HVD_KAFKA_BOOTSTRAP_SERVERS. "
        "What every column means: docs/telemetry.md."
    ),
    no_args_is_help=True,
    add_completion=False,
)
out, err = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Since = Annotated[
    str, typer.Option(help="10m, 2h, 7d ago, or 2026-01-31T14:00; by the time of the choice.")
]


@app.command()
def tail(
    worker: Annotated[str, typer.Option(help="Only of this worker.")] = "",
    arm: Annotated[
        str, typer.Option(help="Only cycles that verified this: cache, model, none.")
    ] = "",
    side: Annotated[str, typer.Option(help="Only of this side of a trial.")] = "",
    workload: Annotated[str, typer.Option(help="Only of this kind of traffic.")] = "",
    since: Annotated[str, typer.Option(help="Also what was sent since: 10m, 2h, or a time.")] = "",
    rows: Annotated[
        int, typer.Option("--rows", "-n", min=0, help="End after so many; 0: never.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON each, whole.")] = False,
) -> None:
    """Draft events as they come, one line for each decoding cycle; Ctrl-C ends it.

    Example: hvd telemetry tail --arm cache --json | jq .accepted
    """
    import os
    import time

    from pipelines.telemetry.reading import moment
    from pipelines.telemetry.rows import Intake
    from pipelines.telemetry.tail import HEAD, follow, line

    asked = {"worker": worker, "arm": arm, "side": side, "workload": workload}
    wanted = {name: value for name, value in asked.items() if value}
    intake, shown = Intake(), 0
    began = moment(since, time.time()) if since else None
    try:
        if not as_json:
            sys.stdout.write(HEAD + "\n")
        for row in follow(KafkaSettings.load(), intake, wanted, began):
            shown += 1
            sys.stdout.write((json.dumps(row) if as_json else line(row)) + "\n")
            sys.stdout.flush()
            if shown == rows:
                break
    except BrokenPipeError:  # whoever read has what they wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed at the end
    finally:
        _say(f"{shown} rows; {_told(intake.counts.as_dict())}")


@app.command()
def describe(
    sample: Annotated[
        int, typer.Option(min=1, help="Last records of each partition that are read.")
    ] = 1_000,
    as_json: Json = False,
) -> None:
    """What lies on each topic: how much, of when, how fast it comes, what is missing, who lags.

    Counts of records are the broker's; all else is of the last records of each partition.
    """
    from pipelines.telemetry.describe import describe as found
    from pipelines.telemetry.shown import described

    told = found(KafkaSettings.load(), sample)
    if as_json:
        return print_json(told.as_dict())
    for part in described(told):
        out.print(part)
    return None


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Of this export alone; it goes on from there.")],
    since: Since = "",
    until: Since = "",
    as_json: Json = False,
) -> None:
    """Write draft events into FOLDER as Parquet: all that lie there now, each once.

    Run again, it adds what has come since. Interrupted, it keeps what it has: run it again.
    A reader of Parquet takes FOLDER/*.parquet; 'hvd telemetry report FOLDER' asks it.
    Example: hvd telemetry export events --since 7d
    """
    from pipelines.progress import Shown
    from pipelines.telemetry.export import export as write

    with Shown(err) as shown:
        found = write(KafkaSettings.load(), folder, shown.step, (since, until))
    told = {"folder": str(folder), "files": len(found.files), "rows_written": found.written}
    if as_json:
        return print_json(told | found.counts.as_dict())
    _say(
        f"{found.written} rows in {len(found.files)} files of {folder}; "
        f"{_told(found.counts.as_dict())}"
    )
    return None


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="What 'hvd telemetry export' wrote.")],
    page: Annotated[
        Path | None, typer.Option("--out", help="The page; default: FOLDER.html beside it.")
    ] = None,
) -> None:
    """Ask an export with DuckDB, and write one page of HTML with the answers and their SQL.

    Where cache drafting pays, which workloads drift, calibration by tenths, regret by arm, cost by
    batch. Needs: pip install 'hybrid-verified-decoding[analysis]'.
    """
    from pipelines.telemetry.report import report as written

    text = written(folder)
    path = page or folder.with_name(f"{folder.name}.html")
    path.write_text(text, encoding="utf-8")
    out.print(str(path), highlight=False, soft_wrap=True)


@app.command()
def forget(
    tenant: Annotated[
        str,
        typer.Option(
            help="Its pseudonym; with HVD_WORKER_ID_KEY its name, or -: the first line of standard "
            "input, for an API key, which others could read in a command line."
        ),
    ],
    exports: Annotated[
        list[Path] | None, typer.Option("--export", help="Folder to take its rows out of.")
    ] = None,
    delete: Annotated[
        bool,
        typer.Option("--delete-records", help="Now, with others' records up to its last one."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Where a tenant is on the topics and until when; and its deletion, as far as that can be.

    Without --delete-records nothing on the topics is changed: records go with their topic's
    retention. What it cannot reach it says.
    Example: hvd telemetry forget --tenant 5f1c0a... --export events
    By its API key: hvd telemetry forget --tenant - <the-file-with-the-key
    """
    from pipelines.telemetry import forget as forgetting
    from pipelines.telemetry.shown import held_table

    kafka = KafkaSettings.load()
    pseudonyms = forgetting.pseudonyms_of(forgetting.name_from(tenant, _standard_input))
    there, unreadable = forgetting.found(kafka, pseudonyms)
    told = forgetting.as_dict(pseudonyms, there, unreadable) | {"deleted": False}
    told["rows_of_exports"] = 0
    if not as_json:
        sought = ", ".join(pseudonyms)
        out.print(held_table(there) if there else f"Nothing of {sought} lies on the topics.")
    for topic, count in unreadable.items():
        _say(
            f"{count} records of {topic} cannot be unpacked: whether it is in them is not known, "
            "and they stay until age removes them."
        )
    if delete and there:
        others = sum(each.others for each in there)
        if not yes:
            typer.confirm(f"Delete these and {others} records of others before them?", abort=True)
        forgetting.delete(kafka, there)
        told["deleted"] = True
        _say("Deleted up to the last of them.")
    for folder in exports or ():
        rows = forgetting.forget_in(folder, pseudonyms)
        told["rows_of_exports"] += rows
        _say(f"{rows} rows taken out of {folder}.")
    if as_json:
        return print_json(told)
    for sentence in forgetting.ELSEWHERE:
        _say(sentence)
    return None


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


def _standard_input() -> str:
    """What is piped in; of a person the key is asked for, and not shown as it is typed."""
    if sys.stdin.isatty():
        return str(typer.prompt("The tenant's API key or name", hide_input=True, err=True))
    return sys.stdin.read()


def _told(counts: dict[str, int]) -> str:
    return (
        f"{counts['records']} records read, {counts['duplicates']} rows came twice, "
        f"{counts['missing']} records missing, {counts['refused']} refused"
        + (f", {counts['unreadable']} that cannot be unpacked" if counts["unreadable"] else "")
    )


def _say(text: str) -> None:
    err.print(escape(text), highlight=False, soft_wrap=True)

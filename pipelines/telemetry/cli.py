"""``hvd telemetry``: the topics for those who read them."""

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
from pipelines.reports import print_json

app = typer.Typer(
    help=(
        "Export the topics; the broker is HVD_KAFKA_BOOTSTRAP_SERVERS. How to follow and ask them, "
        "and what every column means: docs/reference/topics.md."
    ),
    no_args_is_help=True,
    add_completion=False,
)
out, err = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Of this export alone; it goes on from there.")],
    as_json: Json = False,
) -> None:
    """Write draft events into FOLDER as Parquet: all that lie there now.

    Run again, it adds what has come since. Interrupted, it keeps what it has:
    run it again. What a worker sent twice lies there twice, under one life
    and number.
    Questions to ask it with DuckDB: docs/telemetry.md.
    Example: hvd telemetry export events
    """
    from pipelines.reports import Shown
    from pipelines.telemetry.export import export as write

    with Shown(err) as shown:
        found = write(KafkaSettings.load(), folder, shown.step)
    files, counts = len(found.files), found.counts
    if as_json:
        return print_json({"folder": str(folder), "files": files, "rows": found.rows, **counts})
    return _say(
        f"{found.rows} rows in {files} file{'s' * (files != 1)} of {folder}; {counts['records']} "
        f"records read, {counts['refused']} refused, {counts['unreadable']} that cannot be "
        f"unpacked, {counts['removed']} removed by age"
    )


@app.command()
def watch(
    past: Annotated[
        bool, typer.Option("--past", help="Begin with what lies there, not at the end.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="What lies there alone, then how workloads stand.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Follow accepted length and calibration error by workload, until Ctrl-C.

    A line for each change that ADWIN finds. What is expected of a draft is by
    the policy that served it; the error is that less what was accepted.
    Example: hvd telemetry watch --past
    """
    from pipelines.telemetry.watch import Followed, follow

    followed = Followed()
    try:
        for change in follow(KafkaSettings.load(), followed, past=past or once, on=not once):
            _say(json.dumps(asdict(change)) if as_json else str(change), out)
    except KeyboardInterrupt:
        _say("")
    found = followed.summary()
    if as_json:
        return _say(json.dumps(found), out)
    for name, of in found["workloads"].items():
        _say(
            f"{name or '(no workload)'}: {of['drafts']} drafts, {of['accepted']:.2f} tokens "
            f"accepted, {of['calibration']:+.2f} expected beyond them",
            out,
        )
    return _say(f"{found['refused']} records refused") if found["refused"] else None


@app.command()
def forget(
    tenant: Annotated[
        str,
        typer.Option(
            help="Its pseudonym; with HVD_WORKER_ID_KEY its name, or -: the first line of standard "
            "input, for an API key, which others could read in a command line."
        ),
    ],
    delete: Annotated[
        bool, typer.Option("--delete-records", help="Now, with others' records up to its last one.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Where a tenant is on the topics and until when; and its deletion, as far as that can be.

    Without --delete-records nothing on the topics is changed: records go with
    their topic's retention. What it cannot reach it says.
    Example: hvd telemetry forget --tenant 5f1c0a...
    By its API key: hvd telemetry forget --tenant - <the-file-with-the-key
    """
    from pipelines.telemetry import forget as forgetting

    kafka = KafkaSettings.load()
    pseudonyms = forgetting.pseudonyms_of(_name(tenant))
    there, unreadable = forgetting.found(kafka, pseudonyms)
    if not as_json:
        nothing = f"Nothing of {', '.join(pseudonyms)} lies on the topics."
        _say("\n".join(map(forgetting.sentence, there)) or nothing, out)
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
        _say("Deleted up to the last of them.")
    if as_json:
        told = {"unreadable": unreadable, "deleted": bool(delete and there)}
        held = {"pseudonyms": pseudonyms, "held": [asdict(each) for each in there]}
        return print_json({**held, **told})
    return _say(forgetting.ELSEWHERE)


def _name(given: str) -> str:
    """The tenant's name: ``given``, or for ``-`` the first line that is piped in; a person is asked
    for it, and it is not shown. A command line stands in the list of processes: no place for a key.
    """
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

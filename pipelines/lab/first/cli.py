"""``hvd bootstrap``: its options; its imports are done when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipelines.reports import print_json

out, err = Console(), Console(stderr=True)


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
    from decoder.core.payoff.token_classes import token_classes_of
    from decoder.policy.first import SHIPPED, read_first
    from decoder.policy.probes import to_bytes
    from decoder.settings import WorkerSettings
    from pipelines.embedded import load_tokenizer
    from pipelines.lab.first import check as checks
    from pipelines.lab.first import make as making
    from pipelines.lab.replay.engine import Simulator
    from pipelines.lab.replay.traces import files_of
    from pipelines.progress import Shown
    from pipelines.reports import atomic_write

    place, files, allowed = bundle or SHIPPED, files_of(traces), licence or making.ALLOWED
    policy = read_first(place) if check else None
    ids = load_tokenizer(tokenizer)
    simulator = Simulator(token_classes_of(ids), WorkerSettings.load())
    with Shown(err) as shown:
        step = shown.step
        if policy is None:
            sets = making.read_sets(files, ids, allowed, step)
            samples = making.samples_of(sets, generations, simulator, step)
            named = tokenizer or "the embedded model's"
            policy = making.make(samples, named, simulator, step)
            atomic_write(place, lambda part: part.write_bytes(to_bytes(policy)))
        else:
            inside = {each["name"] for each in policy.provenance.get("sets", [])}
            known = making.read_sets([f for f in files if f.stem in inside], ids, allowed, step)
            samples = making.samples_of(known, generations, simulator, step) if known else []
            sets = making.read_sets(files, ids, None, step)
            if vocabulary is not None:
                ids = checks.own_tokenizer(ids, sets, vocabulary)
                simulator = Simulator(token_classes_of(ids), simulator.settings)
                sets = making.read_sets(files, ids, None, step)
            found = checks.check(policy, sets, samples, simulator, model_accepts, step)
    if not check:
        out.print(f"wrote {place}", soft_wrap=True)
        out.print_json(data=policy.provenance)
    elif as_json:
        print_json(checks.figures(found, model_accepts=model_accepts, vocabulary=vocabulary))
    else:
        out.print(checks.table(found))

"""The command ``hvd bench sessions``: what a person may choose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipelines.bench.serve.command import complain, numbers, words

out, err = Console(), Console(stderr=True)


def sessions(
    context: typer.Context,
    scripts: Annotated[
        Path | None,
        typer.Option(help="Folder of JSONL files with 'messages'; default: the project's own."),
    ] = None,
    names: Annotated[str, typer.Option(help="Limit the files or kinds: a,b,c.")] = "",
    configs: Annotated[str, typer.Option(help="What to compare.")] = "none,suffix,eagle3,hybrid",
    eagle3_k: Annotated[str, typer.Option(help="Draft lengths to try for eagle3.")] = "2,4",
    suffix_k: Annotated[str, typer.Option(help="Draft limits to try for suffix.")] = "24,64",
    concurrency: Annotated[str, typer.Option(help="Sessions under way at a time.")] = "1,4,8",
    limit: Annotated[
        int, typer.Option(min=1, help="Sessions at each concurrency; at least twice that.")
    ] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a session at most.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 512,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Leave out what could grow longer, answers counted.")
    ] = 6144,
    rounds: Annotated[int, typer.Option(min=1, help="Times through all configurations.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="EAGLE3 head made for the model.")] = None,
    dtype: Annotated[str, typer.Option(help="auto chooses what is fastest here.")] = "auto",
    policy: Annotated[Path | None, typer.Option(help="Bundle the hybrid decides by.")] = None,
    together: Annotated[
        bool,
        typer.Option(
            "--together", help="All servers of a round at once, in turn: if memory holds them."
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit status 1 unless all answers equal those of 'none'."),
    ] = False,
    as_json: Annotated[
        Path, typer.Option("--json", help="Where the report goes; beside it what it is made of.")
    ] = Path("reports/bench/sessions.json"),
) -> None:
    """Servers under what an agent platform sends: turn after turn, with files and tools' results.

    What a server answered stands in its next turn's context. A run that was interrupted goes on
    where it stopped. Arguments after -- go to every server.
    Example: hvd bench sessions --concurrency 1 --configs none,suffix,hybrid --suffix-k 24
    """
    from functools import partial

    from transformers import AutoTokenizer

    from decoder.contracts.bundle import ANY_SCOPE
    from decoder.contracts.errors import SettingsError
    from decoder.policy.first import first_policy
    from pipelines.bench.asked import describe
    from pipelines.bench.methods import load_policy
    from pipelines.bench.prompts import Prompt, tokenise
    from pipelines.bench.serve import prompts as serve_prompts
    from pipelines.bench.serve import run as bench
    from pipelines.bench.serve.load import turns as turns_of
    from pipelines.bench.serve.plan import Plan
    from pipelines.bench.serve.report import report, runs_in, unequal
    from pipelines.bench.serve.setups import setups
    from pipelines.bench.sessions.scripts import dealt, own, read
    from pipelines.bench.sessions.summary import summarise, tables
    from pipelines.serve.command import chosen

    levels = numbers(concurrency, "--concurrency")
    if policy is not None and not policy.is_file():
        raise SettingsError(f"--policy {policy}: no such file.")
    if check and (runs_in(dtype) != "float32" or "none" not in words(configs)):
        raise SettingsError(
            "--check compares with 'none' token for token, which in half precision nothing "
            "promises: give --dtype float32 and name none with --configs."
        )
    options = chosen(model, drafter, "127.0.0.1", 0, dtype, context.args)
    compared = setups(
        words(configs),
        numbers(eagle3_k, "--eagle3-k"),
        numbers(suffix_k, "--suffix-k"),
        options.drafter,
    )

    problems: list[str] = []
    if scripts is None:
        sets = own(sum(max(limit, 2 * level) for level in levels), turns, words(names))
    else:
        sets = read(scripts, turns, words(names), problems)
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def tokens_of(script: Prompt) -> int:
        return len(tokenise(script, tokenizer, "chat").ids) + len(turns_of(script)) * max_tokens

    decides_by = "counted score"
    if any(s.method == "hybrid" for s in compared):
        decides_by = describe(first_policy(ANY_SCOPE) if policy is None else load_policy(policy))
    try:
        hands = dealt(sets, levels, limit, tokens_of, max_prompt_tokens, problems)
    finally:
        for sentence in problems:
            complain(sentence)
    (warm_up,) = serve_prompts.from_workloads(max(levels), ["chat"])
    made = bench.run(
        Plan(
            compared, options, levels, hands, warm_up.prompts, max_tokens, rounds, policy,
            decides_by, together, by_turns=True,
        ),
        as_json,
        err,
        told=partial(report, benchmark="sessions", summary=summarise),
    )  # fmt: skip
    for table in tables(made["records"]):
        Console(width=max(140, out.width)).print(table)
    differing = unequal(made)
    for sentence in differing:
        complain(sentence)
    out.print(f"Report: [bold]{as_json}[/bold]", soft_wrap=True)
    sys.stdout.flush()
    unproven = differing or made["skipped"] or any(r["failed"] for r in made["records"])
    raise typer.Exit(1 if check and unproven else 0)

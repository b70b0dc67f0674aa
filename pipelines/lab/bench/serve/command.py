"""The command ``hvd bench serve``: what a person may choose, and the plan that it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

out, err = Console(), Console(stderr=True)


def serve(
    context: typer.Context,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Folder of JSONL files with 'messages'; default: own workloads."),
    ] = None,
    sessions: Annotated[
        bool, typer.Option("--sessions", help="Turn after turn: an answer stands in the next one.")
    ] = False,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a session at most.")] = 3,
    configs: Annotated[str, typer.Option(help="What to compare.")] = "none,suffix,eagle3,hybrid",
    eagle3_k: Annotated[str, typer.Option(help="Draft lengths to try for eagle3.")] = "2,3,4,5",
    suffix_k: Annotated[str, typer.Option(help="Draft limits to try for suffix.")] = "8,24,64",
    concurrency: Annotated[str, typer.Option(help="Requests under way at a time.")] = "1,4,8",
    limit: Annotated[int, typer.Option(min=1, help="Prompts for each concurrency.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 96,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Leave longer ones out; a session's answers count.")
    ] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Times through all configurations.")] = 3,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="EAGLE3 head made for the model.")] = None,
    dtype: Annotated[str, typer.Option(help="auto chooses what is fastest here.")] = "auto",
    policy: Annotated[Path | None, typer.Option(help="Bundle the hybrid decides by.")] = None,
    together: Annotated[
        bool,
        typer.Option(
            "--together", help="All servers of a round at once, in slices: if memory holds them."
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit status 1 unless all answers equal those of 'none'."),
    ] = False,
    as_json: Annotated[
        Path, typer.Option("--json", help="Where the report goes; beside it the servers' logs.")
    ] = Path("reports/bench/serve.json"),
) -> None:
    """Real servers against each other: stock vLLM without speculation, suffix, eagle3; ours.

    Interrupted, it reports the servers that were done. Arguments after -- go to every server.
    Example: hvd bench serve --limit 8 --rounds 1 -- --max-model-len 4096
    """
    from decoder.contracts.bundle import ANY_SCOPE
    from decoder.contracts.errors import SettingsError
    from decoder.policy.first import first_policy
    from pipelines.lab.bench.methods import describe
    from pipelines.lab.bench.options import numbers, words
    from pipelines.lab.bench.render import complain, table
    from pipelines.lab.bench.serve import run as bench
    from pipelines.lab.bench.serve.load import Selection, from_workloads, levels
    from pipelines.lab.bench.serve.setups import Plan, setups
    from pipelines.lab.bench.serve.summary import WIDTH, runs_in, table_columns, unequal
    from pipelines.policy.bundles import load_policy
    from pipelines.serve.command import chosen

    if check and (runs_in(dtype) != "float32" or "none" not in words(configs)):
        raise SettingsError(
            "--check compares with 'none' token for token, which in half precision nothing "
            "promises: give --dtype float32 and name none with --configs."
        )
    if policy is not None and not policy.is_file():
        raise SettingsError(f"--policy {policy}: no such file.")
    options = chosen(model, drafter, "127.0.0.1", 0, dtype, context.args)
    lengths = numbers(eagle3_k, "--eagle3-k"), numbers(suffix_k, "--suffix-k")
    compared = setups(words(configs), *lengths, options.drafter)
    at_once = numbers(concurrency, "--concurrency")
    room = max_prompt_tokens - turns * max_tokens * sessions
    wanted = Selection(prompts, at_once, limit, room, turns * sessions)
    problems: list[str] = []
    put = levels(wanted, options.model, problems)
    complain(err, problems)
    warm_up = from_workloads(max(at_once), ["chat"])
    decides = describe(first_policy(ANY_SCOPE) if policy is None else load_policy(policy))
    plan = Plan(
        compared, options, put, warm_up[0].prompts, max_tokens, rounds, policy, decides, together
    )
    made = bench.run(plan, as_json, err)
    records = made["records"]
    Console(width=max(WIDTH, out.width)).print(table("", table_columns(records), records))
    differing = unequal(made)
    complain(err, differing)
    out.print(f"Report: [bold]{as_json}[/bold]", soft_wrap=True)
    unproven = differing or made["skipped"] or any(r["failed"] for r in records)
    raise typer.Exit(1 if check and unproven else 0)

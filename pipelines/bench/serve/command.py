"""The command ``hvd bench serve``: what a person may choose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

out, err = Console(), Console(stderr=True)


def serve(
    context: typer.Context,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Folder of JSONL files with 'messages'; default: own workloads."),
    ] = None,
    names: Annotated[str, typer.Option(help="Limit the files or workloads: a,b,c.")] = "",
    configs: Annotated[str, typer.Option(help="What to compare.")] = "none,suffix,eagle3,hybrid",
    eagle3_k: Annotated[str, typer.Option(help="Draft lengths to try for eagle3.")] = "2,3,4,5",
    suffix_k: Annotated[str, typer.Option(help="Draft limits to try for suffix.")] = "8,24,64",
    concurrency: Annotated[str, typer.Option(help="Requests under way at a time.")] = "1,4,8",
    limit: Annotated[int, typer.Option(min=1, help="Prompts for each concurrency.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 96,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Leave longer ones out.")] = 2048,
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
            "--together", help="All servers of a round at once, in turn: if memory holds them."
        ),
    ] = False,
    as_json: Annotated[
        Path, typer.Option("--json", help="Where the report goes; beside it what it is made of.")
    ] = Path("reports/bench/serve.json"),
) -> None:
    """Real servers against each other: stock vLLM without speculation, suffix, eagle3; ours.

    A run that was interrupted goes on where it stopped. Arguments after -- go to every server.
    Example: hvd bench serve --limit 8 --rounds 1 -- --max-model-len 4096
    """
    from transformers import AutoTokenizer

    from decoder.contracts.bundle import ANY_SCOPE
    from decoder.contracts.errors import SettingsError
    from decoder.policy.first import first_policy
    from pipelines.bench.asked import describe
    from pipelines.bench.methods import load_policy
    from pipelines.bench.prompts import Prompt, read_folder, tokenise
    from pipelines.bench.serve import prompts as serve_prompts
    from pipelines.bench.serve import run as bench
    from pipelines.bench.serve.plan import Plan
    from pipelines.bench.serve.report import unequal
    from pipelines.bench.serve.setups import setups
    from pipelines.bench.serve.summary import tables
    from pipelines.serve.command import chosen

    levels = numbers(concurrency, "--concurrency")
    if policy is not None and not policy.is_file():
        raise SettingsError(f"--policy {policy}: no such file.")
    options = chosen(model, drafter, "127.0.0.1", 0, dtype, context.args)
    compared = setups(
        words(configs),
        numbers(eagle3_k, "--eagle3-k"),
        numbers(suffix_k, "--suffix-k"),
        options.drafter,
    )

    problems: list[str] = []
    if prompts is None:
        sets = serve_prompts.from_workloads(limit * len(levels), words(names))
    else:
        sets = list(read_folder(prompts, words(names), problems))
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def tokens_of(prompt: Prompt) -> int:
        return len(tokenise(prompt, tokenizer, "chat").ids)

    decides_by = "counted score"
    if any(s.method == "hybrid" for s in compared):
        decides_by = describe(first_policy(ANY_SCOPE) if policy is None else load_policy(policy))
    hands = serve_prompts.dealt(sets, len(levels), limit, tokens_of, max_prompt_tokens, problems)
    for sentence in problems:
        complain(sentence)
    (warm_up,) = serve_prompts.from_workloads(max(levels), ["chat"])
    made = bench.run(
        Plan(
            compared, options, levels, tuple(map(tuple, hands)), warm_up.prompts, max_tokens,
            rounds, policy, decides_by, together,
        ),
        as_json,
        err,
    )  # fmt: skip
    for table in tables(made["records"]):
        Console(width=max(110, out.width)).print(table)
    for sentence in unequal(made):
        complain(sentence)
    out.print(f"Report: [bold]{as_json}[/bold]", soft_wrap=True)
    sys.stdout.flush()


def complain(sentence: str) -> None:
    """Say on standard error what was left out or came out otherwise."""
    err.print(f"[yellow]{escape(sentence)}[/yellow]", highlight=False, soft_wrap=True)


def words(text: str) -> tuple[str, ...]:
    """The words between the commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers(text: str, option: str) -> tuple[int, ...]:
    """The positive numbers between the commas, each once.

    Raises:
        SettingsError: none, or something else.
    """
    from decoder.contracts.errors import SettingsError

    found = words(text)
    if not found or not all(word.isdecimal() and int(word) for word in found):
        raise SettingsError(f"{option} {text!r}: give positive numbers with commas between them.")
    return tuple(int(word) for word in found)

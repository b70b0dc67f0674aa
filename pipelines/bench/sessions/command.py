"""The command ``hvd bench sessions``: what a person may choose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.bench.serve import asked


def sessions(
    context: typer.Context,
    scripts: Annotated[
        Path | None,
        typer.Option(help="Folder of JSONL files with 'messages'; default: the project's own."),
    ] = None,
    names: Annotated[str, typer.Option(help="Limit the files or kinds: a,b,c.")] = "",
    configs: asked.Configs = "none,suffix,eagle3,hybrid",
    eagle3_k: asked.Eagle3K = "2,4",
    suffix_k: asked.SuffixK = "24,64",
    concurrency: Annotated[str, typer.Option(help="Sessions under way at a time.")] = "1,4,8",
    limit: Annotated[
        int, typer.Option(min=1, help="Sessions at each concurrency; at least twice that.")
    ] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a session at most.")] = 3,
    max_tokens: asked.MaxTokens = 512,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Leave out what could grow longer, answers counted.")
    ] = 6144,
    rounds: asked.Rounds = 1,
    model: asked.Model = None,
    drafter: asked.Drafter = None,
    dtype: asked.Dtype = "auto",
    policy: asked.PolicyFile = None,
    variant: asked.Variants = None,
    together: asked.Together = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit status 1 unless all answers equal those of 'none'."),
    ] = False,
    as_json: asked.Report = Path("reports/bench/sessions.json"),
) -> None:
    """Servers under what an agent platform sends: turn after turn, with files and tools' results.

    What a server answered stands in its next turn's context. A run that was interrupted goes on
    where it stopped. Arguments after -- go to every server.
    Example: hvd bench sessions --concurrency 1 --configs none,suffix,hybrid --suffix-k 24
    """
    from dataclasses import replace

    from transformers import AutoTokenizer

    from decoder.contracts.errors import SettingsError
    from pipelines.bench.commas import words
    from pipelines.bench.serve import run as bench
    from pipelines.bench.serve.load import turns as turns_of
    from pipelines.bench.serve.report import runs_in
    from pipelines.bench.sessions.scripts import dealt, own, read
    from pipelines.prompts import Prompt, tokenise

    if check and (runs_in(dtype) != "float32" or "none" not in words(configs)):
        raise SettingsError(
            "--check compares with 'none' token for token, which in half precision nothing "
            "promises: give --dtype float32 and name none with --configs."
        )
    plan = asked.prepared(
        configs, eagle3_k, suffix_k, concurrency, max_tokens, rounds, model, drafter, dtype, policy,
        variant or (), together, context.args,
    )  # fmt: skip
    levels = plan.concurrency
    problems: list[str] = []
    if scripts is None:
        sets = own(sum(max(limit, 2 * level) for level in levels), turns, words(names))
    else:
        sets = read(scripts, turns, words(names), problems)
    tokenizer = AutoTokenizer.from_pretrained(plan.options.model)

    def tokens_of(script: Prompt) -> int:
        return len(tokenise(script, tokenizer, "chat").ids) + len(turns_of(script)) * max_tokens

    try:
        hands = dealt(sets, levels, limit, tokens_of, max_prompt_tokens, problems)
    finally:
        for sentence in problems:
            asked.complain(sentence)
    made = bench.run(replace(plan, prompts=hands, by_turns=True), as_json, asked.err)
    differing = asked.tell(made, as_json)
    unproven = differing or made["skipped"] or any(r["failed"] for r in made["records"])
    raise typer.Exit(1 if check and unproven else 0)

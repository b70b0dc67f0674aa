"""The command ``hvd bench serve``: what a person may choose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.bench.serve import asked


def serve(
    context: typer.Context,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Folder of JSONL files with 'messages'; default: own workloads."),
    ] = None,
    names: Annotated[str, typer.Option(help="Limit the files or workloads: a,b,c.")] = "",
    configs: asked.Configs = "none,suffix,eagle3,hybrid",
    eagle3_k: asked.Eagle3K = "2,3,4,5",
    suffix_k: asked.SuffixK = "8,24,64",
    concurrency: Annotated[str, typer.Option(help="Requests under way at a time.")] = "1,4,8",
    limit: Annotated[int, typer.Option(min=1, help="Prompts for each concurrency.")] = 16,
    max_tokens: asked.MaxTokens = 96,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Leave longer ones out.")] = 2048,
    rounds: asked.Rounds = 3,
    model: asked.Model = None,
    drafter: asked.Drafter = None,
    dtype: asked.Dtype = "auto",
    policy: asked.PolicyFile = None,
    variant: asked.Variants = None,
    together: asked.Together = False,
    as_json: asked.Report = Path("reports/bench/serve.json"),
) -> None:
    """Real servers against each other: stock vLLM without speculation, suffix, eagle3; ours.

    A run that was interrupted goes on where it stopped. Arguments after -- go to every server.
    Example: hvd bench serve --limit 8 --rounds 1 -- --max-model-len 4096
    """
    from dataclasses import replace

    from transformers import AutoTokenizer

    from pipelines.bench.commas import words
    from pipelines.bench.serve import run as bench
    from pipelines.bench.serve.prompts import dealt, from_workloads
    from pipelines.prompts import Prompt, read_folder, tokenise

    plan = asked.prepared(
        configs, eagle3_k, suffix_k, concurrency, max_tokens, rounds, model, drafter, dtype, policy,
        variant or (), together, context.args,
    )  # fmt: skip
    levels = len(plan.concurrency)
    problems: list[str] = []
    if prompts is None:
        sets = from_workloads(limit * levels, words(names))
    else:
        sets = list(read_folder(prompts, words(names), problems))
    tokenizer = AutoTokenizer.from_pretrained(plan.options.model)

    def tokens_of(prompt: Prompt) -> int:
        return len(tokenise(prompt, tokenizer, "chat").ids)

    hands = dealt(sets, levels, limit, tokens_of, max_prompt_tokens, problems)
    for sentence in problems:
        asked.complain(sentence)
    made = bench.run(replace(plan, prompts=tuple(map(tuple, hands))), as_json, asked.err)
    asked.tell(made, as_json)

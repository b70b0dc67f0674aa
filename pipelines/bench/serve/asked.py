"""What the benchmarks of servers ask a person alike, what they make of it, and what they tell."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from pipelines.bench.serve.plan import Plan

out, err = Console(), Console(stderr=True)

Configs = Annotated[str, typer.Option(help="What to compare.")]
Eagle3K = Annotated[str, typer.Option(help="Draft lengths to try for eagle3.")]
SuffixK = Annotated[str, typer.Option(help="Draft limits to try for suffix.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times through all configurations.")]
Model = Annotated[
    str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
]
Drafter = Annotated[str | None, typer.Option(help="EAGLE3 head made for the model.")]
Dtype = Annotated[str, typer.Option(help="auto chooses what is fastest here.")]
PolicyFile = Annotated[Path | None, typer.Option(help="Bundle the hybrid decides by.")]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        help="The hybrid with other settings beside it: 'grafts:HVD_WORKER_GRAFT=1'; repeatable.",
    ),
]
Together = Annotated[
    bool,
    typer.Option(
        "--together", help="All servers of a round at once, in slices: if memory holds them."
    ),
]
Report = Annotated[
    Path, typer.Option("--json", help="Where the report goes; beside it what it is made of.")
]


def prepared(
    configs: str, eagle3_k: str, suffix_k: str, concurrency: str, max_tokens: int, rounds: int,
    model: str | None, drafter: str | None, dtype: str, policy: Path | None,
    varied: Sequence[str], together: bool, extra: Sequence[str],
) -> Plan:  # fmt: skip
    """The plan that the options ask for, still without prompts; ``extra`` goes to every server.

    Raises:
        SettingsError: an option is none, or the policy's file is missing.
        ModelError: a model or drafter is missing, or the policy cannot be read.
        PolicyRefused: it is damaged, or made for other features.
    """
    from decoder.contracts.bundle import ANY_SCOPE
    from decoder.contracts.errors import SettingsError
    from decoder.policy.first import first_policy
    from pipelines.bench.asked import describe
    from pipelines.bench.commas import numbers, words
    from pipelines.bench.serve.plan import Plan
    from pipelines.bench.serve.prompts import from_workloads
    from pipelines.bench.serve.setups import setups, variants
    from pipelines.replay.bundles import load_policy
    from pipelines.serve.command import chosen

    levels = numbers(concurrency, "--concurrency")
    if policy is not None and not policy.is_file():
        raise SettingsError(f"--policy {policy}: no such file.")
    options = chosen(model, drafter, "127.0.0.1", 0, dtype, extra)
    compared = setups(
        words(configs),
        numbers(eagle3_k, "--eagle3-k"),
        numbers(suffix_k, "--suffix-k"),
        options.drafter,
        variants(varied),
    )
    decides_by = "counted score"
    if any(s.ours for s in compared):
        decides_by = describe(first_policy(ANY_SCOPE) if policy is None else load_policy(policy))
    (warm_up,) = from_workloads(max(levels), ["chat"])
    return Plan(
        compared, options, levels, (), warm_up.prompts, max_tokens, rounds, policy, decides_by,
        together,
    )  # fmt: skip


def tell(made: dict[str, Any], path: Path) -> list[str]:
    """Print the tables of a report, and where it lies.

    Returns:
        a sentence for each configuration whose answers differ, also said on standard error.
    """
    from pipelines.bench.serve.report import unequal
    from pipelines.bench.serve.summary import WIDTH, tables

    for table in tables(made["records"]):
        Console(width=max(WIDTH, out.width)).print(table)
    differing = unequal(made)
    for sentence in differing:
        complain(sentence)
    out.print(f"Report: [bold]{path}[/bold]", soft_wrap=True)
    sys.stdout.flush()
    return differing


def complain(sentence: str) -> None:
    """Say on standard error what was left out or came out otherwise."""
    err.print(f"[yellow]{escape(sentence)}[/yellow]", highlight=False, soft_wrap=True)

"""The command ``hvd bench serve``: what a person may choose, and the plan that it makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from pipelines.bench.serve.plan import Plan
    from pipelines.prompts import Prompt
    from pipelines.serve.command import ServeOptions

out, err = Console(), Console(stderr=True)


def serve(
    context: typer.Context,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Folder of JSONL files with 'messages'; default: own workloads."),
    ] = None,
    names: Annotated[str, typer.Option(help="Limit the files or workloads: a,b,c.")] = "",
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
    variant: Annotated[
        list[str] | None,
        typer.Option(help="The hybrid with other settings, too: 'grafts:HVD_WORKER_GRAFT=1'."),
    ] = None,
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
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier run there.")] = False,
    as_json: Annotated[
        Path, typer.Option("--json", help="Where the report goes; beside it what it is made of.")
    ] = Path("reports/bench/serve.json"),
) -> None:
    """Real servers against each other: stock vLLM without speculation, suffix, eagle3; ours.

    A run that was interrupted goes on where it stopped. Arguments after -- go to every server.
    Example: hvd bench serve --limit 8 --rounds 1 -- --max-model-len 4096
    """
    from decoder.contracts.errors import SettingsError
    from pipelines.bench.serve import run as bench
    from pipelines.bench.serve.setups import setups, variants
    from pipelines.bench.serve.summary import WIDTH, runs_in, table, unequal
    from pipelines.commas import numbers, words
    from pipelines.serve.command import chosen

    if check and (runs_in(dtype) != "float32" or "none" not in words(configs)):
        raise SettingsError(
            "--check compares with 'none' token for token, which in half precision nothing "
            "promises: give --dtype float32 and name none with --configs."
        )
    levels = numbers(concurrency, "--concurrency")
    if policy is not None and not policy.is_file():
        raise SettingsError(f"--policy {policy}: no such file.")
    options = chosen(model, drafter, "127.0.0.1", 0, dtype, context.args)
    lengths = numbers(eagle3_k, "--eagle3-k"), numbers(suffix_k, "--suffix-k")
    compared = setups(words(configs), *lengths, options.drafter, variants(variant or ()))
    asked = Asked(prompts, words(names), levels, limit, max_prompt_tokens, turns * sessions)
    plan = replace(
        planned(asked, options, max_tokens, policy), setups=compared, rounds=rounds,
        together=together,
    )  # fmt: skip
    made = bench.run(plan, as_json, err, fresh=fresh)
    Console(width=max(WIDTH, out.width)).print(table(made["records"]))
    differing = unequal(made)
    _complain(differing)
    out.print(f"Report: [bold]{as_json}[/bold]", soft_wrap=True)
    unproven = differing or made["skipped"] or any(r["failed"] for r in made["records"])
    raise typer.Exit(1 if check and unproven else 0)


@dataclass(frozen=True)
class Asked:
    """The prompts that are wanted; ``turns`` 0 are single requests, else sessions of so many."""

    folder: Path | None
    names: Sequence[str]
    concurrency: Sequence[int]
    limit: int
    max_prompt_tokens: int
    turns: int


def planned(asked: Asked, options: ServeOptions, max_tokens: int, policy: Path | None) -> Plan:
    """A plan that compares nothing yet: the prompts of each concurrency, and what decides.

    Raises:
        SettingsError: there are too few prompts.
        ModelError, PolicyRefused: the policy cannot be read, or is none for this worker.
    """
    from transformers import AutoTokenizer

    from decoder.contracts.bundle import ANY_SCOPE
    from decoder.contracts.errors import SettingsError
    from decoder.policy.first import first_policy
    from pipelines.bench.methods import describe
    from pipelines.bench.serve import sessions
    from pipelines.bench.serve.plan import Plan
    from pipelines.bench.serve.prompts import dealt, from_workloads
    from pipelines.bundles import load_policy
    from pipelines.prompts import PromptSet, fitting, read_folder

    problems: list[str] = []
    # with fewer than two each a concurrency is never full for long: the last sessions end alone
    wanted = [max(asked.limit, 2 * n if asked.turns else 0) for n in asked.concurrency]
    if asked.folder is not None:
        sets = list(read_folder(asked.folder, asked.names, problems))
        sets = [sessions.cut(s, asked.turns) for s in sets] if asked.turns else sets
    elif asked.turns:
        sets = sessions.own(sum(wanted), asked.turns, asked.names)
    else:
        sets = from_workloads(sum(wanted), asked.names)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    room = asked.max_prompt_tokens - asked.turns * max_tokens

    def fits(found: PromptSet) -> Iterator[Prompt]:
        usable = fitting(found, tokenizer, "chat", room, "skip", problems.append)
        return (made.prompt for made in usable)

    hands = dealt({s.name: fits(s) for s in sets}, wanted)
    for at_once, count, hand in zip(asked.concurrency, wanted, hands, strict=True):
        if len(hand) < count:
            problems.append(f"only {len(hand)} of {count} prompts for {at_once} at a time.")
        if len(hand) < max(1, 2 * at_once * bool(asked.turns)):
            raise SettingsError(
                f"{len(hand)} prompts for {at_once} at a time are too few: a concurrency takes one "
                f"at least, of sessions two for each at a time. {' '.join(problems[:3])}"
            )
    _complain(problems)
    decides = describe(first_policy(ANY_SCOPE) if policy is None else load_policy(policy))
    (warm_up,) = from_workloads(max(asked.concurrency), ["chat"])
    levels = tuple(zip(asked.concurrency, hands, strict=True))
    return Plan(
        (), options, levels, warm_up.prompts, max_tokens, policy=policy, decides_by=decides,
        by_turns=bool(asked.turns),
    )  # fmt: skip


def _complain(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        err.print(f"[yellow]{escape(sentence)}[/yellow]", highlight=False, soft_wrap=True)

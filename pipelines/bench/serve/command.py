"""The command ``hvd bench serve``: what a person may choose, and the plan that it makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from pipelines.prompts import Prompt

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
        typer.Option(help="The hybrid with other settings, too: 'loose:HVD_WORKER_FLOOR=0'."),
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
    from decoder.contracts.bundle import ANY_SCOPE
    from decoder.contracts.errors import SettingsError
    from decoder.policy.first import first_policy
    from pipelines.bench.commas import numbers, words
    from pipelines.bench.methods import describe
    from pipelines.bench.render import table
    from pipelines.bench.serve import run as bench
    from pipelines.bench.serve.plan import Plan
    from pipelines.bench.serve.prompts import from_workloads
    from pipelines.bench.serve.setups import setups, variants
    from pipelines.bench.serve.summary import WIDTH, columns, runs_in, unequal
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
    compared = setups(words(configs), *lengths, options.drafter, variants(variant or ()))
    at_once = numbers(concurrency, "--concurrency")
    room = max_prompt_tokens - turns * max_tokens * sessions
    asked = PromptOptions(prompts, words(names), at_once, limit, room, turns * sessions)
    levels, warm_up = asked.levels(options.model), from_workloads(max(at_once), ["chat"])
    decides = describe(first_policy(ANY_SCOPE) if policy is None else load_policy(policy))
    plan = Plan(
        compared, options, levels, warm_up[0].prompts, max_tokens, rounds, policy, decides,
        together, sessions,
    )  # fmt: skip
    made = bench.run(plan, as_json, err, fresh=fresh)
    shown = table("", columns(made["records"]), made["records"])
    Console(width=max(WIDTH, out.width)).print(shown)
    differing = unequal(made)
    _complain(differing)
    out.print(f"Report: [bold]{as_json}[/bold]", soft_wrap=True)
    unproven = differing or made["skipped"] or any(r["failed"] for r in made["records"])
    raise typer.Exit(1 if check and unproven else 0)


@dataclass(frozen=True)
class PromptOptions:
    """The prompts that are wanted, of ``room`` tokens at most; ``turns`` 0 are single requests."""

    folder: Path | None
    names: Sequence[str]
    concurrency: Sequence[int]
    limit: int
    room: int
    turns: int

    def levels(self, model: str) -> tuple[tuple[int, tuple[Prompt, ...]], ...]:
        """Each concurrency with its prompts, as long as the tokenizer of ``model`` says.

        Raises:
            SettingsError: there are too few.
        """
        from transformers import AutoTokenizer

        from decoder.contracts.errors import SettingsError
        from pipelines.bench.serve import prompts
        from pipelines.prompts import PromptSet, fitting, read_folder

        problems: list[str] = []
        # with fewer than two each a concurrency is never full for long: the last ones end alone
        wanted = [max(self.limit, 2 * n if self.turns else 0) for n in self.concurrency]
        if self.folder is not None:
            sets = list(read_folder(self.folder, self.names, problems))
            sets = [prompts.cut(s, self.turns) for s in sets] if self.turns else sets
        elif self.turns:
            sets = prompts.sessions(sum(wanted), self.turns, self.names)
        else:
            sets = prompts.from_workloads(sum(wanted), self.names)
        tokenizer = AutoTokenizer.from_pretrained(model)

        def fits(found: PromptSet) -> Iterator[Prompt]:
            usable = fitting(found, tokenizer, "chat", self.room, "skip", problems.append)
            return (made.prompt for made in usable)

        hands = prompts.dealt({s.name: fits(s) for s in sets}, wanted)
        made = tuple(zip(self.concurrency, hands, strict=True))
        for (at_once, hand), count in zip(made, wanted, strict=True):
            if len(hand) < count:
                problems.append(f"only {len(hand)} of {count} prompts for {at_once} at a time.")
            if len(hand) < max(1, 2 * at_once * bool(self.turns)):
                raise SettingsError(
                    f"{len(hand)} prompts for {at_once} at a time are too few: it takes one, of "
                    f"sessions two for each at a time. {' '.join(problems[:3])}"
                )
        _complain(problems)
        return made


def _complain(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        err.print(f"[yellow]{escape(sentence)}[/yellow]", highlight=False, soft_wrap=True)

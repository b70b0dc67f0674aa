"""``hvd bench``: what each decoding method is worth. Each command imports when it is called."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from pipelines.prompts import TooLong
from pipelines.reports import complain, print_json, write_json

app = typer.Typer(
    help="Measure decoding methods against each other.", no_args_is_help=True, add_completion=False
)
out, err = Console(), Console(stderr=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


@app.command()
def decode(
    prompts: Annotated[
        Path | None,
        typer.Option(help="Folder of <dataset>.jsonl files; default: own workloads."),
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="Instead: the paper's sixteen datasets, of the hub.")
    ] = False,
    datasets: Annotated[str, typer.Option(help="Only these, separated by commas.")] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="Separated by commas; 'frequency:4' sets a parameter, 'suffix@2' lengthens drafts."
        ),
    ] = "greedy,eagle3,suffix,frequency,arctic,hybrid",
    limit: Annotated[int, typer.Option(min=1, help="Measured prompts of each dataset.")] = 20,
    warmup: Annotated[
        int, typer.Option(min=0, help="Further prompts of each that only fill the caches.")
    ] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a prompt.")] = 128,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=2, help="Prompts longer than this count as too long.")
    ] = None,
    too_long: Annotated[
        TooLong, typer.Option(help="Skip a prompt that is too long, or truncate its middle.")
    ] = "skip",
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="EAGLE3 head made for the model, or 'none'.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Bundle for 'hybrid'; 'name=FILE' makes a method 'hybrid:name'."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="What is computed in.")
    ] = "float32",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")] = None,
    clock: Annotated[
        Literal["wall", "cpu"],
        typer.Option(help="'cpu' counts processor time, for a machine that does other work."),
    ] = "wall",
    as_json: Annotated[Path, typer.Option("--json", help="Where the figures go.")] = Path(
        "reports/bench/decode.json"
    ),
    check: Annotated[
        bool, typer.Option("--check", help="Exit status 1 unless all outputs equal greedy's.")
    ] = False,
) -> None:
    """Methods against each other in the reference engine, prompt by prompt.

    Each prompt is decoded by every method in turn, in rotating order. Ctrl-C
    reports what is there. Takes minutes, also with --limit 2.
    Example: hvd bench decode --limit 2 --methods greedy,suffix,hybrid
    """
    from decoder.contracts.errors import SettingsError
    from pipelines.lab.bench import metrics
    from pipelines.lab.bench.decode import Engine, Selection, launch
    from pipelines.lab.bench.methods import names, words

    wanted = names(methods)
    if hub and prompts is not None:
        raise SettingsError("--hub loads datasets and --prompts reads a folder: give one of them.")
    if check and "greedy" not in wanted:
        raise SettingsError("--check compares with greedy: name it among --methods.")
    selection = Selection(
        prompts, hub, words(datasets), limit, warmup, max_prompt_tokens, too_long, max_tokens
    )
    engine = Engine(model, drafter, tuple(policy or ()), dtype, threads, clock)
    results = launch(wanted, selection, engine, err)
    summary = metrics.summary(results)
    write_json(summary, as_json)
    title = f"{summary['prompts']} prompts, speed over greedy's"
    out.print(metrics.table(title, metrics.COLUMNS, summary["overall"]))
    out.print(f"Report: [bold]{as_json}[/bold]", soft_wrap=True)
    differing = summary["differing"]
    for sentence in differing:
        err.print(f"[red]{escape(sentence)}[/red]", highlight=False, soft_wrap=True)
    if check and not differing:
        err.print("Every output equals greedy's.")
    if results.interrupted:
        err.print("Not every prompt was decoded.")
    raise typer.Exit(130 if results.interrupted else int(check and bool(differing)))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
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
    configs: Annotated[
        str,
        typer.Option(help="What to compare; on an accelerator also eagle3-v2, eagle3-adaptive."),
    ] = "none,suffix,eagle3,hybrid",
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

    Interrupted, it reports the servers that were done. Arguments after -- go
    to every server. A server of a round takes minutes.
    Example: hvd bench serve --limit 8 --rounds 1 -- --max-model-len 4096
    """
    from decoder.contracts.bundle import ANY_SCOPE
    from decoder.contracts.errors import SettingsError
    from decoder.policy.first import first_policy
    from pipelines.lab.bench.methods import describe, numbers, words
    from pipelines.lab.bench.metrics import table
    from pipelines.lab.bench.serve import run as bench
    from pipelines.lab.bench.serve.load import Selection, from_workloads, levels
    from pipelines.lab.bench.serve.setups import Plan, setups
    from pipelines.lab.bench.serve.summary import WIDTH, runs_in, table_columns, unequal
    from pipelines.policy.moves import load_policy
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


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def gpu(context: typer.Context) -> None:
    """Costs of steps on a GPU at real shapes, and methods there with the real router; --help."""
    from pipelines.lab.bench.gpu import main

    raise typer.Exit(main(context.args))


def _show(title: str, found: dict[str, Any], as_json: bool) -> None:
    from pipelines.lab.bench.metrics import facts

    print_json(found) if as_json else out.print(facts(title, found))


@app.command()
def decide(
    steps: Annotated[int, typer.Option(min=20, help="Steps timed.")] = 300,
    whole: Annotated[
        bool, typer.Option("--whole", help="And how long prompts of 32k make the others wait.")
    ] = False,
    requests: Annotated[int, typer.Option(min=1, max=4096, help="Requests of a step.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each one's prompt.")] = 1_000,
    loops: Annotated[bool, typer.Option("--loops", help="Their texts loop.")] = False,
    as_json: AsJson = False,
) -> None:
    """All that is ours in a vLLM step: microseconds a request, processor time.

    Real lookups, decisions, labels, events, accounts and vLLM's adapter.
    Budget: 12 us a request of 64, and with --whole 2 ms of waiting.
    """
    from pipelines.lab.bench.step_cost import measure

    found = measure(steps, 7 if whole else 0, requests=requests, prompt=prompt, loops=loops)
    _show(f"A step of {requests} requests, all that is ours", found, as_json)


@app.command()
def memory(
    outputs: Annotated[
        int, typer.Option(min=1, help="Tokens that one tenant wrote before.")
    ] = 10_000_000,
    requests: Annotated[int, typer.Option(min=1, help="Requests under way.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each one's prompt.")] = 131_072,
    as_json: AsJson = False,
) -> None:
    """What a worker holds of a tenant's text, by its books and by the size of the process."""
    from pipelines.lab.bench.step_cost import memory as held

    _show("What a worker holds of a tenant's text", held(outputs, requests, prompt), as_json)


@app.command()
def learner(
    events: Annotated[
        int, typer.Option(min=10_000, help="Events taken in, by each combination.")
    ] = 10_000_000,
    scopes: Annotated[str, typer.Option(help="How many scopes, separated by commas.")] = "1,10",
    intakes: Annotated[
        str,
        typer.Option(help="How many intakes apart, separated by commas; 0: the learner's own."),
    ] = "0,1",
    as_json: AsJson = False,
) -> None:
    """What a learner takes in on one core, by scopes and intakes; no broker, no registry.

    Intakes apart send a sixteenth of the requests on: events a second of them
    together, each on a core, and of the learner, by what they read.

    Aims: 50,000 events a second, and as much memory after ten million events
    as after one.
    """
    from pipelines.lab.bench.learner import measure
    from pipelines.reports import Shown

    try:
        pairs = [(int(n), int(k)) for n in scopes.split(",") for k in intakes.split(",")]
        if any(n < 1 or k < 0 for n, k in pairs):
            raise ValueError("a scope at least")
    except ValueError as error:
        raise typer.BadParameter("whole numbers, separated by commas") from error
    told = {}
    with Shown(err) as shown:
        for n, k in pairs:
            name = f"{n} scopes, {k} intakes"
            told[name] = measure(events, n, partial(shown.step, name, whole=events), k)
    _show("What a learner takes in", told, as_json)

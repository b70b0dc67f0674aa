"""The references in docs/reference, made of the code: ``python -m tests.docs.reference``.

It writes settings, commands, metrics and vLLM's settings anew, the tables that the page on
performance takes from its data, and the columns of draft events. What else is on the page on topics
is written by hand.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from decoder.contracts import fields
from decoder.contracts.settings import SECRETS_VARIABLE, KafkaSettings, Settings
from decoder.engines.vllm.requirements import HOW_TO_START, REQUIREMENTS
from decoder.settings import FACTOR, WHOLE_FACTOR, WorkerSettings
from decoder.telemetry import metrics as worker
from decoder.telemetry.mapped import FOLDER_VARIABLE
from learner import metrics as learner
from learner.settings import LearnerSettings
from pipelines.cli import app, up
from pipelines.machine import FLAGS_VARIABLE
from pipelines.telemetry import schemas
from tests.docs.pages import DOCS, filled, table

FOLDER: Final = DOCS / "reference"
NAMED: Final = {str: "text", Path: "path", int: "whole number", float: "number"}
MARKUP: Final = ("[bold]", "[/bold]", "\b")
SERVING: Final = (("hvd_serving", "1 for the scope that the worker serves.", "worker, scope"),)
SIDES: Final = (
    ("hvd_side_tokens_total", "Tokens of steps that a variant decided.", "worker, side"),
    ("hvd_side_seconds_total", "Seconds that these steps took.", "worker, side"),
    ("hvd_fallback", "1 for the fixed arm that the no-regret floor serves.", "worker, arm"),
)
SUMMED: Final = (
    ("records_refused_total", "Records that keep no contract.", "reason"),
    ("given_up_total", "Registrations and moves of aliases that were not made.", "reason"),
    ("events_lost_total", "Of the events consumed, those whose lesson is gone.", "scope, reason"),
    ("verdicts_total", "Comparisons with the champion that ended.", "scope, outcome"),
    ("registry_away_seconds", "Since when MLflow does not answer; 0: it does.", ""),
)


CLASSES: Final[dict[str, type[Settings]]] = {
    "Worker": WorkerSettings,
    "Learner": LearnerSettings,
    "Kafka: worker, learner, and every command that reads topics": KafkaSettings,
}
PORTS: Final = {
    "api_port": "the worker's API and its `/metrics`",
    "kafka_port": "the embedded broker",
    "mlflow_port": "MLflow",
    "page_port": "the page that shows live what the service brings",
}
OTHERS: Final = {
    SECRETS_VARIABLE: "folder with a file for each setting that is not to stand in the "
    "environment, named like its variable in lower case",
    FLAGS_VARIABLE: "feature flags to go by instead of the processor's own",
    FOLDER_VARIABLE: "folder that vLLM's processes share figures in; `hvd serve` sets it, in a "
    "vLLM of your own name an empty one",
    "XDG_CACHE_HOME": "where the user's cache is, by the XDG specification; `~/.cache`",
}
THAT_HANG: Final = {
    "name": "host and process id",
    "suffix_max_factor": f"`{FACTOR}`, `{WHOLE_FACTOR}` with `HVD_WORKER_START=counting`",
}
"""Defaults that hang on the machine, or on another setting."""
SETTINGS_HEAD: Final = """\
# Settings

Every variable that a process of the service reads, made of the code. What has no row here is a
named constant.

An unknown name with one of these prefixes, or a value out of its range, ends the process with one
sentence. *Secret* values are in no message; files may hold them ([others](#others)).

`hvd serve` sets `HVD_WORKER_ENABLED=1`, and `HVD_WORKER_TENANTS=middleware` unless you set it.
`hvd up` tells its processes where broker, registry and the learner's state are.
"""


def settings() -> str:
    """Every variable that a process of the service reads."""
    parts = [SETTINGS_HEAD]
    for title, kind in CLASSES.items():
        prefix = str(kind.model_config.get("env_prefix", ""))
        rows = [
            [f"`{prefix}{name.upper()}`", default(name, field), values(field), meaning(field)]
            for name, field in kind.model_fields.items()
        ]
        parts.append(f"## {title}\n\n{table(['variable', 'default', 'takes', 'meaning'], rows)}")
    ports = [
        [f"`--{name.replace('_', '-')}`", f"`{port.default}`", PORTS[name]]
        for name, port in inspect.signature(up).parameters.items()
    ]
    others = [[f"`{name}`", said] for name, said in OTHERS.items()]
    parts.append(f"## Ports of `hvd up`\n\n{table(['option', 'default', 'of'], ports)}")
    parts.append(f"## Others\n\n{table(['variable', 'meaning'], others)}")
    return "\n".join(parts)


def meaning(field: FieldInfo) -> str:
    told = field.description or ""
    return told if field.repr else f"{told} (secret)"


def default(name: str, field: FieldInfo) -> str:
    if name in THAT_HANG:
        return THAT_HANG[name]
    value = field.default
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        value = int(value)
    return f"`{','.join(value) if isinstance(value, tuple) else value}`"


def values(field: FieldInfo) -> str:
    """What a value may be, where its default does not say it."""
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind != NoneType]
    if choice := [word for kind in kinds for word in words(kind)] or words(field.annotation):
        return ", ".join(f"`{word}`" for word in choice)
    if field.annotation is bool:
        return "`0`, `1`"
    return limits_of(field.metadata)


def words(kind: Any) -> tuple[str, ...]:
    """Of a choice."""
    return get_args(kind) if get_origin(kind) is Literal else ()


def limits_of(limits: list[Any]) -> str:
    """``limits`` are pydantic's, which come from a package that it alone depends on."""
    said: dict[str, Callable[[Any], str]] = {
        "Ge": lambda limit: f"at least {limit.ge}",
        "Gt": lambda limit: f"more than {limit.gt:g}",
        "Le": lambda limit: f"at most {limit.le}",
        "Lt": lambda limit: f"less than {limit.lt:g}",
    }
    known = [limit for limit in limits if type(limit).__name__ in said]
    return ", ".join(said[type(limit).__name__](limit) for limit in known)


def commands() -> str:
    """Every command with its arguments and options."""
    parts = [
        "# Commands\n\nEvery command of `hvd`, made of the code. `hvd COMMAND --help` says the "
        "same. Exit status: 0, 1 where a check failed, 2 with one sentence for an error, 130 after "
        "Ctrl-C.\n"
    ]
    for path, command in walked("hvd", typer.main.get_command(app)):
        said = plain(command.help or "")
        parts.append(f"## {path}\n\n{said}\n")
        rows = [row for each in command.params if (row := parameter(each)) is not None]
        if rows:
            parts.append(table(["option", "takes", "default", "meaning"], rows))
    return "\n".join(parts)


def walked(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command and all below it, with what is typed."""
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from walked(f"{path} {name}", each)


def parameter(given: Any) -> list[str] | None:
    """A row of an option or an argument; none of those that every command has."""
    if given.name in ("help", "install_completion", "show_completion"):
        return None
    named = [*given.opts, *given.secondary_opts]
    names = ", ".join(named) if given.param_type_name == "option" else given.name.upper()
    shown = given.default not in (None, "", False, ()) and not callable(given.default)
    default = f"`{given.default}`" if shown else ""
    return [f"`{names}`", takes(given), default, plain(getattr(given, "help", None) or "")]


def takes(given: Any) -> str:
    """The words of a choice, or the kind and range of a value; nothing of a switch."""
    kind = given.type_descriptor.annotation
    if choice := words(kind):
        return ", ".join(f"`{word}`" for word in choice)
    kinds = [each for each in get_args(kind) if each is not NoneType] or [kind]
    if kinds == [bool]:
        return ""
    ends = [f"{given.min} or more"] if given.min is not None else []
    ends += [f"{given.max} at most"] if given.max is not None else []
    again = ["may be given again"] if getattr(given, "multiple", False) else []
    return ", ".join([NAMED.get(kinds[0], kinds[0].__name__), *ends, *again])


def plain(text: str) -> str:
    """Help as a page has it."""
    for mark in MARKUP:
        text = text.replace(mark, "")
    return (
        "\n".join(line.strip() for line in text.strip().splitlines())
        .replace("|", "\\|")
        .replace("<", "&lt;")
    )


def metrics() -> str:
    """Every series of worker and learner, beside vLLM's own."""
    meaning_of = worker.meaning_of
    rows = [(f"hvd_{name}_total", meaning_of(name), "worker") for name in worker.COUNTS]
    rows += [
        (f"hvd_{name}_total", meaning_of(name), f"worker, {label}")
        for name, label in worker.COUNTS_BY.items()
    ]
    rows += [(f"hvd_{name}", meaning_of(name), "worker") for name in worker.LEVELS]
    rows += [*SERVING, *SIDES]
    of: list[tuple[Mapping[str, str], str, str]] = [
        (learner.COUNTS, "_total", ""),
        (learner.LEVELS, "", ""),
        (learner.SCOPE_COUNTS, "_total", "scope"),
        (learner.SCOPE_LEVELS, "", "scope"),
    ]
    others = [
        (f"{learner.PREFIX}{name}{end}", said, label)
        for series, end, label in of
        for name, said in series.items()
    ]
    others += [(learner.PREFIX + name, said, label) for name, said, label in SUMMED]
    head = ["series", "meaning", "labels"]
    return (
        "# Metrics\n\nEvery series of ours, made of the code. Which to look at is on "
        "[Operations](../operations.md).\n\n## Worker\n\n"
        + table(head, [[f"`{name}`", *rest] for name, *rest in rows])
        + "\n## Learner\n\n"
        + table(head, [[f"`{name}`", *rest] for name, *rest in others])
    )


ACCEPTED: Final = {
    "method eagle3": "cache drafts, model drafts, or none, by the cycle",
    "method suffix": "cache drafts or none",
    "`num_speculative_tokens`": "limit of the drafts of all arms; the paper's is 64, and a smaller "
    "one splits copied text into more cycles",
    "`disable_eagle_block_drop`": "true: a shared prefix is reused whole; false: its last block "
    "(128 tokens on a CPU) is prefilled again for one position of the drafter's cache",
    "`VLLM_USE_V2_MODEL_RUNNER`": "unset: the V1 runner, or V2 for features that only V2 has. 1: "
    "V2, which was not run on a GPU; there the drafter runs in every step, and plain steps use "
    "piecewise graphs unless enable_adaptive_verification is on",
    "`--async-scheduling` with the V2 runner": "each step is trimmed to the chosen drafts; until "
    "then it reserves the longest ones, so num_speculative_tokens of 16 to 24 leaves prompts more "
    "of a step",
    "`--tensor-parallel-size`": "rank 0 decides and the others follow: one worker, one cache, one "
    "stream of telemetry; the drafter runs in every step",
    "`--data-parallel-size`, dense model": "each replica is a worker of its own, with its own "
    "cache and name",
    "`--max-num-batched-tokens`, `--max-num-seqs`, `--enable-chunked-prefill`, "
    "`--scheduling-policy`, `--quantization`, `--dtype`, KV cache": "drafts use what prompts leave "
    "of a step; a preempted request resumes, and gets drafts again; costs are measured on the "
    "model as it runs",
    "`--structured-outputs-config`, backend auto, xgrammar, guidance or outlines": "vLLM truncates "
    "drafts at the first token that breaks the grammar; the rest does not count as drafted",
    "`--enforce-eager`, `cudagraph_mode`": "steps without drafts run on full graphs of their own "
    "size, steps with drafts on piecewise ones; a mode without either stays",
}


def vllm_settings() -> str:
    """What the plugin makes of vLLM's settings."""
    rows = [
        [code(row.setting), row.values, row.verdict, row.why.removesuffix(f" {HOW_TO_START}")]
        for row in REQUIREMENTS
    ]
    return (
        "# vLLM's settings\n\nWhat the plugin makes of them, made of the code. *Clamped* works "
        "with the limit that is named, *refused* ends the start with the sentence of the last "
        "column. All others work as in plain vLLM. "
        "[The plugin in your vLLM](../vllm.md) has the rest.\n\n"
        + table(["setting", "values", "", "why"], rows)
        + "\n## Accepted\n\n"
        + table(["setting", "what it does here"], [[*row] for row in ACCEPTED.items()])
    )


def code(setting: str) -> str:
    """Code marks around what is written as it stands, none around words."""
    parts = setting.split(", ")
    return ", ".join(f"`{p}`" if p.startswith("--") or "_" in p else p for p in parts)


def performance() -> str:
    """The page on performance with the tables of its data."""
    return filled((DOCS / "performance.md").read_text(encoding="utf-8"))


def topics() -> str:
    """The page on topics with the columns of draft events from their own table."""
    rows = [
        [f"`{field.name}`", field.unit, range_of(field), field.meaning] for field in fields.FIELDS
    ]
    columns = table(["column", "unit", "range", "meaning"], rows)
    page = (FOLDER / "topics.md").read_text(encoding="utf-8")
    return re.sub(r"\| column \|(?:.*\n)+?(?=\n)", lambda _: columns, page)


def range_of(field: fields.Field) -> str:
    if field.kind == "string":
        return "name"
    low, high = field.limits
    return f"{low:.0f}..{high:.0f}{', null' if field.nullable else ''}"


MADE: Final[Mapping[Path, Callable[[], str]]] = {
    FOLDER / "settings.md": settings,
    FOLDER / "cli.md": commands,
    FOLDER / "metrics.md": metrics,
    FOLDER / "vllm-settings.md": vllm_settings,
    DOCS / "performance.md": performance,
    FOLDER / "topics.md": topics,
}
"""Each page that is made, and what makes it."""


if __name__ == "__main__":
    for place, make in MADE.items():
        place.write_text(make(), encoding="utf-8")
    for name, text in schemas.files().items():
        (DOCS.parent / "deploy" / "schemas" / name).write_text(text, encoding="utf-8")

"""Workloads: prompts made from Python's standard library, which every machine has.

Six kinds, each an endless and deterministic stream of :class:`pipelines.prompts.Prompt`:

========  =====================================================  =============
kind      what the user asks for                                 cache drafts
========  =====================================================  =============
edits     rewrite a function with one thing changed              long, copied
tools     answer with one JSON tool call out of a list of tools  templated
qa        answer from a documentation page shown in the prompt   quoted
code      write a new function from a description                short
chat      explain, list, tell                                    rare
records   report on an order, as on two others, by its number    rejected
========  =====================================================  =============

The drafter is trained on one split (``train``); demos, tests and benchmarks use the other
(``heldout``).
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pipelines.prompts import Message, Prompt, PromptSet

Split = Literal["train", "heldout"]

HELDOUT_IN_TEN = 3  # held-out share of the source functions, in tenths


@dataclass(frozen=True)
class Function:
    """A function of the standard library: its source text and first docstring paragraph."""

    module: str
    name: str
    source: str
    doc: str
    arguments: tuple[str, ...]

    @property
    def split(self) -> Split:
        """The split, by a hash of its name."""
        digest = hashlib.sha256(f"{self.module}.{self.name}".encode()).digest()
        return "heldout" if digest[0] % 10 < HELDOUT_IN_TEN else "train"


def _functions_of(path: Path) -> Iterator[Function]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines = text.encode().split(b"\n")
    except (SyntaxError, UnicodeDecodeError):  # some files are broken on purpose
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        begin, end = node.lineno - 1, node.end_lineno or node.lineno
        if not 5 <= end - 1 - begin <= 28:
            continue
        # as ast.get_source_segment, which splits the whole file at every call
        body = [lines[begin][node.col_offset :], *lines[begin + 1 : end - 1]]
        source = b"\n".join([*body, lines[end - 1][: node.end_col_offset]]).decode()
        if len(source) > 1100:
            continue
        doc = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        arguments = tuple(a.arg for a in node.args.args if a.arg not in ("self", "cls"))
        yield Function(path.stem, node.name, source, doc, arguments)


@cache
def standard_library_functions(split: Split) -> tuple[Function, ...]:
    """All functions of 6 to 29 lines in the standard library's top-level modules, in file order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    functions = itertools.chain.from_iterable(_functions_of(p) for p in sorted(root.glob("*.py")))
    return tuple(f for f in functions if f.split == split)


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _edits(rng: random.Random, functions: tuple[Function, ...]) -> tuple[Message, ...]:
    f = rng.choice([f for f in rng.choices(functions, k=8) if f.arguments] or functions[:1])
    argument = f.arguments[0] if f.arguments else f.name
    change = rng.choice(
        [
            f"Rename the variable `{argument}` to `{argument}_value` everywhere.",
            f"Rename the function `{f.name}` to `{f.name}_v2`.",
            "Add type hints to the signature. Change nothing else.",
            "Add a one-line docstring. Change nothing else.",
            f"Add a line that raises ValueError if `{argument}` is None.",
            "Copy it exactly and add a comment above each return statement.",
        ]
    )
    asked = f"Edit this Python function. {change} Return the whole function."
    return _user(f"{asked}\n\n```python\n{f.source}\n```")


def _tools(rng: random.Random, functions: tuple[Function, ...]) -> tuple[Message, ...]:
    offered = rng.sample(functions, 3)
    tools = [
        {
            "name": f"{f.module}_{f.name}".strip("_"),
            "description": f.doc[:120] or f"Calls {f.name}.",
            "parameters": {a: {"type": "string", "required": True} for a in f.arguments[:4]},
        }
        for f in offered
    ]
    wanted = rng.choice(tools)
    values = {a: rng.choice(_VALUES) for a in wanted["parameters"]}
    asked = ", ".join(f"{k} = {v!r}" for k, v in values.items()) or "no arguments"
    system = (
        "You can call tools. Answer only with a list of JSON calls of the form "
        '[{"name": tool, "arguments": {...}}], one for each request.\n'
        f"Tools: {json.dumps(tools, indent=1)}"
    )
    repeats = rng.randint(1, 3)
    question = " Then ".join([f"call {wanted['name']} with {asked}."] * repeats)
    return ({"role": "system", "content": system}, *_user(question.capitalize()))


_VALUES = ("report.txt", "42", "utf-8", "main", "/srv/data", "2026-01-31", "alpha", "0.5", "true")
_ASKS = (
    "Explain {t} to a beginner.",
    "What are the advantages and disadvantages of {t}?",
    "Write a short story about {t}.",
    "Give five tips about {t}.",
    "Write an email to a colleague about {t}.",
    "What is the history of {t}?",
    "Compare {t} and {u}.",
    "Write a poem about {t} and {u}.",
)
_TOPICS = tuple(
    """
    the moon|bread baking|electric cars|chess|rivers|honey bees|old libraries|remote work|jazz
    volcanoes|winter|a lighthouse keeper|budgeting|gardening|public transport|coffee
    photosynthesis|the printing press|a lost dog|mountain hiking|solar power|language learning
    sleep|the internet|tea ceremonies|bridges|robots|friendship|exams|desert travel|museums
    running|recycling|glaciers|a small village|astronomy|the ocean|cooking rice|interviews
    patience|time zones|birds|music lessons|the harvest|maps|a train journey|markets
    childhood games|clocks|elections|healthy eating|vaccines|stage fright|city parks|insects
    the wheel""".strip()
    .replace("\n    ", "|")
    .split("|")
)


def _topics(split: Split) -> tuple[str, ...]:
    """Topics of ``split``; the last fifteen are held out."""
    return _TOPICS[-15:] if split == "heldout" else _TOPICS[:-15]


def _qa(rng: random.Random, functions: tuple[Function, ...]) -> tuple[Message, ...]:
    documented = [f for f in rng.choices(functions, k=40) if f.doc][:6] or list(functions[:3])
    page = "\n".join(f"{f.module}.{f.name}({', '.join(f.arguments)}): {f.doc}" for f in documented)
    f = rng.choice(documented)
    ask = rng.choice(
        [
            f"What does {f.module}.{f.name} do? Quote the page.",
            "List every function of the page with its description.",
            f"Summarise the page, then explain {f.name} in your own words.",
        ]
    )
    return _user(f"Documentation page:\n{page}\n\n{ask}")


def _code(rng: random.Random, functions: tuple[Function, ...]) -> tuple[Message, ...]:
    f = rng.choice([f for f in rng.choices(functions, k=20) if f.doc] or functions[:1])
    return _user(
        f"Write a Python function `{f.name}({', '.join(f.arguments)})`. {f.doc} "
        + rng.choice(["Add comments.", "Show two examples of its use.", "Explain each line."])
    )


_STEPS = (
    "received",
    "checked",
    "packed",
    "weighed",
    "signed",
    "loaded",
    "shipped",
    "paid",
    "filed",
)


def _records(rng: random.Random, functions: tuple[Function, ...]) -> tuple[Message, ...]:
    """Every copy of an earlier report is rejected at the next order's number."""
    steps, orders = rng.sample(_STEPS, len(_STEPS)), rng.sample(range(1000, 10_000), 3)
    asked = [_user(f"Report on order {order}.") for order in orders]
    reports = [" ".join(f"Order {order} was {step}." for step in steps) for order in orders]
    answers = [({"role": "assistant", "content": report},) for report in reports]
    return (*asked[0], *answers[0], *asked[1], *answers[1], *asked[2])


Maker = Callable[[random.Random, tuple[Function, ...]], tuple[Message, ...]]
MAKERS: dict[str, Maker] = {
    "edits": _edits,
    "tools": _tools,
    "qa": _qa,
    "code": _code,
    "records": _records,
}
WORKLOADS = ("edits", "tools", "qa", "code", "chat")
"""The default workloads; records are made to mislead."""


def interleaved(
    workloads: Sequence[str] = WORKLOADS, split: Split = "heldout", seed: int = 42
) -> Iterator[Prompt]:
    """Endless, alternating stream of several workloads' prompts."""
    streams = [prompts(workload, split, seed) for workload in workloads]
    return itertools.chain.from_iterable(zip(*streams, strict=True))


def prompts(workload: str, split: Split = "heldout", seed: int = 42) -> Iterator[Prompt]:
    """Endless stream of one workload's prompts, determined by the arguments.

    Raises:
        ValueError: there is no such ``workload``.
    """
    if workload not in (known := (*MAKERS, "chat")):
        raise ValueError(f"unknown workload {workload!r}: choose one of {', '.join(known)}")
    rng = random.Random(f"{workload}/{split}/{seed}")
    functions, topics = standard_library_functions(split), _topics(split)
    for index in itertools.count():
        if workload == "chat":
            t, u = rng.sample(topics, 2)
            messages = _user(rng.choice(_ASKS).format(t=t, u=u))
        else:
            messages = MAKERS[workload](rng, functions)
        yield Prompt(f"{workload}-{split}-{seed}-{index}", workload, workload, messages)


def prompt_sets(names: Sequence[str], count: int, problems: list[str]) -> Iterator[PromptSet]:
    """``count`` held-out prompts of each workload of ``names``, by default of all; unknown names
    become sentences in ``problems``."""
    for name in names or WORKLOADS:
        if name in WORKLOADS:
            yield PromptSet(name, name, tuple(itertools.islice(prompts(name), count)))
        else:
            problems.append(f"dataset {name!r} left out: there are {', '.join(WORKLOADS)}.")

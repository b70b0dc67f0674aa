"""The kinds of sessions that the project writes itself: what they show and what they ask.

Made of the held-out half of what :mod:`pipelines.workloads` has, so nobody needs data and the
shipped drafter has seen none of it. Results of tools come as a user's messages, as in agents that
need no tool calling of the server: every chat template takes them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pipelines.workloads import Function

FILE_CHARACTERS: Final = 1400
"""Of a file that is shown: some 400 tokens, so that an answer with the whole of it is as long."""
PAGE: Final = 7
"""Functions on a page of documentation, and in a tool's result."""


@dataclass(frozen=True)
class Talk:
    """A session as it is written: what there is to show, and, growing, what was shown."""

    rng: random.Random
    functions: Sequence[Function]
    shown: list[Function]

    def drawn(self, count: int, documented: bool = False) -> list[Function]:
        """Functions that are shown from now on."""
        found = [f for f in self.functions if f.doc] if documented else self.functions
        drawn = self.rng.sample(found, count)
        self.shown.extend(drawn)
        return drawn


Text = Callable[[Talk], str]


def _file(talk: Talk) -> tuple[Function, str]:
    """A file of functions of one module, and one of them."""
    begins = [talk.rng.randrange(len(talk.functions)) for _ in range(4)]
    inside = max((_from(talk.functions, begin) for begin in begins), key=_characters)
    talk.shown.extend(inside)
    source = "\n\n".join(f.source for f in inside)
    return talk.rng.choice(inside), f"{inside[0].module}.py\n```python\n{source}\n```"


def _from(functions: Sequence[Function], begin: int) -> list[Function]:
    inside = [functions[begin]]
    for f in functions[begin + 1 :]:
        if f.module != inside[0].module or _characters([*inside, f]) > FILE_CHARACTERS:
            break
        inside.append(f)
    return inside


def _characters(functions: Sequence[Function]) -> int:
    return sum(len(f.source) for f in functions)


def _changed(rng: random.Random, f: Function) -> str:
    argument = f.arguments[0] if f.arguments else f.name
    return rng.choice(
        [
            f"Rename `{f.name}` to `{f.name}_v2` everywhere.",
            f"Rename the variable `{argument}` to `{argument}_value` in `{f.name}`.",
            f"Let `{f.name}` raise ValueError if `{argument}` is None.",
            "Add type hints to every signature. Change nothing else.",
            "Add a comment above each return statement. Change nothing else.",
            f"Add a docstring to `{f.name}` that says what it returns.",
        ]
    )


def _show_file(talk: Talk) -> str:
    f, text = _file(talk)
    return f"File {text}\n\n{_changed(talk.rng, f)} Return the whole file."


def _read_file(talk: Talk) -> str:
    f, text = _file(talk)
    return f"Result of read_file: {text}\n\n{_changed(talk.rng, f)} Return this whole file."


def _tests_failed(talk: Talk) -> str:
    rng, f = talk.rng, talk.rng.choice(talk.shown)
    line, left, right = rng.randrange(20, 400), rng.randrange(9), rng.randrange(9)
    return (
        f'Result of run_tests:\nF..\nFile "test_{f.module}.py", line {line}, in test_{f.name}\n'
        f"    assert found == {left}\nAssertionError: assert {right} == {left}\n"
        "1 failed, 2 passed\n\nCorrect the code you wrote last. Return the whole file."
    )


def _last_change(talk: Talk) -> str:
    change = talk.rng.choice(
        [
            "Add a docstring of one line to every function.",
            "Add a function main() that calls each function once.",
            "Turn the functions into methods of one class.",
        ]
    )
    return f"Result of run_tests: 3 passed\n\n{change} Return the whole file you wrote last."


def _records(talk: Talk) -> str:
    found = [
        {"module": f.module, "name": f.name, "arguments": list(f.arguments), "doc": f.doc[:90]}
        for f in talk.drawn(PAGE)
    ]
    return f"Result of list_functions:\n{json.dumps(found, indent=1)}"


def _as_json(talk: Talk) -> str:
    left_out = talk.rng.choice(["doc", "arguments", "module"])
    return (
        f"{_records(talk)}\n\nReturn these records as a JSON list without the field "
        f"{left_out!r}, each with a field 'id' that counts from 1."
    )


def _as_table(talk: Talk) -> str:
    return f"{_records(talk)}\n\nReturn a Markdown table, one row for each record."


def _call_each(talk: Talk) -> str:
    value = talk.rng.choice(["report.txt", "/srv/data", "2026-01-31"])
    return (
        "For each of the last records write one JSON call of the form "
        '{"tool": "run", "arguments": {"module": ..., "name": ..., "value": '
        f'"{value}"}}}}, one on each line.'
    )


def _by_module(talk: Talk) -> str:
    return "Group all records so far by module, as one JSON object. Keep every field."


def _page(talk: Talk) -> str:
    found = talk.drawn(PAGE, documented=True)
    return "\n".join(f"{f.module}.{f.name}({', '.join(f.arguments)}): {f.doc}" for f in found)


def _quote(talk: Talk) -> str:
    page = _page(talk)
    return f"Result of fetch_page:\n{page}\n\nList every function of the page with what it does."


def _explain(talk: Talk) -> str:
    return (
        f"Result of fetch_page:\n{_page(talk)}\n\nExplain this page to a beginner, "
        "function by function. Quote it and give an example of each."
    )


def _compare(talk: Talk) -> str:
    return "Which functions of all pages so far are alike? Compare them in a list, with quotes."


def _summarise(talk: Talk) -> str:
    return "Write a summary of all pages so far, then a question and answer on each function."


def _describe(talk: Talk) -> str:
    wanted = talk.drawn(3, documented=True)
    listed = "\n".join(f"- {f.name}({', '.join(f.arguments)}): {f.doc}" for f in wanted)
    return f"Write one Python file with these functions and their docstrings:\n{listed}"


def _want_tests(talk: Talk) -> str:
    return "Result of run_tests: no tests ran\n\nWrite unit tests for every function."


def _want_words(talk: Talk) -> str:
    return "Explain the code you wrote last to a reviewer, line by line. Quote each line."


@dataclass(frozen=True)
class Kind:
    """What sessions of one kind open with, and what they go on with."""

    system: str
    opening: Text
    further: tuple[Text, ...]


_AGENT: Final = "You are a coding agent. You see files and results of tools"
KINDS: Final = {
    "edits": Kind(
        f"{_AGENT}, and answer with whole files in one block of code.",
        _show_file,
        (_read_file, _tests_failed, _last_change),
    ),
    "tools": Kind(
        "You are an agent that calls tools. You see their results and answer in the form asked "
        "for, with nothing around it.",
        _as_json,
        (_as_table, _call_each, _by_module),
    ),
    "docs": Kind(
        "You are an agent that reads documentation. You answer from the pages you were shown.",
        _quote,
        (_explain, _compare, _summarise),
    ),
    "code": Kind(
        f"{_AGENT}, and write code with comments.",
        _describe,
        (_want_tests, _tests_failed, _want_words),
    ),
}

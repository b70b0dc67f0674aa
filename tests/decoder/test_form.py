"""Functions of the hot path take a handful of things and can be seen at a glance."""

from __future__ import annotations

import ast
from pathlib import Path

import decoder
import learner
import pipelines

ARGUMENTS, COMPILED_ARGUMENTS, LINES = 7, 6, 50
LARGER: set[str] = set()
"""Those that are not there yet; whoever mends one takes it off."""


def too_large(path: Path) -> set[str]:
    tree, found = ast.parse(path.read_text()), set()
    owners = {f: c for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([a for a in every if a.arg not in ("self", "cls")])
            marks = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
            most = COMPILED_ARGUMENTS if marks & {"compiled", "entry_point"} else ARGUMENTS
            assert node.end_lineno is not None
            if count > most or node.end_lineno - node.lineno >= LINES:
                owner = f" of {owners[node].name}" if node.name == "__init__" else ""
                found.add(node.name + owner)
    return found


def test_no_function_takes_more_than_seven_things_or_fifty_lines() -> None:
    paths = [*Path(decoder.__file__).parent.rglob("*.py")]
    assert len(paths) > 100
    assert set().union(*map(too_large, paths)) == LARGER


def test_nor_does_any_of_the_learner_s() -> None:
    paths = [*Path(learner.__file__).parent.rglob("*.py")]
    assert len(paths) > 40
    assert set().union(*map(too_large, paths)) == set()


def test_nor_does_any_of_the_pipelines() -> None:
    paths = [*Path(pipelines.__file__).parent.rglob("*.py")]
    assert len(paths) > 80
    assert set().union(*map(too_large, paths)) == set(), "commands take a record of options"

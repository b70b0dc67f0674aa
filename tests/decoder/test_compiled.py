"""Compiled functions compute what their source says, wherever it lies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.compiled import Float32Matrix, Handle, Int64Array, entry_point, handle_of, opener
from decoder.contracts.bundle import Policy
from decoder.core.requests import RequestOptions
from decoder.policy.first import first_policy
from tests.decoder.simulated import Router, decode_all
from tests.decoder.small_disk import on_small_disk

POINT = np.dtype([("x", "i4"), ("y", "f8"), ("past", "i8", (3,))], align=True)


class Held(NamedTuple):
    a: Int64Array
    b: Float32Matrix


class Both(NamedTuple):
    held: Held
    points: Annotated[NDArray[Any], POINT]


both_of = opener(Both)


@entry_point
def total(handle: Handle) -> float:
    both = both_of(handle)
    last = both.points[len(both.points) - 1]
    last["past"][1] += 1
    return both.held.a.sum() + both.held.b.sum() + last["x"] + last["y"]


def test_a_function_that_can_be_kept_nowhere_is_compiled_all_the_same() -> None:
    """numba keeps nothing of a source without a file, as of one in a place that is read only."""
    made: dict[str, Callable[..., Any]] = {}
    exec("def plus(a: float, b: float) -> float:\n    return a + b", made)
    assert entry_point(made["plus"])(1.5, 2.0) == 3.5


ALIVE = """
from decoder import compiled
@compiled.entry_point
def at_once(a: float) -> float:
    return a + 1
late = compiled.compiled(lambda a, b: a + b)  # when it is called, as most are
print("alive", late(1, 2))
"""


def run(*arguments: str, folder: str = "") -> str:
    """What a Python of its own says."""
    path = f"{folder}{Path(__file__).parents[2]}"
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def test_a_full_disk_keeps_nothing_and_stops_nothing(tmp_path: Path) -> None:
    script = tmp_path.with_suffix(".py")
    script.write_text(ALIVE)
    done = on_small_disk(tmp_path, "NUMBA_CACHE_DIR", script, 8, 2)
    assert done.stdout.startswith("alive 3\n"), done


TAKEN = """
from decoder.compiled import compilable, entry_point
PART = 2.0
def plain(a):
    return a / PART
compilable(plain)
@entry_point
def part(a: float) -> float:
    return a / PART
"""
TAKING = """
from decoder.compiled import entry_point
from taken import PART, part, plain
@entry_point
def taking(a: float) -> float:
    return part(a)
@entry_point
def taking_plain(a: float) -> float:
    return plain(a)
@entry_point
def taking_number(a: float) -> float:
    return a / PART
for each in (taking, taking_plain, taking_number):
    print(each(12.0), sum(each.stats.cache_hits.values()))
"""


def test_what_is_kept_on_disk_follows_what_it_takes_from_another_file(tmp_path: Path) -> None:
    taking = partial(run, "-m", "taking", folder=f"{tmp_path}{os.pathsep}")
    (tmp_path / "taken.py").write_text(TAKEN)
    (tmp_path / "taking.py").write_text(TAKING)
    assert [taking(), taking()] == ["6.0 0\n" * 3, "6.0 1\n" * 3]
    (tmp_path / "taken.py").write_text(TAKEN.replace("2.0", "3.0"))
    assert taking() == "4.0 0\n" * 3


def steps(policy: Policy | None = None) -> list[tuple[object, ...]]:
    """What a worker decides of a text that copies itself, and what came of it."""
    text = np.random.default_rng(0).integers(0, 4, 90).tolist()
    router = Router(policy or first_policy("s"), True)
    decode_all(router, "r", text[:30], text, RequestOptions(60, 4096))
    return [
        (e.arm, int(e.draft_len), int(e.accepted), float(e.predicted)) for e in router.kept.every
    ]


@pytest.mark.parametrize(
    "without", ["sys.modules['numba'] = None", "os.environ['NUMBA_DISABLE_JIT'] = '1'"]
)
def test_a_worker_without_numba_decides_as_one_with_it(without: str) -> None:
    begin = f"import json, os, sys; {without}; from tests.decoder import test_compiled"
    told = json.loads(run("-c", f"{begin}; print(json.dumps(test_compiled.steps()))"))
    *mine, predicted = zip(*steps(), strict=True)
    *theirs, foreseen = zip(*told, strict=True)
    assert mine == theirs and "cache" in mine[0]
    assert predicted == pytest.approx(foreseen, rel=1e-3, nan_ok=True)  # each adds up in its order


NEVER = """
from numba.core.dispatcher import _DispatcherBase
from decoder.contracts.bundle import frequency_policy
from tests.decoder.test_compiled import steps
def called(made, *_, **__):
    raise AssertionError(f"{made.py_func.__name__} is compiled when a worker calls it")
_DispatcherBase._compile_for_args = called
for policy in (None, frequency_policy("s")):
    print(len(steps(policy)))
"""


def test_a_worker_compiles_nothing_once_it_is_there() -> None:
    assert "0" not in run("-c", NEVER).split()


def test_a_handle_stands_for_the_arrays_it_was_made_of() -> None:
    held = Held(np.arange(3), np.ones((2, 4), np.float32))
    both = Both(held, np.array([(1, 0.5, (0, 0, 0)), (2, 0.25, (0, 0, 0))], POINT))
    assert total(handle_of(both)) == 3 + 8 + 2.25
    assert both.points["past"].tolist() == [[0, 0, 0], [0, 1, 0]]


ORDERS = (
    "decoder.core.router, decoder.policy.estimate, decoder.drafting.suffix",
    "decoder.drafting.suffix, decoder.policy.estimate, decoder.core.router",
)
HITS = """
import sys
from numba.core.dispatcher import Dispatcher
made = {f for m in [*sys.modules.values()] for f in vars(m).values() if isinstance(f, Dispatcher)}
ours = [f for f in made if f.py_func.__module__.startswith("decoder.") and f.signatures]
print(len(ours), sum(sum(f.stats.cache_misses.values()) for f in ours))
"""


def test_what_is_kept_serves_a_process_that_imports_in_another_order() -> None:
    run("-c", f"import {ORDERS[0]}")
    for order in ORDERS:
        functions, missed = map(int, run("-c", f"import {order}\n{HITS}").split())
        assert functions > 15 and not missed

"""Of processes that share a folder of compiled code each runs its own."""

from __future__ import annotations

import importlib
import os
import py_compile
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numba
import pytest

from decoder.code_files import KEPT, CodeFiles, sources

ROOT = Path(__file__).parents[2]
SUM = """
from decoder.compiled import Float64Array, compiled, entry_point
from width import WIDTH
@entry_point
def total(a: Float64Array) -> float:
    s = 0.0
    for i in range(WIDTH):
        s += a[i] * 3.0
    return s
@compiled
def twice(a):
    return a + a
"""
RUN = """
import os, sys, time
role, turns = sys.argv[1], int(sys.argv[2])
replace, turn = os.replace, 0
def wait_and_replace(source, target):
    global turn
    if "summed" in str(target) and turn < turns:
        turn += 1
        open(f"{role}.{turn}.at", "w").close()
        while not os.path.exists(f"{role}.{turn}.go"):
            time.sleep(0.01)
    replace(source, target)
os.replace = wait_and_replace
import numpy as np
import summed
function = getattr(summed, sys.argv[3])
argument = {"reals": np.ones(64), "whole": 2, "real": 2.5}[sys.argv[4]]
print(float(function(argument)), sum(function.stats.cache_hits.values()))
"""
GENERIC = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


class Shared:
    """A folder of compiled code, and processes that run ``summed`` with it."""

    def __init__(self, home: Path) -> None:
        self.home, self.cache = home, home / "cache"
        (home / "summed.py").write_text(SUM)
        (home / "run.py").write_text(RUN)
        self.cache.mkdir()

    def release(self, width: int) -> None:
        """Another release, of whose files each has the same size and the same time."""
        (self.home / "width.py").write_text(f"WIDTH = {width}\n")
        for file in self.home.glob("*.py"):
            os.utime(file, (1e9, 1e9))

    def files(self) -> list[Path]:
        return sorted(self.cache.rglob("summed.total*.nbc"))

    def start(
        self, role: str, turns: int = 0, function: str = "total", argument: str = "reals",
        **environment: str,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """A process that stops before each of its first writes until :meth:`go`."""
        variables = {
            "NUMBA_CACHE_DIR": str(self.cache), "PYTHONPATH": f"{self.home}{os.pathsep}{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "run.py", role, str(turns), function, argument],
            cwd=self.home, env={**os.environ, **variables, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, role: str = "r", **options: str) -> tuple[float, int]:
        """What a process computes, and how many functions it found compiled."""
        return result(self.start(role, **options))  # type: ignore[arg-type]

    def at(self, process: subprocess.Popen[str], role: str, turn: int) -> bool:
        """Whether the process comes to write for the ``turn``-th time, before it ends."""
        while not (self.home / f"{role}.{turn}.at").exists():
            if process.poll() is not None:
                return False
            time.sleep(0.01)
        return True

    def go(self, role: str, turn: int) -> None:
        (self.home / f"{role}.{turn}.go").touch()


def result(process: subprocess.Popen[str]) -> tuple[float, int]:
    said, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    value, hits = said.split()
    return float(value), int(hits)


@contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """None of them outlives the test."""
    with ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        yield


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    made = Shared(tmp_path)
    made.release(4)
    return made


def test_a_release_runs_its_own_code_whatever_an_earlier_one_left(shared: Shared) -> None:
    assert [shared.run(), shared.run()] == [(12.0, 0), (12.0, 1)]
    shared.release(8)
    assert [shared.run(), shared.run()] == [(24.0, 0), (24.0, 1)]
    shared.release(4)
    assert shared.run() == (12.0, 1), "two releases side by side find each their own"


def test_a_release_runs_its_own_code_while_it_is_being_written(shared: Shared) -> None:
    """A second process of the new release looks when the first has written once."""
    assert shared.run() == (12.0, 0)
    shared.release(8)
    writer = shared.start("w", turns=2)
    with ended(writer):
        assert shared.at(writer, "w", 1)
        shared.go("w", 1)
        if shared.at(writer, "w", 2):
            assert shared.run()[0] == 24.0
            shared.go("w", 2)
        assert result(writer) == (24.0, 0)
    assert shared.run() == (24.0, 1)


def test_two_kinds_of_processor_that_write_at_once_find_each_their_own(shared: Shared) -> None:
    mine, generic = shared.start("m", turns=2), shared.start("g", turns=2, **GENERIC)
    with ended(mine, generic):
        for role, process in (("m", mine), ("g", generic)):
            assert shared.at(process, role, 1)
        for turn in (1, 2):
            shared.go("g", turn)
        assert result(generic) == (12.0, 0)
        for turn in (1, 2):
            shared.go("m", turn)
        assert result(mine) == (12.0, 0)
    assert shared.run() == (12.0, 1) and shared.run(**GENERIC) == (12.0, 1)
    one, other = shared.files()
    assert one.read_bytes() != other.read_bytes()


def test_two_signatures_that_are_written_at_once_find_each_their_own(shared: Shared) -> None:
    whole = shared.start("w", turns=4, function="twice", argument="whole")
    real = shared.start("r", turns=4, function="twice", argument="real")
    with ended(whole, real):
        # each has loaded `total` or written it; then both are about to write `twice`
        for turn in range(1, 5):
            for role, process in (("w", whole), ("r", real)):
                shared.at(process, role, turn)
            for role in "wr":
                shared.go(role, turn)
        assert (result(whole), result(real)) == ((4.0, 0), (5.0, 0))
    assert shared.run("a", function="twice", argument="whole") == (4.0, 1)
    assert shared.run("b", function="twice", argument="real") == (5.0, 1)


@pytest.mark.parametrize("harm", ["empty", "half", "zeros", "one bit"])
def test_a_torn_file_is_compiled_anew_and_mended(shared: Shared, harm: str) -> None:
    shared.run()
    (file,) = shared.files()
    content = bytearray(file.read_bytes())
    match harm:
        case "empty":
            content.clear()
        case "half":
            del content[len(content) // 2 :]
        case "zeros":
            content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
        case "one bit":
            content[len(content) * 2 // 3] ^= 8
    file.write_bytes(content)
    assert [shared.run(), shared.run()] == [(12.0, 0), (12.0, 1)]


READ_ONLY = """
unshare --user --map-root-user --mount sh -c '
mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" || exit 77; exec "$@"' "$@"
"""


def test_where_nothing_may_be_written_all_is_computed_all_the_same(shared: Shared) -> None:
    """Sources, cache and home lie on what is read only; what lies there is torn, too."""
    shared.run()
    shared.files()[0].write_bytes(b"torn")
    run = [sys.executable, "run.py", "r", "0", "total", "reals"]
    done = subprocess.run(
        ["sh", "-c", READ_ONLY, "sh", str(shared.home), *run], cwd=shared.home,
        env={
            **os.environ, "NUMBA_CACHE_DIR": str(shared.cache), "HOME": str(shared.home),
            "XDG_CACHE_HOME": "", "PYTHONPATH": f"{shared.home}{os.pathsep}{ROOT}",
        },
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip("this machine lets nobody mount a folder read only")
    assert done.stdout == "12.0 0\n", done.stderr


class Named(NamedTuple):
    first: int
    second: int


class Swapped(NamedTuple):
    second: int
    first: int


Swapped.__name__ = "Named"


def plain(a: float) -> float:
    return a


def test_a_name_depends_on_all_that_the_code_depends_on(tmp_path: Path) -> None:
    def name(kind: object = numba.float64, *rest: object) -> Path:
        return CodeFiles(tmp_path, plain).path(((kind,), *(rest or ("cpu", "+avx", "b"))))

    tuples = [numba.types.NamedTuple((numba.int64,) * 2, kind) for kind in (Named, Swapped)]
    names = [
        name(),
        name(numba.float32),
        name(numba.float64, "other", "+avx", "b"),
        name(numba.float64, "cpu", "+avx512f", "b"),
        name(numba.float64, "cpu", "+avx", "c"),
        *(name(kind) for kind in tuples),
        *(name(numba.types.Tuple((kind,))) for kind in tuples),
    ]
    assert len(set(names)) == len(names)
    assert name() == name(), "and on nothing else"


def test_sources_are_those_of_all_imported_modules_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "room"
    room.mkdir()
    for file, text in (
        ("__init__", ""), ("a", "from room.b import B"), ("b", "import room.c\nB = 1"),
        ("c", "C = 2"), ("alone", "import json\ndef f():\n    import room.c"),
    ):  # fmt: skip
        (room / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("room.a", "room.alone", "decoder.compiled"):
        importlib.import_module(name)
    assert len(sources("room.a")) == 3 and len(sources("room.b")) == 2
    assert len(sources("room.alone")) == 1, "the same whatever else was imported before"
    py_compile.compile(str(room / "c.py"), cfile=str(room / "bare.pyc"))
    importlib.import_module("room.bare")
    assert sources("room.bare") == [""], "without source numba's own key has to do"
    assert len(sources("decoder.compiled")) >= 3, "with this module and the package"


def test_of_one_function_the_newest_files_are_kept(tmp_path: Path) -> None:
    files = CodeFiles(tmp_path, plain)
    for number in range(KEPT + 3):
        key = (numba.float64,), "cpu", "", str(number)
        files.save(key, number)
        os.utime(files.path(key), (number, number))
    assert len([*tmp_path.iterdir()]) == KEPT
    assert files.load(key) == KEPT + 2

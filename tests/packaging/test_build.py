"""What a release holds: a source distribution, the wheel made of it, what that wheel does alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.declared import PROJECT, ROOT

ROOMS = ("decoder", "learner", "pipelines")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "*.egg-info")
ALONE = """
from pathlib import Path
import decoder
home = Path(decoder.__file__).parents[1]
assert str(home) == {home!r}, home
from importlib.metadata import distribution
from decoder.contracts.bundle import ANY_SCOPE
from decoder.policy.first import first_policy
from learner.registry import runs
from pipelines import embedded, telemetry
from pipelines.lab.drift import traffic
from pipelines.watch import page
first_policy(ANY_SCOPE)
drafter = embedded.DRAFTER
assert drafter.is_relative_to(home), drafter
assert (drafter / "model.safetensors").stat().st_size > 1e6
sql = Path(telemetry.__file__).with_name("sql")
assert runs.CODE.is_file() and page.TEMPLATE.is_file() and any(sql.glob("*.sql"))
assert any(traffic.SHIPPED.glob("*.toml"))
found = distribution({name!r})
assert found.version == {version!r} and found.locate_file("").resolve() == home, found
(plugin,) = found.entry_points.select(group="vllm.general_plugins")
assert plugin.load() is not None
"""


def run(*command: str | Path, **where: Path | dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **where)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Source distribution and wheel of a copy of the tree, built with the packages of here."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("made")
    for room in (*ROOMS, "tests", "docs", "deploy"):
        shutil.copytree(ROOT / room, tree / room, ignore=LEFT_BEHIND)
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    (tree / "reports").mkdir()
    (tree / "reports" / "summary.json").write_text("{}")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree)
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return source, wheel


def tracked() -> set[str]:
    """What the packages hold, without what running them leaves there."""
    files = run("git", "ls-files", "-co", "--exclude-standard", *ROOMS, cwd=ROOT).splitlines()
    assert "decoder/policy/first.safetensors" in files
    return {file for file in files if (ROOT / file).exists()}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (each for each in opened.namelist() if each.endswith(".dist-info/METADATA"))
        return message_from_bytes(opened.read(name))


def test_a_wheel_holds_the_packages_and_nothing_else(made: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(made[1]) as opened:
        held = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert held == tracked()


def test_a_source_distribution_holds_what_the_wheel_is_made_of(made: tuple[Path, Path]) -> None:
    with tarfile.open(made[0]) as opened:
        files = {m.name.partition("/")[2] for m in opened.getmembers() if m.isfile()}
    held = {
        name for name in files if not re.match(r"hybrid_\w+\.egg-info/|PKG-INFO|setup.cfg", name)
    }
    assert held == tracked() | set(FILES)


def test_a_wheel_says_what_pyproject_says(made: tuple[Path, Path]) -> None:
    told = metadata(made[1])
    assert told["Version"] == PROJECT["version"]
    assert PROJECT["version"] in made[0].name and PROJECT["version"] in made[1].name
    assert set(told.get_all("Provides-Extra", [])) == PROJECT["optional-dependencies"].keys()
    plain = {
        Requirement(each) for each in told.get_all("Requires-Dist", []) if "extra ==" not in each
    }
    assert plain == set(map(Requirement, PROJECT["dependencies"]))


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [each for each in headings if each != "Unreleased"]
    assert re.fullmatch(re.escape(PROJECT["version"]) + r" - \d{4}-\d\d-\d\d", versions[0])


def test_what_is_installed_needs_no_checkout(made: tuple[Path, Path], tmp_path: Path) -> None:
    home = tmp_path / "installed"
    options = ["--no-deps", "--no-index", "--no-compile", "--target"]
    run(sys.executable, "-m", "pip", "install", *options, home, made[1])
    # what numba compiles it keeps beside the sources, and these are new
    alone = os.environ | {"PYTHONPATH": str(home), "NUMBA_DISABLE_JIT": "1"}
    program = ALONE.format(home=str(home), name=PROJECT["name"], version=PROJECT["version"])
    run(sys.executable, "-c", program, cwd=tmp_path, env=alone)
    assert "serve" in run(sys.executable, home / "bin" / "hvd", "--help", cwd=tmp_path, env=alone)

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

from tests.packaging.declared import PROJECT, ROOT, asked, taken
from tests.packaging.test_dependencies import ALONE as AMONG

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
from learner.release.registry import runs
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


COMMANDS = """
import os, sys, traceback
from pipelines.cli import main
for words in {commands!r}:
    sys.argv, said = ["hvd", *words], None
    print(f"\\n$ {{' '.join(words)}}", flush=True)
    try:
        main()
    except SystemExit as ended:
        said = ended.code
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    sys.stdout.flush(), sys.stderr.flush()
    print(f"\\n= {{said}}", flush=True)
"""
GROUPS = ("", "bench", "policy", "telemetry")
SINGLE = ("serve", "learn", "up", "demo", "doctor", "model", "bootstrap", "chaos", "drift",
          "replay", "train-drafter")  # fmt: skip
HELP = [[*name.split(), "--help"] for name in (*GROUPS, *SINGLE)]
ANSWERS = {
    "model": "XDG_CACHE_HOME",
    "learn": "HVD_LEARNER_STATE_DIR",
    "policy list": "HVD_LEARNER_MLFLOW_TRACKING_URI",
    "telemetry export out": "out cannot be written",
    "serve --model /nonexistent": "give a checkpoint directory",
    "serve": "XDG_CACHE_HOME",
}
"""What a command of somebody who may write nothing and has nothing started is to name."""
PLUGIN = """
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins", name="hybrid_verified_decoding")
print("registered", plugin.load()())
"""
AS_ROOT = """
for folder in "$HOME" "$PWD"; do
  mount --bind "$folder" "$folder" && mount -o remount,bind,ro "$folder" || exit 77
done
cd "$PWD"; exec "$@"
"""
USERS: dict[str, tuple[list[str], str | None]] = {
    "root with a home that is read only": (
        ["--map-root-user", "--mount", "sh", "-c", AS_ROOT, "sh"],
        "home",
    ),
    "a user that no file knows": (["--map-user=10001", "--map-group=10001"], None),
    "a user whose home is closed": (["--map-user=10001", "--map-group=10001"], "closed"),
}
"""How ``unshare`` starts a process, and its home."""


@pytest.fixture(scope="module")
def installed(made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of an environment that has our wheel, and all else from this one's folder."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    folder = run(python, "-c", "import site; print(site.getsitepackages()[0])").strip()
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (Path(folder) / "shared.pth").write_text("\n".join(shared))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--ignore-installed"]
    run(*pip, "--no-deps", "--no-index", "--no-compile", made[1])
    return python


def as_user(user: str, folder: Path, *command: str | Path, **environment: str) -> str:
    """What a command says in a folder that it may not write; ``user`` is one of :data:`USERS`."""
    options, home = USERS[user]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("HVD_")}
    for name in ("HOME", "XDG_CACHE_HOME", "PYTHONPATH"):
        mine.pop(name, None)
    # what numba compiles it keeps beside the sources, and these are new
    mine |= {"NUMBA_DISABLE_JIT": "1", **environment}
    for name, mode in (("here", 0o555), ("home", 0o555), ("closed", 0)):
        (folder / name).mkdir(mode=mode)
    if home:
        mine["HOME"] = str(folder / home)
    done = subprocess.run(
        ["unshare", "--user", *options, *command], cwd=folder / "here", env=mine,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77 or re.search(
        "^unshare: (?!failed to exec)", done.stderr, re.MULTILINE
    ):
        pytest.skip("this machine lets nobody be another user")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def answers(said: str) -> dict[str, tuple[str, str]]:
    """By command: what it said, and its exit status."""
    found = re.findall(r"^\$ (.*?)\n(.*?)\n= (\w+)$", said, re.MULTILINE | re.DOTALL)
    return {command: (text.strip(), status) for command, text, status in found}


def program(*commands: list[str]) -> str:
    """Runs commands, each with what it says on one stream, in one process."""
    return "import os; os.dup2(1, 2)\n" + COMMANDS.format(commands=list(commands))


@pytest.mark.parametrize("user", USERS)
def test_who_has_a_wheel_and_may_write_nothing_is_told_what_to_set(
    installed: Path, tmp_path: Path, user: str
) -> None:
    commands = [*HELP, ["--version"], ["doctor"], *(command.split() for command in ANSWERS)]
    said = answers(as_user(user, tmp_path, installed, "-c", program(*commands)))
    assert said.keys() == {" ".join(command) for command in commands}
    for command, (text, status) in said.items():
        assert "Traceback" not in text, f"{command}: {text}"
        if command in ANSWERS:
            assert status == "2" and ANSWERS[command] in text, f"{command}: {text}"
            assert text.count("\n") == 0, f"{command}: {text}"
        else:
            assert status == "0", f"{command}: {text}"
    doctor, _ = said["doctor"]
    assert "XDG_CACHE_HOME" in doctor and "tenants: requests of one API key" in doctor


def test_a_wheel_without_any_extra_answers_in_one_sentence(installed: Path, tmp_path: Path) -> None:
    commands = [["--help"], ["--version"], ["doctor"], ["serve", "--help"], ["policy", "--help"],
                ["telemetry", "--help"], ["bench", "--help"], ["drift", "--traces", "none"],
                *([each] for each in SINGLE if each != "drift"),
                ["policy", "list"], ["telemetry", "export", "out"],
                ["bench", "decide"]]  # fmt: skip
    among = [PROJECT["name"], "pip", *sorted(taken(asked()))]
    user = "a user that no file knows"
    said = answers(as_user(user, tmp_path, installed, "-c", AMONG, program(*commands), *among))
    assert said.keys() == {" ".join(command) for command in commands}
    for command, (text, status) in said.items():
        assert "Traceback" not in text, f"{command}: {text}"
        if command == "doctor":
            assert status == "1" and "tenants: requests of one API key" in text, text
        elif command.endswith(("--help", "--version")):
            assert status == "0", f"{command}: {text}"
        else:
            assert status == "2" and text.count("\n") == 0, f"{command}: {text}"


def test_vllm_finds_the_plugin_of_a_wheel(installed: Path, tmp_path: Path) -> None:
    user = "a user whose home is closed"
    assert "registered None" in as_user(user, tmp_path, installed, "-c", PLUGIN)


@pytest.mark.long
@pytest.mark.parametrize("user", USERS)
def test_the_plugin_of_a_wheel_is_switched_on_without_a_place_to_write(
    installed: Path, tmp_path: Path, user: str
) -> None:
    said = as_user(user, tmp_path, installed, "-c", PLUGIN, HVD_WORKER_ENABLED="1")
    assert "registered None" in said and "Traceback" not in said


@pytest.mark.long
def test_make_dist_makes_the_same_release(made: tuple[Path, Path], tmp_path: Path) -> None:
    """As it stands, with packages from the network."""
    tree, venv = tmp_path / "tree", tmp_path / "venv"
    with tarfile.open(made[0]) as opened:
        opened.extractall(tmp_path, filter="data")
    (tmp_path / made[0].name.removesuffix(".tar.gz")).rename(tree)
    shutil.copy(ROOT / "Makefile", tree)
    shutil.copytree(ROOT / "requirements", tree / "requirements")
    done = subprocess.run(
        ["make", "dist", f"VENV={venv}", f"PYTHON={sys.executable}"], cwd=tree,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if re.search("No matching distribution|Could not fetch|connection", done.stderr + done.stdout):
        pytest.skip("this machine reaches no packages")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in (tree / "dist").iterdir()} == {file.name for file in made}
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(made[1]) as mine, zipfile.ZipFile(wheel) as theirs:
        assert set(mine.namelist()) == set(theirs.namelist())

"""Pages resolve, name commands that there are, run or say what they need, and are of a length."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from decoder.contracts.bundle import FIRST
from decoder.policy.first import first_policy
from decoder.policy.probes import to_bytes
from learner.release.registry import Registry
from pipelines import cli
from pipelines.policy import command
from tests.docs.pages import DATA, DOCS, PAGES, ROOT, Block, anchors, blocks, data, links, prose
from tests.docs.reference import MADE
from tests.packaging.declared import PROJECT

REFERENCES = DOCS / "reference"
WRITTEN = [page for page in PAGES if REFERENCES not in page.parents]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in WRITTEN
    for number, block in enumerate(blocks(TEXTS[page]))
    if block.language in ("sh", "python")
]
TUTORIAL = DOCS / "mlflow.md"
SCOPE = "54888a18f3762037"


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_and_anchor_is_there(page: Path) -> None:
    for link in links(TEXTS[page]):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", MADE, ids=named)
def test_a_reference_is_what_the_code_says(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == MADE[page](), "python -m tests.docs.reference"


# --- commands


@functools.cache
def whole() -> Any:
    return typer.main.get_command(cli.app)


def options(path: list[str]) -> tuple[set[str], int]:
    """The options of the command that ``path`` begins with, and how many words name it.

    Raises:
        KeyError: there is no such command.
    """
    command, taken = whole(), 0
    while hasattr(command, "commands") and taken < len(path) and path[taken][0] != "-":
        command = command.commands[path[taken]]
        taken += 1
    if command.name == "gpu":  # argparse's
        from pipelines.lab.bench.gpu import OPTIONS

        return {"--make-sessions", *(f"--{name}" for name in OPTIONS)}, taken
    return {name for each in command.params for name in each.opts} | {"--help"}, taken


def typed(code: str) -> Iterator[list[str]]:
    """The words behind each ``hvd`` of a piece of shell, up to what ends a command."""
    for line in code.replace("\\\n", " ").splitlines():
        for found in re.finditer(r"(?:^|[/;&|] ?|=\S+ )hvd ((?:[^|;&<>#`']|'[^']*')+)", line):
            yield shlex.split(found.group(1))


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_every_command_and_option_is_there(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names what is gone
    text = TEXTS[page]
    code = [block.code for block in blocks(text) if block.language in ("sh", "")]
    inline = [f"hvd {found}" for found in re.findall(r"`hvd ([^`]+)`", prose(text))]
    for words in (each for piece in [*code, *inline] for each in typed(piece)):
        if words[:1] == ["COMMAND"]:
            continue
        known, taken = options(words)
        end = words.index("--") if "--" in words else len(words)
        for word in words[taken:end]:
            if word.startswith("--"):
                assert word.partition("=")[0] in known, " ".join(words)


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_a_wheel_is_named_as_it_is_built(page: Path) -> None:
    for version in re.findall(r"hybrid_verified_decoding-([\d.]+)-py3", TEXTS[page]):
        assert version == PROJECT["version"]


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_every_target_of_make_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(block.code for block in blocks(TEXTS[page]) if block.language == "sh")
    named = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", code + prose(TEXTS[page]), re.MULTILINE)
    assert {one or other for one, other in named} <= targets


# --- blocks


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_run_or_says_what_it_needs(block: Block) -> None:
    if block.language == "python":
        ast.parse(block.code)
    kind, _, what = block.mark.partition(": ")
    if not kind:
        lines = [line for line in block.code.splitlines() if line and not line.startswith("#")]
        assert all(line.startswith("make ") for line in lines), block.code
    elif kind == "run":
        assert what in ("alone", "registry") or (ROOT / what).is_dir(), what
    else:
        assert kind == "needs" and what


@pytest.mark.parametrize("block", [each for each in BLOCKS if "run: " in each.values[0].mark])  # type: ignore[union-attr]
def test_a_block_that_needs_nothing_runs(block: Block) -> None:
    where = block.mark.removeprefix("run: ")
    if where == "registry":
        pytest.skip("with the whole tutorial, below")
    assert block.language == "python"
    with chdir(ROOT if where == "alone" else ROOT / where):
        exec(block.code, {})


def dated(text: str) -> str:
    """Without dates, and without how wide a table is drawn."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "DATE", text)
    return " ".join(re.sub(r"[\s─━═┏┓┗┛┡┩└┘┳┻╇┴│┃]+", " ", text).split())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_tutorial_of_mlflow_says_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tags = {"target": "smollm2-135m-instruct", "drafter": "smollm2-135m-eagle3"}
    first = replace(first_policy(SCOPE), role=FIRST)
    registry = Registry(uri)
    registry.register(replace(first, role="champion"), tags={**tags, "origin": "first"})
    registry.move(SCOPE, "champion", 1, "learner", "the first of its scope")
    (tmp_path / "mine.safetensors").write_bytes(to_bytes(replace(first, threshold=2.5)))
    monkeypatch.chdir(tmp_path)
    for console in (command.out, command.err):  # COLUMNS was read at import
        monkeypatch.setattr(console, "_width", 110)
    found = list(blocks(TUTORIAL.read_text(encoding="utf-8")))
    ran = 0
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.mark != "run: registry":
            continue
        if block.language == "python":
            exec(block.code, {})
            assert capsys.readouterr().out
            ran += 1
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[0] == "export":
                name, _, value = words[1].partition("=")
                monkeypatch.setenv(name, uri if name.endswith("URI") else value)
                continue
            monkeypatch.setattr("sys.argv", words)
            with pytest.raises(SystemExit):
                cli.main()
            ran += 1
        said = dated("".join(capsys.readouterr()))
        if after is not None and not after.language and said:
            shown = dated(after.code)
            assert sorted(said.split()) == sorted(shown.split())
    assert ran > 8


# --- figures and lengths


def test_every_figure_of_performance_is_in_its_data() -> None:
    known = DATA.read_text(encoding="utf-8")
    page = TEXTS[DOCS / "performance.md"]
    readme = TEXTS[ROOT / "README.md"].partition("## How fast")[2].partition("\n## ")[0]
    versions = {"0.32", "0.33", "2.13", "2.11"}
    for text in (page, readme):
        plain = re.sub(r"\]\([^)]*\)", "", prose(text))
        for figure in set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.]*\d)", plain)) - versions:
            assert figure in known, figure


def test_every_table_says_how_it_was_measured() -> None:
    for name, table in data().items():
        if name != "facts":
            assert table["command"] and table["machine"], name
            assert re.fullmatch(r"2026-\d\d-\d\d", table["date"]), name
        assert all(len(row) == len(table["columns"]) for row in table["rows"]), name


def words(pages: list[Path], tables: bool = True) -> int:
    """Words of ``pages``; what parts the cells of a table is none."""
    lines = (line for page in pages for line in TEXTS[page].splitlines())
    kept = (line for line in lines if tables or not line.startswith("|"))
    return sum(len(re.sub(r"\|(-+\|)*", " ", line).split()) for line in kept)


def test_the_pages_can_be_read() -> None:
    decisions = [page for page in WRITTEN if page.parent.name == "decisions"]
    assert words([ROOT / "README.md"]) <= 700
    assert words([page for page in WRITTEN if DOCS in page.parents]) <= 25_000
    for page in decisions:
        assert page.name == "README.md" or words([page], tables=False) <= 140, page
        assert page.name in TEXTS[page.parent / "README.md"] or page.name == "README.md"

"""The notebooks run from their first cell to their last, without Jupyter."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path

import pytest

from tests.docs.pages import DOCS

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: str(path.stem))
def test_every_cell_runs(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACES", "TOKENIZER", "EXPORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    space: dict[str, object] = {}
    with chdir(notebook.parent):
        for source in sources:
            exec(compile(source, notebook.name, "exec"), space)
    assert len(sources) > 3 and "figure" in space


def test_there_are_two() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"analyst", "researcher"}

"""An export asked with SQL: the questions are files, and an analyst can run them as they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import TraceError
from pipelines.telemetry.export import NOTE

FOLDER: Final = Path(__file__).with_name("sql")
VIEWS: Final = ("cycles", "costs")
QUESTIONS: Final = ("pays", "course", "drift", "calibration", "regret", "batch")
_SHED: Final = "SELECT min(share) AS least, count(*) - count(share) AS without FROM told"


@dataclass(frozen=True)
class Answer:
    """Rows under the names of their columns."""

    columns: list[str]
    rows: list[tuple[Any, ...]]

    def column(self, name: str) -> list[Any]:
        """Values of one column."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]

    def only(self, **values: Any) -> Answer:
        """The rows whose columns have these values."""
        wanted = {self.columns.index(name): value for name, value in values.items()}
        kept = [row for row in self.rows if all(row[i] == v for i, v in wanted.items())]
        return Answer(self.columns, kept)


def text_of(name: str) -> str:
    """The SQL of a view or a question."""
    return (FOLDER / f"{name}.sql").read_text(encoding="utf-8")


def opening(*files: str) -> str:
    """SQL that makes ``files`` of an export a view, for whoever runs the questions elsewhere."""
    named = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
    return text_of("drafts").replace("$files", named)


def answers(folder: Path) -> dict[str, Answer]:
    """Every question's answer from the export in ``folder``; ``shed`` has the least ``share``, and
    how many rows are without one.

    Raises:
        TraceError: there is no export, nothing in it, or no DuckDB here.
    """
    try:
        import duckdb
    except ImportError as error:
        raise TraceError(
            "reports are made with DuckDB: pip install 'hybrid-verified-decoding[analysis]'."
        ) from error
    files = _files(folder)
    with duckdb.connect() as base:
        try:
            base.execute(opening(*files))
            for name in VIEWS:
                base.execute(text_of(name))
            found = {name: _answer(base.execute(text_of(name))) for name in QUESTIONS}
            found["shed"] = _answer(base.execute(_SHED))
        except duckdb.Error as error:
            raise TraceError(f"the export in {folder} cannot be asked: {error}") from error
    return found


def _files(folder: Path) -> list[str]:
    try:
        names = json.loads((folder / NOTE).read_text(encoding="utf-8"))["files"]
        files = [str(folder / name) for name in names]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{folder} holds no export: make one with hvd telemetry export {folder}."
        ) from error
    if not files:
        raise TraceError(f"the export in {folder} is empty: there is nothing to ask.")
    return files


def _answer(cursor: Any) -> Answer:
    return Answer([column[0] for column in cursor.description], cursor.fetchall())

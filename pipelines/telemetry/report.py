"""The page over an export: what analysts ask first, each figure with the SQL that found it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipelines.telemetry.asked import QUESTIONS, VIEWS, Answer, answers, opening, text_of
from pipelines.watch.charts import COLOURS, Record, chart, clock, zone
from pipelines.watch.page import page

MOST: Final = 8
"""Lines of a chart over workloads; the rest is in the tables."""
TITLES: Final = {
    "pays": "Where does cache drafting pay?",
    "drift": "Which workloads drift? The last third of each against the first",
    "regret": "Regret by arm, against the best in hindsight (defined in its SQL)",
    "batch": "Cost by batch",
}
FORMS: Final = {"was_best": "{:.0%}", "share_of_time": "{:.1%}", "six_or_more": "{:.0%}"}


def report(folder: Path) -> str:
    """The page, in HTML, over the export in ``folder``.

    Raises:
        TraceError: there is no export, or nothing in it.
    """
    return page(record(folder))


def record(folder: Path) -> Record:
    """What the page shows, ready for JSON."""
    found = answers(folder)
    queries = [
        {
            "title": f"SQL: the export in {folder} as a view",
            "text": opening(str(folder / "*.parquet")),
        }
    ]
    queries += [{"title": f"SQL: {name}", "text": text_of(name)} for name in (*VIEWS, *QUESTIONS)]
    return {
        "title": f"Draft events of {folder.name}",
        "sentences": _sentences(found),
        "made": f"{clock(time.time())} {zone()}",
        "tiles": _tiles(found),
        "charts": [
            _pays(found["pays"]),
            _course(found["course"], "accepted", "Accepted length by workload", "tokens"),
            _course(found["course"], "error", "Error of what was expected, by workload", "tokens"),
            _calibration(found["calibration"]),
            _batch(found["batch"]),
        ],
        "tables": [_table(title, found[name]) for name, title in TITLES.items()],
        "queries": queries,
    }


def _sentences(found: Mapping[str, Answer]) -> list[str]:
    ((least, without),) = found["shed"].rows
    said = []
    if least is not None and least < 1.0:
        said.append(
            "Workers shed load: of some requests only one in "
            f"{1 / max(least, 1e-6):.1f} was told of, and no figure here weighs its rows by "
            "1 / share."
        )
    if without:
        said.append(
            f"{without} rows are of an older export without the column share: each is taken to "
            "have share 1, that none was shed."
        )
    return said


def _tiles(found: Mapping[str, Answer]) -> list[Record]:
    whole = found["regret"].only(chosen="all")
    tiles = []
    if any(whole.column("cycles")):
        share, cycles = whole.column("share_of_time")[0], whole.column("cycles")[0]
        said = "of the steps' time, lost against the best in hindsight"
        tiles.append(_tile("regret", said, share, "{:.1%}", f"{cycles} cycles"))
    kinds = found["pays"].only(what="workload")
    drafts = sum(kinds.column("drafts"))
    if drafts:
        pairs = zip(kinds.column("accepted"), kinds.column("drafts"), strict=True)
        mean = sum(accepted * count for accepted, count in pairs) / drafts
        tiles.append(
            _tile("accepted", "tokens of a cache draft", mean, "{:.2f}", f"{drafts} drafts")
        )
    for arm in ("cache", "model"):
        tenths = found["calibration"].only(arm=arm)
        counts = tenths.column("drafts")
        if counts:
            columns = (tenths.column(name) for name in ("expected", "came"))
            apart = [abs(said - came) for said, came in zip(*columns, strict=True)]
            mean = sum(a * n for a, n in zip(apart, counts, strict=True)) / sum(counts)
            said = f"tokens from expected to come, {arm}"
            tiles.append(_tile(f"calibration_{arm}", said, mean, "{:.2f}", "mean over tenths"))
    return tiles


def _tile(name: str, label: str, value: float, form: str, detail: str) -> Record:
    return {"id": name, "label": label, "value": form.format(value), "detail": detail}


def _pays(answer: Answer) -> Record:
    matched = answer.only(what="match, up to")
    common: Record = {"type": "scatter", "mode": "lines+markers", "x": matched.column("value")}
    data = [
        {
            **common,
            "y": matched.column(f"{arm}_pays"),
            "name": f"{arm} draft",
            "line": {"color": COLOURS[arm]},
        }
        for arm in ("cache", "model")
    ]
    note = "Tokens in the time of a plain cycle; above 1 is faster than no draft."
    x, title = "tokens of context matched, up to", "Where drafts pay, by length of the match"
    axis = {"type": "category", "title": {"text": x}}
    return chart("pays", title, note, data, x, "tokens", xaxis=axis)


def _course(answer: Answer, column: str, title: str, y: str) -> Record:
    counts: dict[str, int] = {}
    for kind, drafts in zip(answer.column("workload"), answer.column("drafts"), strict=True):
        counts[kind] = counts.get(kind, 0) + drafts
    data = []
    for kind in sorted(counts, key=lambda name: -counts[name])[:MOST]:
        rows = answer.only(workload=kind)
        times = [clock(at) for at in rows.column("moment")]
        data.append(
            {"type": "scatter", "mode": "lines", "name": kind, "x": times, "y": rows.column(column)}
        )
    note = "Cache drafts whose label is known, while the policy in force decided."
    return chart(f"course_{column}", title, note, data, f"time of day ({zone()})", y)


def _calibration(answer: Answer) -> Record:
    data: list[Record] = []
    most = max([*answer.column("expected"), *answer.column("came")], default=1.0)
    for arm in ("cache", "model"):
        rows = answer.only(arm=arm)
        data.append(
            {
                **{"type": "scatter", "mode": "lines+markers", "name": f"{arm} draft"},
                **{"x": rows.column("expected"), "y": rows.column("came")},
                "line": {"color": COLOURS[arm]},
            }
        )
    even = {
        "type": "scatter",
        "mode": "lines",
        "x": [0, most],
        "y": [0, most],
        "name": "as expected",
    }
    data.append({**even, "line": {"color": COLOURS["none"], "dash": "dot"}})
    note = "By tenths of what was expected."
    return chart("calibration", "Expected and accepted", note, data, "expected, tokens", "accepted")


def _batch(answer: Answer) -> Record:
    data = []
    for arm in ("none", "cache", "model"):
        rows = answer.only(arm=arm)
        columns = rows.column("tokens"), rows.column("step_ms")
        points = sorted(zip(*columns, strict=True))
        common = {
            "type": "scatter",
            "mode": "markers",
            "name": arm,
            "marker": {"color": COLOURS[arm]},
        }
        data.append({**common, "x": [p[0] for p in points], "y": [p[1] for p in points]})
    note = "Median step of each size of batch, by what a request of it verified."
    x = "tokens of the step, up to"
    axis = {"type": "log", "title": {"text": x}}
    return chart("batch", "Cost of a step", note, data, x, "ms", xaxis=axis)


def _table(title: str, answer: Answer) -> Record:
    head = [name.replace("_", " ") for name in answer.columns]
    rows = [
        [_shown(name, value) for name, value in zip(answer.columns, row, strict=True)]
        for row in answer.rows
    ]
    return {"title": title, "head": head, "rows": rows}


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return next((form for end, form in FORMS.items() if name.endswith(end)), "{:.2f}").format(
            value
        )
    return str(value)

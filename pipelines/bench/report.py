"""``report.html``: one self-contained page with the paper's tables and figures, measured here."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pipelines.bench import figures, paper
from pipelines.bench.metrics import grouped
from pipelines.bench.results import Results
from pipelines.bench.tables import Record, number, percent, spread

FOCUS: Final = ("hybrid", "hybrid-tree", "frequency", "arctic", "suffix")
"""Whose choices the figures on cache drafts show: the first of these that was run."""


def write(results: Results, summary: dict[str, Any], folder: Path) -> Path:
    """Write ``results.json`` and ``report.html`` into ``folder``; the page's path."""
    text = json.dumps(summary, indent=1)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    path = folder / "report.html"
    path.write_text(page(results, summary), encoding="utf-8")
    return path


def focus(methods: Sequence[str]) -> str:
    """The method whose cache drafts are looked at."""
    return next((m for f in FOCUS for m in methods if m.partition(":")[0] == f), methods[-1])


def page(results: Results, summary: dict[str, Any]) -> str:
    """The report; figures are of the first template only, but for the one that compares them."""
    template = summary["settings"]["templates"][0]
    records, families, overall = (
        [r for r in summary[part] if r["template"] == template]
        for part in ("records", "families", "overall")
    )
    methods = summary["settings"]["methods"]
    chief = focus(methods)
    sections = [
        _section("All prompts", _overall(overall), _picture(figures.breakdown(overall)), _SPEED),
        _section(
            "Throughput over greedy's, by dataset (95% intervals over prompts)",
            _by_method(records, methods, "dataset", lambda r: spread(r, "speedup_vs_greedy")),
            _picture(figures.speedups(records, methods)),
        ),
        _table_1(records, chief),
        _paper_breakdown(overall),
        _predictor(overall),
        _section(
            f"Payoff of the cache drafts that {chief} verified (the paper's Figure 3)",
            _picture(figures.payoff(_payoffs(results, chief, template))),
        ),
        _structure(results, families, chief, template),
        _section(
            "Share of the oracle's throughput",
            _by_method(families, methods, "family", lambda r: percent(r["fraction_of_oracle"])),
            "<p>The oracle chooses in hindsight, cycle by cycle, what has more tokens accepted. It "
            "pays for neither choice, and it knows lengths, not times.</p>",
        )
        if "oracle" in methods
        else "",
        _loops(overall),
        _templates(summary),
        _problems(summary),
    ]
    return _PAGE.format(
        verdict=html.escape(verdict(summary)),
        sections="\n".join(s for s in sections if s),
        facts=_table(["setting", "value"], _facts(summary)),
    )


def verdict(summary: dict[str, Any]) -> str:
    """What was measured, and whether every output was greedy's, in a sentence or two."""
    methods, wrong = summary["settings"]["methods"], len(summary["differing"])
    end = " The run was interrupted." if summary["interrupted"] else ""
    if "greedy" not in methods:
        return f"{summary['prompts']} prompts; exactness was not checked (no greedy run).{end}"
    exact = (
        "every output equals greedy's, token for token" if not wrong else f"{wrong} outputs differ"
    )
    return f"{summary['prompts']} prompts, {len(methods)} methods: {exact}.{end}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line(head, "th") + "\n".join(line(r, "td") for r in rows) + "</table>"


def _picture(png: str) -> str:
    return f'<img alt="" src="data:image/png;base64,{png}">'


def _section(title: str, *parts: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n" + "\n".join(parts)


def _overall(overall: Sequence[Record]) -> str:
    head = ["method", "tok/s", "median, quartiles", "x greedy", "cycles/1K", "ms/cycle",
            "accepted", "cache", "model", "loops", "exact"]  # fmt: skip
    rows = []
    for r in overall:
        q = r["tok_per_s_quartiles"]
        rows.append(
            [
                r["method"],
                number(r["tok_per_s"], 1),
                "-" if q is None else f"{q[1]:.1f} ({q[0]:.1f}-{q[2]:.1f})",
                spread(r, "speedup_vs_greedy"),
                number(r["cycles_per_1k"], 0),
                number(r["ms_per_cycle"], 1),
                number(r["mean_accepted"]),
                percent(r["cache_share"]),
                percent(r["model_share"]),
                percent(r["loop_share"]),
                {True: "yes", False: "no", None: "-"}[r["exact"]],
            ]
        )
    return _table(head, rows)


def _by_method(records: Sequence[Record], methods: Sequence[str], name: str, cell: Any) -> str:
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        found.setdefault(record[name], {})[record["method"]] = record
    others = [m for m in methods if m != "greedy"]
    rows = [
        [
            figures.family_name(group) if name == "family" else group,
            str(next(iter(by.values()))["prompts"]),
            *(cell(by[m]) if m in by else "-" for m in others),
        ]
        for group, by in found.items()
    ]
    return _table([name, "prompts", *others], rows)


def table_1(records: Sequence[Record], chief: str) -> list[list[str]]:
    """Rows of the paper's Table 1: ``chief`` over each baseline, here and in the paper."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        found.setdefault(record["dataset"], {})[record["method"]] = record
    rows = []
    for dataset, by in found.items():
        standin = next(iter(by.values()))["standin_for"]
        known = paper.counterpart(dataset, standin)
        name = dataset if standin is None else f"{dataset} (for {standin})"
        here = [_ratio(by.get(chief), by.get(b)) for b in paper.BASELINES]
        there = ["-"] * len(paper.BASELINES)
        if known is not None:
            models = paper.TABLE_1[known][1]
            there = [" / ".join(f"{m[i]:.2f}" for m in models) for i in range(len(here))]
        rows.append([name, *here, *there])
    return rows


def _ratio(mine: Record | None, other: Record | None) -> str:
    if mine is None or other is None or not mine["tok_per_s"] or not other["tok_per_s"]:
        return "-"
    return f"{mine['tok_per_s'] / other['tok_per_s']:.2f}"


def _table_1(records: Sequence[Record], chief: str) -> str:
    head = ["dataset", *(f"vs {b}" for b in paper.BASELINES)]
    head += [f"paper, vs {b}" for b in paper.BASELINES]
    return _section(
        f"{chief} over the baselines (the paper's Table 1)",
        _table(head, table_1(records, chief)),
        f"<p>The paper's columns: {' / '.join(paper.MODELS)}, EAGLE3 as a tree, H100.</p>",
    )


def _paper_breakdown(overall: Sequence[Record]) -> str:
    rows = []
    for r in overall:
        known = paper.TABLES_11_TO_13.get(r["method"].partition(":")[0])
        here = [
            number(r["tok_per_s"], 1),
            number(r["cycles_per_1k"], 0),
            number(r["mean_accepted"]),
            percent(r["cache_share"]),
        ]
        there = ["-"] * 4
        if known is not None:
            there = [
                " / ".join("-" if m[i] is None else f"{m[i]:g}" for m in known) for i in range(4)
            ]
        rows.append([r["method"], *(x for pair in zip(here, there, strict=True) for x in pair)])
    names = ("tok/s", "cycles/1K", "accepted", "cache %")
    head = ["method", *(x for n in names for x in (n, f"paper: {n}"))]
    note = f"<p>The paper's columns: {' / '.join(paper.MODELS)}.</p>"
    return _section("Beside the paper's Tables 11-13", _table(head, rows), note)


def _predictor(overall: Sequence[Record]) -> str:
    fields = ("high_payoff_share", "selected_share", "precision_at_6", "recall_at_6")
    rows = [
        [r["method"], str(r["drafts"]), *(percent(r[f], 1) for f in fields)]
        for r in overall
        if r["drafts"]
    ]
    rows += [
        [f"paper, {model}", "-", *(f"{v:.1f}%" for v in values)]
        for model, values in zip(paper.MODELS, paper.TABLE_2, strict=True)
    ]
    head = ["method", "cache drafts", "high payoff", "predicted 6 or more", "precision", "recall"]
    return _section(
        "High-payoff cache drafts: found and missed (the paper's Table 2)",
        _table(head, rows),
        "<p>Every cache draft that was proposed, chosen or not, with the accepted length that "
        "decoding revealed. States are the cycles of each method, not every token position.</p>",
    )


def _payoffs(results: Results, chief: str, template: str) -> dict[str, list[int]]:
    return figures.chosen_payoffs(grouped(results, lambda f: f.family, template), chief)


def _structure(results: Results, families: Sequence[Record], chief: str, template: str) -> str:
    facts = [results.prompts[k] for k in results.whole() if k[1] == template]
    shares = {r["family"]: r["cache_share"] for r in families if r["method"] == chief}
    return _section(
        f"Prompt structure and the cache drafts that {chief} verified (the paper's Figure 2)",
        _picture(figures.structure(facts, shares)),
        "<p>Counts per 1000 characters, recurring text as a share; the definitions are this "
        "project's, as the paper gives none.</p>",
    )


def _loops(overall: Sequence[Record]) -> str:
    rows = [
        [
            r["method"],
            label,
            str(part["prompts"]),
            number(part["tok_per_s"], 1),
            spread(part, "speedup_vs_greedy"),
            number(part["mean_accepted"]),
            percent(part["cache_share"]),
            percent(part["fraction_of_oracle"]),
        ]
        for label, kind in (("loop", "looping"), ("no loop", "not_looping"))
        for r in overall
        if (part := r[kind]) is not None
    ]
    head = ["method", "outputs", "prompts", "tok/s", "x greedy", "accepted", "cache", "of oracle"]
    return _section(
        "Outputs that loop, apart",
        _table(head, rows),
        "<p>An output loops when a run of 32 tokens comes twice in it. Loops flatter cache drafts: "
        "a small model repeats itself, and the cache copies the repetition.</p>",
    )


def _templates(summary: dict[str, Any]) -> str:
    if len(summary["settings"]["templates"]) < 2:
        return ""
    rows = [
        [
            r["template"],
            r["method"],
            number(r["mean_accepted"]),
            number(r["cycles_per_1k"], 0),
            number(r["tok_per_s"], 1),
        ]
        for r in summary["overall"]
    ]
    rows += [
        [f"{template} (paper)", method, f"{accepted:.2f}", str(cycles), f"{rate:.1f}"]
        for template, method, accepted, cycles, rate in paper.TABLE_4
    ]
    head = ["chat template", "method", "accepted", "cycles/1K", "tok/s"]
    note = "<p>The paper's rows: Llama3.1-8B on MT-Bench.</p>"
    return _section("Template sensitivity (the paper's Table 4)", _table(head, rows), note)


def _problems(summary: dict[str, Any]) -> str:
    found = [*summary["differing"], *summary["problems"]]
    if not found:
        return ""
    return _section("Left out or wrong", _table(["what"], [[sentence] for sentence in found]))


def _facts(summary: dict[str, Any]) -> list[list[str]]:
    settings = {"began": summary["began"], **summary["settings"]}
    settings["prompts cut in the middle"] = summary["prompts_cut"]

    def said(value: Any) -> str:
        if isinstance(value, dict):
            return "; ".join(f"{k}: {v}" for k, v in value.items()) or "none"
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    return [[name.replace("_", " "), said(value)] for name, value in settings.items()]


_SPEED: Final = (
    "<p>Throughput is decoded tokens over decoding time, prefill and first token left out; "
    "accepted is draft tokens committed a cycle, over all cycles.</p>"
)

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Decoding methods compared</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
td, th {{ border-bottom: 1px solid #ddd; padding: .25rem .7rem; text-align: left }}
img {{ max-width: 100% }}
</style></head><body>
<h1>Decoding methods compared</h1>
<p><b>{verdict}</b></p>
{sections}
<h2>Settings</h2>
{facts}
</body></html>
"""

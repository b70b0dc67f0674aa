"""``report.html``: one self-contained page with the paper's tables and figures, measured here."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pipelines.bench.decode import figures, sections
from pipelines.bench.metrics import grouped
from pipelines.bench.results import Results
from pipelines.bench.tables import percent, spread
from pipelines.reports import write_json

FOCUS: Final = ("hybrid", "hybrid-tree", "frequency", "arctic", "suffix")
"""Whose choices the figures on cache drafts show: the first of these that was run."""


def write(results: Results, summary: dict[str, Any], folder: Path) -> Path:
    """Write ``results.json`` and ``report.html`` into ``folder``; the page's path."""
    write_json(summary, folder / "results.json")
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
    facts = [results.prompts[key] for key in results.whole() if key[1] == template]
    cache_share = {r["family"]: r["cache_share"] for r in families if r["method"] == chief}
    parts = [
        sections.section(
            "All prompts",
            sections.overall(overall),
            sections.picture(figures.breakdown(overall)),
            sections.SPEED,
        ),
        sections.section(
            "Throughput over greedy's, by dataset (95% intervals over prompts)",
            sections.by_method(
                records, methods, "dataset", lambda r: spread(r, "speedup_vs_greedy")
            ),
            sections.picture(figures.speedups(records, methods)),
        ),
        sections.table_1_section(records, chief),
        sections.paper_breakdown(overall),
        sections.predictor(overall),
        sections.calibration(overall, chief),
        sections.section(
            f"Payoff of the cache drafts that {chief} verified (the paper's Figure 3)",
            sections.picture(figures.payoff(_payoffs(results, chief, template))),
        ),
        sections.structure_section(facts, cache_share, chief),
        sections.section(
            "Share of the oracle's throughput",
            sections.by_method(
                families, methods, "family", lambda r: percent(r["fraction_of_oracle"])
            ),
            "<p>The oracle chooses in hindsight, cycle by cycle, what has more tokens accepted. It "
            "knows lengths, not times: where drafting takes longer than it saves, others beat it."
            "</p>",
        )
        if "oracle" in methods
        else "",
        sections.loops(overall),
        sections.templates(summary),
        _problems(summary),
    ]
    return _PAGE.format(
        verdict=html.escape(verdict(summary)),
        sections="\n".join(p for p in parts if p),
        facts=sections.table(["setting", "value"], _facts(summary)),
    )


def verdict(summary: dict[str, Any]) -> str:
    """What was measured, and whether every output was greedy's, in a sentence or two."""
    methods, wrong = summary["settings"]["methods"], len(summary["differing"])
    end = " The run was interrupted." if summary["interrupted"] else ""
    end = " Time was up before every prompt was decoded." if summary["out_of_time"] else end
    if "greedy" not in methods:
        return f"{summary['prompts']} prompts; exactness was not checked (no greedy run).{end}"
    exact = (
        "every output equals greedy's, token for token" if not wrong else f"{wrong} outputs differ"
    )
    return f"{summary['prompts']} prompts, {len(methods)} methods: {exact}.{end}"


def _payoffs(results: Results, chief: str, template: str) -> dict[str, list[int]]:
    return figures.chosen_payoffs(grouped(results, lambda f: f.family, template), chief)


def _problems(summary: dict[str, Any]) -> str:
    found = [*summary["differing"], *summary["problems"]]
    if not found:
        return ""
    return sections.section(
        "Left out or wrong", sections.table(["what"], [[sentence] for sentence in found])
    )


def _facts(summary: dict[str, Any]) -> list[list[str]]:
    settings = {"began": summary["began"], **summary["settings"]}
    settings["prompts cut in the middle"] = summary["prompts_cut"]

    def said(value: Any) -> str:
        if isinstance(value, dict):
            return "; ".join(f"{k}: {v}" for k, v in value.items()) or "none"
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    return [[name.replace("_", " "), said(value)] for name, value in settings.items()]


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

"""The sections of the benchmark's report, each a piece of HTML from records."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pipelines.bench.decode import figures, paper
from pipelines.bench.results import PromptFacts
from pipelines.bench.tables import Record, number, percent, spread


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text cells, escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line(head, "th") + "\n".join(line(r, "td") for r in rows) + "</table>"


def picture(png: str) -> str:
    """A PNG given in base64."""
    return f'<img alt="" src="data:image/png;base64,{png}">'


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it."""
    return f"<h2>{html.escape(title)}</h2>\n" + "\n".join(parts)


def overall(records: Sequence[Record]) -> str:
    """Every method over all prompts."""
    head = ["method", "tok/s", "median, quartiles", "x greedy", "typical", "cycles/1K",
            "ms/cycle", "accepted", "cache", "model", "loops", "exact"]  # fmt: skip
    rows = []
    for r in records:
        q = r["tok_per_s_quartiles"]
        rows.append(
            [
                r["method"],
                number(r["tok_per_s"], 1),
                "-" if q is None else f"{q[1]:.1f} ({q[0]:.1f}-{q[2]:.1f})",
                spread(r, "speedup_vs_greedy"),
                number(r["speedup_vs_greedy_typical"]),
                number(r["cycles_per_1k"], 0),
                number(r["ms_per_cycle"], 1),
                number(r["mean_accepted"]),
                percent(r["cache_share"]),
                percent(r["model_share"]),
                percent(r["loop_share"]),
                {True: "yes", False: "no", None: "-"}[r["exact"]],
            ]
        )
    return table(head, rows)


def by_method(
    records: Sequence[Record], methods: Sequence[str], name: str, cell: Callable[[Record], str]
) -> str:
    """A row for each group of ``records`` (by their column ``name``), a column for each method."""
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
    return table([name, "prompts", *others], rows)


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


def table_1_section(records: Sequence[Record], chief: str) -> str:
    """The paper's Table 1."""
    head = ["dataset", *(f"vs {b}" for b in paper.BASELINES)]
    head += [f"paper, vs {b}" for b in paper.BASELINES]
    return section(
        f"{chief} over the baselines (the paper's Table 1)",
        table(head, table_1(records, chief)),
        f"<p>The paper's columns: {' / '.join(paper.MODELS)}, EAGLE3 as a tree, H100.</p>",
    )


def paper_breakdown(overall: Sequence[Record]) -> str:
    """Throughput, cycles, accepted length and cache share beside the paper's."""
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
    return section("Beside the paper's Tables 11-13", table(head, rows), note)


def predictor(overall: Sequence[Record]) -> str:
    """High-payoff drafts told from others, beside the paper's Table 2."""
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
    return section(
        "High-payoff cache drafts: found and missed (the paper's Table 2)",
        table(head, rows),
        "<p>Every cache draft that was proposed, chosen or not, with the accepted length that "
        "decoding revealed. States are the cycles of each method, not every token position.</p>",
    )


def calibration(overall: Sequence[Record], chief: str) -> str:
    """What ``chief`` foresaw of both arms' drafts, and what came, by tenths."""
    found = next(r["calibration"] for r in overall if r["method"] == chief)
    rows = [
        [f"{arm} draft", what, *(number(part[what]) for part in parts)]
        for arm, parts in found.items()
        if parts
        for what in ("foreseen", "came")
    ]
    if not rows:
        return ""
    width = max(map(len, rows)) - 2
    return section(
        f"Accepted tokens that {chief} foresaw, and that came",
        table(["", "", *map(str, range(1, width + 1))], rows),
        "<p>Means of tenths in the order of what was foreseen: of every cache draft that was "
        "proposed, and of the model drafts that were verified.</p>",
    )


def structure_section(
    facts: Sequence[PromptFacts], cache_share: Mapping[str, float | None], chief: str
) -> str:
    """Prompt-side structure, and the share of cycles that verify cache drafts, by family."""
    return section(
        f"Prompt structure and the cache drafts that {chief} verified (the paper's Figure 2)",
        picture(figures.structure(facts, cache_share)),
        "<p>Counts per 1000 characters, recurring text as a share; the definitions are this "
        "project's, as the paper gives none.</p>",
    )


def loops(overall: Sequence[Record]) -> str:
    """Outputs that loop and those that do not."""
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
    return section(
        "Outputs that loop, apart",
        table(head, rows),
        "<p>An output loops when a run of 32 tokens comes twice in it. Loops flatter cache drafts: "
        "a small model repeats itself, and the cache copies the repetition.</p>",
    )


def templates(summary: dict[str, Any]) -> str:
    """Figures with and without the chat template; empty where only one was run."""
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
    return section("Template sensitivity (the paper's Table 4)", table(head, rows), note)


SPEED: Final = (
    "<p>Throughput is decoded tokens over decoding time, prefill and first token left out; "
    "accepted is draft tokens committed a cycle, over all cycles; typical is the speedup if every "
    "cycle took the median time of its kind, which other work on the machine moves less.</p>"
)

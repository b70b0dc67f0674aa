"""The report renders from a few records: self-contained, escaped, and with the paper beside it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.bench import tables
from pipelines.bench.decode import report, sections
from pipelines.bench.decode.structure import structure
from pipelines.bench.metrics import summary
from pipelines.bench.results import Cycle, Labelled, Outcome, PromptFacts, Results

METHODS = ["greedy", "eagle3", "suffix", "frequency", "hybrid", "oracle"]
SETS = (("mbpp", "code", ""), ("leval", "long_context", "InfiniteBench"), ("odd", "other", ""))


def results(templates: tuple[str, ...] = ("chat",)) -> Results:
    """Two prompts a set; ``hybrid`` takes 0.5 s where greedy takes 1 s."""
    found = Results({"methods": METHODS, "templates": list(templates), "model": "tiny <b>"})
    for template in templates:
        for dataset, family, standin in SETS:
            for number in range(2):
                facts = PromptFacts(
                    dataset, template, f"{dataset}/{number}", family, standin, 9, 2 * number,
                    structure("def f(x): return g(x) # see src/a.py"),
                )  # fmt: skip
                found.prompts[facts.key] = facts
                for place, name in enumerate(METHODS):
                    cycles = (
                        Cycle("cache" if place > 1 else "none", 9, 9, 6 + number, 90.0, 900.0),
                        Cycle("model" if place != 2 else "none", 0, 4, 1, 90.0, 900.0),
                    )
                    micros = {"greedy": 1e6, "hybrid": 5e5}.get(name, 8e5)
                    drafts = (Labelled(7.0, 8, False), Labelled(1.0, 0, False))
                    made = Outcome(
                        dataset, template, facts.prompt, name, tuple(range(11)), cycles, "stop",
                        3e4, micros, drafts if place > 1 else (),
                    )  # fmt: skip
                    found.add(made)
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("report")
    found = results(("chat", "none"))
    path = report.write(found, summary(found), folder)
    figures = json.loads((folder / "results.json").read_text())
    assert len(figures["records"]) == len(METHODS) * len(SETS) * 2
    return path.read_text(encoding="utf-8")


def test_the_page_needs_nothing_but_itself(page: str) -> None:
    sources = re.findall(r'src="([^"]{0,30})', page)
    assert len(sources) == 4
    assert all(s.startswith("data:image/png;base64,") for s in sources)
    assert "http" not in page
    assert "<script" not in page


def test_every_table_and_figure_of_the_paper_has_its_section(page: str) -> None:
    for named in ("Table 1)", "Tables 11-13", "Table 2)", "Figure 2)", "Figure 3)", "Table 4)",
                  "oracle", "Outputs that loop, apart"):  # fmt: skip
        assert named in page, named


def test_names_are_escaped(page: str) -> None:
    assert "tiny &lt;b&gt;" in page
    assert "tiny <b>" not in page


def test_table_1_sets_the_papers_ratios_beside_those_measured(page: str) -> None:
    """hybrid is twice as fast as greedy and 1.6 times as fast as the others here."""
    found = summary(results())
    rows = sections.table_1(found["records"], "hybrid")
    assert rows[0] == [
        "mbpp", "2.00", "1.60", "1.60", "1.60", "4.49 / 2.73 / 3.68", "1.17 / 0.90 / 0.99",
        "4.78 / 2.11 / 4.65", "1.54 / 1.01 / 1.05",
    ]  # fmt: skip
    assert rows[1][0] == "leval (for InfiniteBench)"
    assert rows[1][5] == "5.03 / 5.53 / 2.23"
    assert rows[2][5:] == ["-"] * 4
    assert "4.49 / 2.73 / 3.68" in page


def test_the_verdict_says_whether_outputs_were_greedys(page: str) -> None:
    assert "12 prompts, 6 methods: every output equals greedy&#x27;s, token for token." in page
    found = summary(results())
    assert "2 outputs differ" in report.verdict({**found, "differing": ["a", "b"]})
    assert "interrupted" in report.verdict({**found, "interrupted": True})
    assert "Time was up" in report.verdict({**found, "out_of_time": True})


def test_one_template_has_no_template_table() -> None:
    found = results()
    assert "Table 4)" not in report.page(found, summary(found))


@pytest.mark.parametrize("methods", [["greedy"], ["suffix"], ["greedy", "eagle3"]])
def test_few_methods_and_no_cache_drafts_still_make_a_page(methods: list[str]) -> None:
    found = results()
    found.settings["methods"] = methods
    found.outcomes = {k: {m: v[m] for m in methods} for k, v in found.outcomes.items()}
    made = report.page(found, summary(found))
    assert "All prompts" in made
    assert "Share of the oracle" not in made


def test_the_figures_follow_the_method_that_chooses() -> None:
    assert report.focus(METHODS) == "hybrid"
    assert report.focus(["greedy", "frequency:4", "suffix"]) == "frequency:4"
    assert report.focus(["greedy", "eagle3"]) == "eagle3"


def test_the_terminal_shows_all_methods_within_eighty_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    for table in tables.shown(summary(results())):
        console.print(table)
    text = console.export_text()
    for method in METHODS:
        assert method in text
    assert "…" not in text
    assert "leval" in text

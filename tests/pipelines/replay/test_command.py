"""``hvd replay``: from a file of recordings to figures, in one command."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click import unstyle
from rich.console import Console
from typer.testing import CliRunner

from decoder.contracts.errors import TraceError
from pipelines.cli import app
from pipelines.prompts import read_folder
from pipelines.replay import command
from pipelines.replay.study import Plan
from tests.conftest import random_policy
from tests.pipelines.replay.samples import copying_traces, word_tokenizer
from tests.pipelines.test_cli import hvd
from tests.pipelines.test_prompts import LetterTokenizer

TOKENIZER = word_tokenizer()
SILENT = Console(quiet=True)
RATES = {
    "none", "model", "model_best", "suffix", "match4", "buckets", "frequency", "frequency_tuned",
    "arctic", "hybrid", "oracle",
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two files of twenty recordings; the first also has a line that is broken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for seed, path in enumerate(paths):
        lines = [
            json.dumps({"session": t.session, "prompt": t.prompt, "output": t.output})
            for t in copying_traces(seed, 20, 100)
        ]
        path.write_text("\n".join([*lines, *["{"] * (seed == 0)]), encoding="utf-8")
    return paths


def figures(paths: list[Path], plan: Plan) -> dict:  # type: ignore[type-arg]
    reports, notices = command.run(paths, plan, TOKENIZER, SILENT)
    return command.as_dict(reports, plan, notices)


def test_a_study_measures_each_file_and_all_together(files: list[Path]) -> None:
    found = figures(files, Plan())
    assert [f["name"] for f in found["files"]] == ["one", "two"]
    assert set(found["rates"]) == RATES
    for each in [found, *found["files"]]:
        rates = each["rates"]
        assert all(rates["oracle"] >= rate for rate in rates.values())
        assert each["fraction_of_oracle"]["oracle"] == 1.0
        assert rates["none"] == pytest.approx(1.0)
        assert rates["frequency"] > rates["none"]
    assert found["left_out"] == {"malformed": 1}
    assert "one.jsonl:21" in found["notices"][0]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_same_study_gives_the_same_figures(files: list[Path]) -> None:
    one, two = (figures(files[:1], Plan()) for _ in range(2))
    assert one == two


def test_a_bundle_is_measured_as_it_is(files: list[Path]) -> None:
    never = replace(random_policy(), threshold=float(np.float32(1e9)))
    found = figures(files[:1], Plan(policy=never))
    assert found["rates"]["hybrid"] == pytest.approx(found["rates"]["model"])
    assert found["settings"]["policy"] == "payoff v1"


def test_a_better_drafter_makes_every_hybrid_faster(files: list[Path]) -> None:
    slow, fast = (figures(files[:1], Plan(model_accepts=m))["rates"] for m in (0.5, 3.5))
    for name in ("model", "frequency", "oracle"):
        assert fast[name] > slow[name]
    assert fast["suffix"] == slow["suffix"]


def test_a_file_that_cannot_be_used_leaves_the_rest(files: list[Path], tmp_path: Path) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text(json.dumps({"prompt": [5], "output": [6, 7]}), encoding="utf-8")
    reports, notices = command.run(
        [tmp_path / "no.jsonl", small, files[1]], Plan(), TOKENIZER, SILENT
    )
    assert [r.name for r in reports] == ["two"]
    assert ["no.jsonl" in notices[0].text, "small.jsonl" in notices[1].text] == [True, True]


def test_nothing_to_measure_is_an_error_that_says_why(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing to measure: cannot read .*no\.jsonl"):
        command.run([tmp_path / "no.jsonl"], Plan(), TOKENIZER, SILENT)
    with pytest.raises(TraceError, match="labelled drafts"):
        command.run(files[:1], Plan(limit=4), TOKENIZER, SILENT)
    with pytest.raises(TraceError, match="0 to 4"):
        command.run(files, Plan(model_accepts=7.0), TOKENIZER, SILENT)


def test_tables_hold_the_files_and_the_whole(files: list[Path]) -> None:
    reports, notices = command.run(files, Plan(), TOKENIZER, SILENT)
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(command.table(reports))
    command.show_notices(notices * 30, console)
    text = console.export_text()
    for word in ("one", "two", "overall", "mean of files", "hybrid", "20 more lines"):
        assert word in text


def test_the_command_prints_json_and_keeps_notices_apart(files: list[Path], tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    done = hvd(
        "replay", str(files[0]), "--tokenizer", str(tmp_path / "tokenizer"), "--json",
        "--model-accepts", "1.5", XDG_CACHE_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["settings"]["model_accepts"] == 1.5
    assert set(found["rates"]) == RATES
    assert "one.jsonl:21: left out, not JSON" in done.stderr


def test_the_command_says_what_is_wrong_in_one_sentence(tmp_path: Path) -> None:
    done = hvd("replay", "x.jsonl", "--tokenizer", str(tmp_path))
    assert done.returncode == 2
    assert "ModelError: no tokenizer at" in done.stderr
    assert "Traceback" not in done.stderr
    refused = CliRunner().invoke(app, ["replay", "x.jsonl", "--kind", "best"])
    assert refused.exit_code == 2
    assert "--kind" in unstyle(refused.output)


def test_prompts_that_cannot_be_used_leave_the_rest(tmp_path: Path) -> None:
    def line(text: str, role: str = "user") -> str:
        return json.dumps({"messages": [{"role": role, "content": text}]})

    lines = ["no JSON", '{"prompt": "?"}', line("ab", role="judge"), line("abcdef"), line("c")]
    (tmp_path / "some.jsonl").write_text("\n".join([*lines, line("d")]), encoding="utf-8")
    (tmp_path / "none.jsonl").write_text("[]\n", encoding="utf-8")
    problems: list[str] = []
    read = list(read_folder(tmp_path, (), problems))
    found = command.prompts_of(read, 2, LetterTokenizer(), 4, problems)
    assert found == {"some": [(1, ord("a"), ord("f"), 2), (1, ord("c"), 2)]}
    for place, says in (("some.jsonl:1", "skipped"), ("some.jsonl:2", "messages"),
                        ("some/3", "template"), ("none", "no usable prompt")):  # fmt: skip
        assert any(place in told and says in told for told in problems)

"""``hvd bench decode`` from the shell: checkpoints on disk, prompts on disk, figures on disk."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from decoder.contracts.errors import SettingsError
from decoder.contracts.features import NUM_FEATURES
from decoder.drafting.suffix import TOKEN_BYTES
from decoder.policy.probes import to_bytes
from pipelines.cli import app
from pipelines.lab.bench import step_cost
from pipelines.lab.bench.learner import RECORD
from pipelines.lab.bench.serve.load import Selection, levels
from pipelines.lab.drafter.save import save_head
from pipelines.workloads import WORKLOADS
from tests.engines.tiny import VOCABULARY, learned_policy, tiny_head, tiny_target

TEMPLATE = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
METHODS = ["greedy", "eagle3", "suffix", "frequency:1", "arctic", "hybrid"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its tokenizer, a drafter, a policy and two prompt files, one with faults."""
    folder = tmp_path_factory.mktemp("bench")
    tiny_target(3).save_pretrained(folder / "model")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=None, unk_token="w0")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    save_head(tiny_head(3), folder / "drafter")
    (folder / "policy.safetensors").write_bytes(
        to_bytes(learned_policy().with_probes(np.zeros((1, NUM_FEATURES), np.float32)))
    )
    prompts = folder / "prompts"
    prompts.mkdir()
    texts = ["w3 w4 w5 w6 " * 4, "w7 w8 w7 w9 " * 3, "w10 w11 w3 " * 5]
    lines = [_line(f"good/{i}", text) for i, text in enumerate(texts)]
    (prompts / "good.jsonl").write_text("\n".join(lines) + "\n")
    long = _line("faulty/long", "w3 w4 " * 100)
    (prompts / "faulty.jsonl").write_text("{broken\n" + long + "\n" + _line("faulty/ok", "w5"))
    return folder


def _line(name: str, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"id": name, "family": "code", "messages": messages})


def bench(home: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """``hvd bench decode`` in this process, in the folder ``home``."""
    own = ["--prompts", "prompts", "--model", "model", "--drafter", "drafter",
           "--policy", "policy.safetensors", "--max-tokens", "24"]  # fmt: skip
    monkeypatch.chdir(home)
    return CliRunner().invoke(app, ["bench", "decode", *own, *arguments])


def test_a_run_leaves_figures(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["--methods", ",".join(METHODS), "--limit", "2", "--datasets", "good,faulty,gone"]
    done = bench(home, monkeypatch, *wanted, "--json", "figures/out.json", "--check")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    for part in (
        "Every output equals greedy's.",
        "dataset 'gone' left out",
        "prompts/faulty.jsonl:1 skipped",
        "tokens, left out: 1.",
    ):
        assert part in said
    figures: dict[str, Any] = json.loads((home / "figures" / "out.json").read_text())
    records = {(r["dataset"], r["method"]): r for r in figures["records"]}
    assert set(records) == {(d, m) for d in ("good", "faulty") for m in METHODS}
    assert records["good", "suffix"]["exact"] is True
    assert records["good", "suffix"]["tok_per_s"] > 0
    assert records["good", "greedy"]["speedup_vs_greedy"] == 1.0
    assert records["good", "eagle3"]["model_share"] > 0.9
    assert records["good", "suffix"]["cache_share"] > 0.0
    assert len(figures["problems"]) == 3
    told = figures["settings"]["policies"]["hybrid"]
    assert re.fullmatch("version 1, payoff, threshold 2, [0-9a-f]{12}", told)


def test_what_no_run_can_be_made_of_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = bench(home, monkeypatch, "--methods", "suffix", "--check")
    assert "--check compares with greedy" in str(done.exception)
    done = bench(home, monkeypatch, "--prompts", "nowhere")
    assert "nowhere is not a folder" in str(done.exception)
    assert "give one of them" in str(bench(home, monkeypatch, "--hub").exception)


def test_without_a_folder_it_asks_the_workloads_that_every_machine_has(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    asked = ["--model", "model", "--drafter", "none", "--methods", "greedy,suffix", "--limit", "1",
             "--warmup", "0", "--max-tokens", "8", "--max-prompt-tokens", "20",
             "--too-long", "truncate", "--json", "own.json"]  # fmt: skip
    done = CliRunner().invoke(app, ["bench", "decode", *asked])
    assert done.exit_code == 0, done.output
    figures = json.loads((home / "own.json").read_text())
    assert {r["dataset"] for r in figures["records"]} == set(WORKLOADS)
    assert figures["settings"]["folder"] == "own workloads"
    done = CliRunner().invoke(app, ["bench", "decode", *asked, "--datasets", "mbpp"])
    assert "'mbpp' left out: there are edits" in str(done.exception)


@pytest.mark.parametrize(
    ("turns", "concurrency", "counts"), [(0, (1, 2), [1, 1]), (0, (2,), [2]), (2, (1,), [2])]
)
def test_servers_are_asked_prompts_that_fit_or_the_lack_of_them_is_said(
    home: Path, turns: int, concurrency: tuple[int, ...], counts: list[int]
) -> None:
    asked = Selection(home / "prompts", concurrency, 2, 90, turns)
    put = levels(asked, str(home / "model"), [])
    assert [len(prompts) for _, prompts in put] == counts
    ids = [p.id for _, prompts in put for p in prompts]
    assert len(set(ids)) == len(ids) and "faulty/long" not in ids
    with pytest.raises(SettingsError, match=r"are too few.*faulty\.jsonl:1 skipped"):
        levels(replace(asked, concurrency=(1, 8, 9), turns=1), str(home / "model"), [])


def test_the_command_prints_what_it_measured() -> None:
    command = ["bench", "learner", "--events", "10000", "--scopes", "1,3", "--intakes", "0,2"]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found) == [f"{n} scopes, {k} intakes" for n in (1, 3) for k in (0, 2)]
    for run in found.values():
        assert run["events"] == -(-10_000 // RECORD) * RECORD and run["events_per_s"] > 0
        assert (run["intake_events_per_s"] > 0) == (run["intakes"] == 2)
        assert run["rss_mb"]["end"] > 0
    assert CliRunner().invoke(app, [*command[:-1], "none"]).exit_code == 2


def test_text_that_is_held_is_in_the_books() -> None:
    asked = [
        "bench",
        "memory",
        "--outputs",
        "9000",
        "--requests",
        "2",
        "--prompt",
        "3000",
        "--json",
    ]
    found = json.loads(CliRunner().invoke(app, asked).stdout)
    assert found["tokens"] == 9_600 + 2 * 3_000 and not found["pages_evicted"]
    assert TOKEN_BYTES < found["bytes_per_token"] < 2 * TOKEN_BYTES


def test_a_step_has_every_part_of_ours_in_it_and_prompts_are_waited_for() -> None:
    whole = step_cost.measure(20, long_prompts=1, beside=5, batch=step_cost.Batch(8, 200))
    assert set(whole["us_by_verb"]) == {"observe", "choose", "drafted", "flush", "adapter"}
    assert all(us > 0.0 for us in whole["us_by_verb"].values())
    assert whole["tokens_per_cycle"] > 1.2 and whole["longest_wait_for_a_prompt_ms"] > 0.0
    assert whole["bytes_per_token"] > TOKEN_BYTES and whole["cold_us_per_request"] > 0.0
    shown = CliRunner().invoke(
        app, ["bench", "decide", "--steps", "20", "--requests", "8", "--loops"]
    )
    assert shown.exit_code == 0 and "us by verb observe" in shown.output, shown.output

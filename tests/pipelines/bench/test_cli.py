"""``hvd bench decode`` from the shell: checkpoints on disk, prompts on disk, figures on disk."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from decoder.contracts.errors import SettingsError
from decoder.contracts.features import NUM_FEATURES
from decoder.drafting.eagle3 import save_head
from decoder.policy.probes import to_bytes
from pipelines.bench.asked import Asked
from pipelines.bench.decode import launch
from tests.engines.tiny import VOCABULARY, learned_policy, tiny_head, tiny_target

WORDS = [f"w{i}" for i in range(VOCABULARY)]
TEMPLATE = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
METHODS = ["greedy", "eagle3", "eagle3-tree", "suffix", "frequency", "arctic", "hybrid", "oracle"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its tokenizer, a drafter, a policy and two prompt files, one with faults."""
    folder = tmp_path_factory.mktemp("bench")
    tiny_target(3).save_pretrained(folder / "model")
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=None, unk_token="w0")
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


def bench(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = ["--prompts", "prompts", "--model", "model", "--drafter", "drafter",
           "--policy", "policy.safetensors", "--max-tokens", "36", "--threads", "1"]  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "bench", "decode", *own, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=home,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1",
             "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip


def test_a_run_leaves_figures_a_report_and_its_generations(home: Path) -> None:
    wanted = ["--methods", ",".join(METHODS), "--limit", "2", "--datasets", "good,faulty,gone"]
    done = bench(home, *wanted, "--out", "out", "--json", "figures/out.json", "--check")
    assert done.returncode == 0, done.stderr
    assert "3 prompts of 1 families, 8 methods: every output equals greedy's." in done.stderr
    assert "dataset 'gone' left out" in done.stderr
    assert "prompts/faulty.jsonl:1 skipped" in done.stderr
    assert "faulty: prompt faulty/long skipped: its" in done.stderr
    figures: dict[str, Any] = json.loads((home / "figures" / "out.json").read_text())
    records = {(r["dataset"], r["method"]): r for r in figures["records"]}
    assert set(records) == {(d, m) for d in ("good", "faulty") for m in METHODS}
    assert records["good", "suffix"]["exact"] is True
    assert records["good", "suffix"]["tok_per_s"] > 0
    assert records["good", "greedy"]["speedup_vs_greedy"] == 1.0
    assert len(figures["problems"]) == 3
    told = figures["settings"]["policies"]["hybrid"]
    assert re.fullmatch("version 1, payoff, threshold 2, [0-9a-f]{12}", told)
    assert (home / "out" / "report.html").stat().st_size > 10_000
    again = bench(home, *wanted, "--out", "out", "--json", "again.json")
    assert again.returncode == 0, again.stderr
    assert json.loads((home / "again.json").read_text())["records"] == figures["records"]


def test_an_error_is_one_sentence_and_status_two(home: Path) -> None:
    done = bench(home, "--methods", "greedy,gredy")
    assert done.returncode == 2
    assert "SettingsError: no method gredy: there are greedy, eagle3," in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prompts": Path("nowhere")}, "nowhere is not a folder"),
        ({"template": "jinja"}, "--template jinja: choose chat, none, both."),
        ({"too_long": "cut"}, "--too-long cut: choose skip, truncate."),
        ({"clock": "sun"}, "--clock sun: choose wall, cpu."),
        ({"clock": "cpu", "device": "cuda"}, "use it with --device cpu"),
        ({"dtype": "int8"}, "--dtype int8: choose float32, bfloat16, float16."),
        ({"datasets": ("gone",)}, "no dataset is left to measure"),
        ({"methods": "greedy", "device": "cuda:9"}, "finds no CUDA device"),
    ],
)
def test_what_no_run_can_be_made_of_is_said(
    home: Path, asked: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SettingsError, match=said):
        launch.launch(Asked(**{**_own(home), **asked}), Console(file=io.StringIO()))


def test_a_check_without_greedy_proves_nothing(home: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    asked = Asked(
        **{**_own(home), "methods": "suffix", "datasets": ("good",), "limit": 1, "out": tmp_path}
    )
    results, folder = launch.launch(asked, Console(file=said))
    assert folder == tmp_path
    assert len(results.whole()) == 1
    assert not launch.proven(results, Console(file=said))
    assert "--check compares with greedy" in said.getvalue()


def _own(home: Path) -> dict[str, Any]:
    return {"prompts": home / "prompts", "model": str(home / "model"), "max_tokens": 8}

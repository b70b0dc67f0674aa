"""The target writes conversations, and its states are kept as it does.

Some conversations share each pass of the model: first over their prompts, padded on the left, then
one token of each at a time. Those that end leave the pass. No second pass reads the text again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.drafter.asks import Ask, Turns, asks
from pipelines.drafter.shards import AUX_LAYERS, Conversation, write_shard
from pipelines.progress import Step

AT_ONCE = 64
"""Conversations written together, and of a shard: what an interrupt loses."""
LONGEST_ANSWER = 176
LENGTH = 1536
"""Tokens of a conversation at most."""
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
    """One conversation as it grows.

    ``end`` ends a turn, ``bridge`` leads from a user's last word to the answer's first.
    """

    def __init__(self, ask: Ask, temperature: float, end: int, bridge: Sequence[int]) -> None:
        """A conversation that goes on where ``ask`` stops; answers have ``temperature``."""
        self.tokens, self.greedy = list(ask.tokens), temperature == 0
        self.answers = list[tuple[int, int]]()
        """Where each that is complete begins, and where it ends."""
        self._growth = self._grow(ask, temperature, end, bridge)
        self.temperature = next(self._growth)
        """Of the next token."""

    def take(self, sampled: int) -> bool:
        """Append the next token and what is known to follow; false when the last answer ended."""
        try:
            self.temperature = self._growth.send(sampled)
        except StopIteration:
            return False
        return True

    def _grow(
        self, ask: Ask, temperature: float, end: int, bridge: Sequence[int]
    ) -> Generator[float, int, None]:
        """Yields the temperature of each token that is not known, and is sent the token."""
        tokens, limit = self.tokens, len(self.tokens) + ask.longest - 1
        if ask.longest:
            while len(tokens) < limit and (said := (yield WARM)) != end:
                tokens.append(said)
            tokens += [*ask.closing, *bridge]
        for then in (*ask.follow_ups, ()):
            begin, said = len(tokens), -1
            while said != end and len(tokens) - begin < LONGEST_ANSWER:
                said = yield temperature
                tokens.append(said)
            self.answers.append((begin, len(tokens)))
            if len(tokens) + len(then) + LONGEST_ANSWER > LENGTH:
                return
            tokens += then[1:] if said == end else then


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
                whole = [(begin, n) for begin, n in some[i].answers if n - begin > FEW]
                if whole:
                    begin, n = whole[-1][0], whole[-1][1] - 1  # the last token was never read
                    kept, tokens = torch.cat(parts[i])[:n], torch.tensor(some[i].tokens[:n])
                    aux, last = kept[:, :-1].flatten(1), kept[:, -1]
                    yield Conversation(tokens, begin, some[i].greedy, aux, last)
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

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Each prompt and its greedy answer, in the order in which the answers end.

    An answer of a few tokens is left out.
    """
    bridge, end = Turns.of(tokenizer).bridge, tokenizer.eos_token_id
    for first in range(0, len(prompts), AT_ONCE):
        asked = map(Ask, prompts[first : first + AT_ONCE])
        for c in write(model, [Writing(ask, 0.0, end, bridge) for ask in asked], (0,)):
            yield c.tokens[: c.prompt].tolist(), c.tokens[c.prompt :].tolist()


def _in_order(stream: Iterator[Ask]) -> Iterator[Ask]:
    def may_become(ask: Ask) -> int:
        said = ask.longest + sum(map(len, ask.follow_ups))
        return len(ask.tokens) + said + (1 + len(ask.follow_ups)) * LONGEST_ANSWER

    while pool := list(itertools.islice(stream, POOL)):
        yield from sorted(pool, key=may_become)


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
    bridge, end = Turns.of(tokenizer).bridge, tokenizer.eos_token_id
    stream = _in_order(asks(tokenizer, SEED + number))
    while written < tokens:
        some = [
            Writing(ask, rng.choice(TEMPERATURES), end, bridge)
            for ask in itertools.islice(stream, AT_ONCE)
        ]
        kept = []
        for c in write(model, some):
            kept.append(c)
            written += len(c.tokens) - c.prompt
            step("composing answers, tokens", min(written, tokens), tokens)
        write_shard(folder, number, kept)
        number += 1

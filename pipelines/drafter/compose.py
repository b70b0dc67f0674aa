"""Step 1: the target writes, and its states are kept as it does.

Conversations share the steps of :mod:`pipelines.drafter.lockstep`; one that ends gives its slot to
the next. The states cost nothing beyond the writing, and no second pass reads the text again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.drafter.asks import Ask, asks, turns
from pipelines.drafter.lockstep import Llama, Slots
from pipelines.drafter.shards import AUX_LAYERS, SEQUENCES, Conversation, write_shard
from pipelines.progress import Step

SLOTS = 64
LONGEST_ANSWER = 176
LENGTH = 1536
"""Of a slot, in tokens."""
POOL = 512
"""Asks drawn at once and begun in order of how long they may become: a step costs what its longest
slot does."""
TEMPERATURES = (0.0, 0.0, 0.7)
SEED = 43
FEW = 5
"""Tokens of an answer that nothing can be learned from."""
LOOP = 48
"""An answer that repeats itself for this many tokens ends: it teaches nothing more."""


@dataclass
class Writer:
    """One conversation as it grows."""

    tokens: list[int]
    asking: int
    """Tokens by which the target may still go on with the user's turn; 0: it answers."""
    closing: tuple[int, ...]
    follow_ups: list[tuple[int, ...]]
    answer_temperature: float
    forced: list[int] = field(default_factory=list)
    prompt: int = 0
    """Where the last answer begins, once it does."""
    former: tuple[int, int] | None = None
    """Of the answer before: where it begins, and where it ends."""
    may_loop: bool = False
    """Whether an answer that repeats itself goes on to its limit, as it does in service."""

    @classmethod
    def of(cls, ask: Ask, temperature: float) -> Writer:
        """A conversation that goes on where ``ask`` stops."""
        tokens, then = list(ask.tokens), list(ask.follow_ups)
        return cls(tokens, ask.longest, ask.closing, then, temperature, prompt=len(tokens))

    @property
    def temperature(self) -> float:
        """Of the next token: what a user says wants variety."""
        return 1.0 if self.asking else self.answer_temperature

    def take(self, sampled: int, end: int, bridge: list[int]) -> bool:
        """Append the next token; false when the last answer has ended with it.

        ``bridge`` (the end of a turn and the opening of the answer) follows what a user says.
        """
        if self.forced:
            self.tokens.append(self.forced.pop(0))
            return True
        if self.asking:
            self.asking -= 1
            if sampled == end or not self.asking:
                self.asking = 0
                sampled = self._force([*self.closing, *bridge])
            self.tokens.append(sampled)
            return True
        self.tokens.append(sampled)
        written = len(self.tokens) - self.prompt
        loops = not self.may_loop and self._loops(written)
        if sampled != end and written < LONGEST_ANSWER and not loops:
            return True
        if loops or not self.follow_ups:
            return False
        then = self.follow_ups.pop(0)
        if len(self.tokens) + len(then) + LONGEST_ANSWER > LENGTH:
            return False
        self.former = self.prompt, len(self.tokens)
        self.forced = list(then[1:] if sampled == end else then)
        self.prompt = len(self.tokens) + len(self.forced)
        return True

    @property
    def whole(self) -> tuple[int, int] | None:
        """Where the last answer of more than a few tokens begins, and where it ends."""
        last = self.prompt, len(self.tokens)
        return next((a for a in (last, self.former) if a and a[1] - a[0] > FEW), None)

    def _force(self, tokens: list[int]) -> int:
        """The first of ``tokens``; the others follow, and then an answer."""
        self.forced = tokens[1:]
        self.prompt = len(self.tokens) + len(tokens)
        return tokens[0]

    def _loops(self, written: int) -> bool:
        if written % 16 or written < 2 * LOOP:
            return False
        last = self.tokens[-LOOP:]
        return any(self.tokens[-LOOP - p : -p] == last for p in range(1, LOOP + 1))


def _sample(logits: Tensor, temperatures: Tensor) -> Tensor:
    """One token a row of ``logits``: int64; temperature 0 takes the likeliest."""
    picked = logits.argmax(-1)
    warm = temperatures.nonzero()[:, 0]
    if len(warm):
        shares = (logits[warm] / temperatures[warm, None]).softmax(-1)
        picked[warm] = torch.multinomial(shares, 1)[:, 0]
    return picked


def _in_order(stream: Iterator[Ask]) -> Iterator[Ask]:
    while pool := list(itertools.islice(stream, POOL)):
        yield from sorted(pool, key=_may_become)


def _may_become(ask: Ask) -> int:
    answers = (1 + len(ask.follow_ups)) * LONGEST_ANSWER
    return len(ask.tokens) + ask.longest + answers + sum(map(len, ask.follow_ups))


def write(
    model: Llama,
    stream: Iterator[Writer],
    end: int,
    bridge: list[int],
    layers: Sequence[int],
    at_once: int = SLOTS,
) -> Iterator[Conversation]:
    """Finished conversations with their states, as long as ``stream`` lasts; some ``at_once``."""
    slots = Slots(model, at_once, LENGTH, layers)
    hidden = model.embedding.shape[1]
    aux = torch.zeros(at_once, LENGTH, len(layers), hidden, dtype=torch.bfloat16)
    final = torch.zeros(at_once, LENGTH, hidden, dtype=torch.bfloat16)
    running: list[Writer] = []

    def begin(slot: int, writer: Writer) -> bool:
        read = slots.read(slot, writer.tokens)
        n = len(writer.tokens)
        aux[slot, :n], final[slot, :n] = read.aux, read.final.bfloat16()
        logits = model.logits(read.final[-1:])
        sampled = _sample(logits, torch.tensor([writer.temperature]))
        return writer.take(int(sampled), end, bridge)

    def next_for(slot: int) -> Writer | None:
        return next((w for w in stream if begin(slot, w)), None)

    for slot in range(at_once):
        if (writer := next_for(slot)) is not None:
            running.append(writer)
    while running:
        where = torch.arange(len(running))
        at = torch.tensor([len(w.tokens) - 1 for w in running])
        states = slots.step(where, torch.tensor([w.tokens[-1] for w in running]), at)
        aux[where, at], final[where, at] = states.aux, states.final.bfloat16()
        free = [i for i, w in enumerate(running) if not w.forced]
        sampled = torch.zeros(len(running), dtype=torch.int64)
        if free:
            warmth = torch.tensor([running[i].temperature for i in free])
            sampled[free] = _sample(model.logits(states.final[free]), warmth)
        ended = [
            i
            for i, (w, s) in enumerate(zip(running, sampled.tolist(), strict=True))
            if not w.take(s, end, bridge)
        ]
        for slot in reversed(ended):
            w = running[slot]
            if w.whole is not None:
                prompt, n = w.whole[0], w.whole[1] - 1  # the last token was never read
                greedy = w.answer_temperature == 0
                yield w.tokens[:n], prompt, greedy, aux[slot, :n].clone(), final[slot, :n].clone()
            successor = next_for(slot)
            if successor is not None:
                running[slot] = successor
            else:  # the stream is exhausted: the last slot moves here
                last = running.pop()
                if slot < len(running):
                    running[slot] = last
                    slots.move(len(running), slot)
                    aux[slot], final[slot] = aux[len(running)], final[len(running)]


def answers(
    model: Llama, tokenizer: Any, prompts: Sequence[list[int]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Each prompt and its greedy answer, in the order in which the answers end.

    An answer may loop, as it may in service; one of a few tokens is left out.
    """
    writers = [Writer.of(Ask(ids), 0.0) for ids in prompts]
    for writer in writers:
        writer.may_loop = True
    bridge = turns(tokenizer).bridge
    # A slot takes seventy megabytes: no more of them than there are prompts.
    made = write(
        model, iter(writers), tokenizer.eos_token_id, bridge, (0,), min(SLOTS, len(writers))
    )
    for tokens, prompt, *_ in made:
        yield tokens[:prompt], tokens[prompt:]


def compose(
    model_path: Path, out: Path, tokens: int, dtype: torch.dtype, step: Step, first_shard: int
) -> int:
    """Write shards of new conversations until those from ``first_shard`` on hold ``tokens``.

    Resumable: a later call goes on behind the last whole shard. ``tokens`` counts those of answers;
    shards belong together that agree in all but the last four digits of their numbers.

    Returns:
        the number of answer tokens in those shards.
    """
    from safetensors import safe_open
    from transformers import AutoTokenizer

    out.mkdir(parents=True, exist_ok=True)
    written, shard = 0, first_shard
    for path in sorted(out.glob(f"{first_shard // 10000}????-*.safetensors")):
        with safe_open(path, "pt") as file:
            written += int((file.get_tensor("lengths") - file.get_tensor("prompts")).sum())
        shard = max(shard, int(path.name[:5]) + 1)
    tokenizer, model = AutoTokenizer.from_pretrained(model_path), Llama.load(model_path, dtype)
    rng = random.Random(SEED + shard)
    torch.manual_seed(SEED + shard)
    bridge = turns(tokenizer).bridge
    stream = (
        Writer.of(a, rng.choice(TEMPERATURES)) for a in _in_order(asks(tokenizer, SEED + shard))
    )
    finished = write(model, stream, tokenizer.eos_token_id, bridge, AUX_LAYERS)
    while written < tokens:
        step("composing answers, tokens", written, tokens)
        kept = list(itertools.islice(finished, SEQUENCES))
        written += sum(len(k[0]) - k[1] for k in kept)
        write_shard(out, shard, kept, AUX_LAYERS)
        shard += 1
    return written

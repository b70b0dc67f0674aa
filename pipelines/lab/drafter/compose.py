"""The target writes conversations, and its states are kept as it does.

Conversations share each pass of the model: first over their prompts, padded on the left, then one
token of each at a time. Those that end leave the pass. No second pass reads an answer again.

What it is asked is wider than the workloads it is tried on. Every ask is a prompt, or the opening
of one that the target completes itself, given that of a user turn alone (arXiv 2406.08464),
sometimes with a first word. The wording is in ``asks.toml``.
"""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
import random
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.lab.drafter.unroll import AUX_LAYERS, Conversation, shards, write_shard
from pipelines.reports import Step
from pipelines.workloads import WORKLOADS, Function, prompts, standard_library_functions

AT_ONCE, POOL = 64, 512
"""Conversations written together, and of a shard: what an interrupt loses; of so many, drawn at
once, the shortest prompts come first, since a pass costs what its longest text does."""
PROMPT_TOKENS = 256
"""Of each prompt in one pass."""
WARM, TEMPERATURES = 1.0, (0.0, 0.0, 0.7)
"""Of what the target says for a user, which wants variety, and of answers."""
LONGEST_ANSWER, FEW, SEED = 176, 5, 43
"""Tokens: nothing can be learned from an answer of a few."""


LONGEST, INSTRUCTION = 1000, 80
"""Tokens of a prompt, longer ones are left out; and of what the target says for a user at most."""
WORDING = tomllib.loads(Path(__file__).with_name("asks.toml").read_text(encoding="utf-8"))


def turn(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids before a user's words, and between them and the answer."""
    said = [{"role": "user", "content": "\x00"}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    opening, bridge = tokenizer(text.split("\x00"), add_special_tokens=False)["input_ids"]
    return opening, bridge


def _excerpt(rng: random.Random, longest: int) -> str:
    """Consecutive paragraphs of Python's reference documentation, up to ``longest`` characters."""
    text = rng.choice(list(pydoc_data.topics.topics.values()))
    paragraphs = [p for p in text.split("\n\n") if len(p) > 40] or [text]
    return "\n\n".join(paragraphs[rng.randrange(len(paragraphs)) :])[:longest].strip()


def _task(rng: random.Random, functions: Sequence[Function]) -> str:
    """One of the tasks: of made-up tables, the standard library, or its documentation."""
    names = rng.sample(WORDING["tables"], rng.randint(1, 4))
    tables = {n: [f"{n}_id", *rng.sample(WORDING["columns"], rng.randint(2, 6))] for n in names}
    (table, columns), (other, others) = rng.choices(list(tables.items()), k=2)
    rows = [{c: rng.randint(1, 2000) for c in columns} for _ in range(rng.randint(3, 12))]
    file = rng.sample(functions, rng.randint(2, 5))
    f = next((f for f in file if f.doc), file[0])
    words = {
        "sql": "\n".join(f"CREATE TABLE {n} ({', '.join(c)});" for n, c in tables.items()),
        "schema": "\n".join(f"Table {n}, columns = [{', '.join(c)}]" for n, c in tables.items()),
        "table": table,
        "other": other,
        "key": columns[1],
        "column": rng.choice(columns),
        "second": rng.choice(others),
        "rows": json.dumps(rows, indent=rng.choice((None, 2))),
        "text": _excerpt(rng, rng.choice((500, 900, 1500, 2500, 3500))),
        "file": "\n\n".join(shown.source for shown in file),
        "name": f.name,
        "source": f.source,
        "doc": f.doc,
        "tools": json.dumps([{"name": t.name, "parameters": t.arguments} for t in file]),
        "values": ", ".join(rng.choice(WORDING["values"]) for _ in f.arguments),
    }
    kind = rng.choice(WORDING["tasks"])
    ask = rng.choice(kind["asks"]).format(**words)
    text: str = rng.choice(kind["forms"]).format(ask=ask, **words)
    return text


def asks(tokenizer: Any, seed: int) -> Iterator[tuple[list[int], bool]]:
    """Endless: token ids, and whether they are a whole prompt or the opening of one.

    A quarter are workloads (``train`` side), half the target's own, a quarter other tasks. Most are
    short, since a token behind a long context takes three times as long to write.
    """
    rng, functions = random.Random(f"asks/{seed}"), standard_library_functions("train")
    streams, (opening, _) = [prompts(w, "train", seed) for w in WORKLOADS], turn(tokenizer)
    while True:
        kind = rng.random()
        if kind < 0.5:
            start = rng.choice(WORDING["starts"]) if rng.random() < 0.6 else ""
            begun = tokenizer(start, add_special_tokens=False)["input_ids"]
            yield [*opening, *begun], False
            continue
        said = [{"role": "user", "content": _task(rng, functions)}]
        if kind < 0.75:
            said = list(next(rng.choice(streams)).messages)
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        if len(ids) <= LONGEST:
            yield ids, True


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
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
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
        shown = [ids for ids, whole in some if whole]
        begun = [ids for ids, whole in some if not whole]
        if begun:
            said = write(model, begun, torch.full((len(begun),), WARM), end, INSTRUCTION)
            shown += [[*(t[:-1] if t[-1] == end else t), *bridge] for _, t, _ in said]
        warmth, kept = torch.tensor(rng.choices(TEMPERATURES, k=len(shown))), []
        for i, text, states in write(model, shown, warmth, end, LONGEST_ANSWER, AUX_LAYERS):
            begin, known, cold = len(shown[i]), torch.tensor(text[:-1]), bool(warmth[i] == 0)
            if len(text) > begin + FEW:
                aux, final = states[:, :-1].flatten(1), states[:, -1].clone()
                kept.append(Conversation(known, begin, cold, aux, final))
                written += kept[-1].answer
                step("composing answers, tokens", min(written, tokens), tokens)
        write_shard(folder, number, kept)
        number += 1

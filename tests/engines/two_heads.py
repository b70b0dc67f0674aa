"""A random model of two attention heads and a random drafter for it: what two ranks can share.

Its words mean nothing; every token is one, so that a prompt is a list of numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipelines.lab.drafter.head import Eagle3Head, HeadConfig
from pipelines.lab.drafter.save import save_head

VOCABULARY = 96
DRAFTED = 24
HIDDEN, HEADS, WIDTH, INNER = 64, 2, 32, 128
LENGTH = 512


def write_models(
    folder: Path,
    vocabulary: int = VOCABULARY,
    drafted: int = DRAFTED,
    words: Sequence[str] = (),
) -> tuple[Path, Path]:
    """Target and drafter, as vLLM loads them from disk; with few tokens its drafts are right now
    and then. ``words`` are its last ones, where they are to mean something."""
    target, drafter = folder / "target", folder / "drafter"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=4,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH,
        max_position_embeddings=LENGTH, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(target)
    every = [*(f"w{i}" for i in range(vocabulary - len(words))), *words]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(every)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(target)
    head = Eagle3Head(
        HeadConfig(
            hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=HEADS,
            num_key_value_heads=HEADS, head_dim=WIDTH, vocab_size=vocabulary,
            draft_vocab_size=drafted, rope_theta=10_000.0, rms_norm_eps=1e-6,
            max_position_embeddings=LENGTH, aux_layers=(1, 2, 3),
        )
    )  # fmt: skip
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.2)
    head.set_vocabulary(torch.randperm(vocabulary)[:drafted].sort().values)
    save_head(head.eval(), drafter)
    return target, drafter


def prompts(count: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Prompts in which stretches come back, some of them longer than a step of 64 tokens."""
    made = []
    for seed in range(count):
        rng = random.Random(seed)
        pieces = [[rng.randrange(vocabulary) for _ in range(6)] for _ in range(4)]
        made.append([t for _ in range(4 + 6 * (seed % 3)) for t in rng.choice(pieces)])
    return made

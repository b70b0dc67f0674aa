"""Random models of a few thousand weights, small enough to compare with exact enumeration."""

from __future__ import annotations

import random
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.core.choice import choose
from decoder.core.costs import LiveCosts
from decoder.engines.reference.engine import ReferenceEngine
from decoder.engines.reference.session import Session
from decoder.settings import WorkerSettings
from pipelines.lab.drafter.head import Eagle3Head, HeadConfig
from pipelines.replay.method import Method
from pipelines.replay.rivals import METHODS, method
from tests.events import KeepingLog

Family = Literal["llama", "qwen3"]
VOCABULARY = 12
"""So few tokens that even random drafts are accepted now and then."""
HIDDEN = 32


def tiny_target(
    seed: int, family: Family = "llama", vocabulary: int = VOCABULARY, layers: int = 5
) -> Any:
    """A target with random weights, spread enough that its outputs do not loop at once."""
    shape = {
        "vocab_size": vocabulary, "hidden_size": HIDDEN, "intermediate_size": 48,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": 160, "initializer_range": 0.25,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()


def tiny_head(
    seed: int,
    vocabulary: int = VOCABULARY,
    drafted: int = 8,
    aux_layers: tuple[int, ...] = (1, 2, 4),
) -> Eagle3Head:
    """A drafter with random weights for :func:`tiny_target`."""
    torch.manual_seed(1_000 + seed)
    config = HeadConfig(
        hidden_size=HIDDEN, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=vocabulary, draft_vocab_size=drafted, rope_theta=10_000.0,
        rms_norm_eps=1e-6, max_position_embeddings=160, aux_layers=aux_layers,
    )  # fmt: skip
    head = Eagle3Head(config)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    head.set_vocabulary(torch.randperm(vocabulary)[:drafted].sort().values)
    return head.eval()


def tiny_engine(
    seed: int,
    family: Family = "llama",
    vocabulary: int = VOCABULARY,
    drafted: int = 8,
    max_model_len: int | None = None,
    **settings: Any,
) -> ReferenceEngine:
    """Target and drafter together."""
    return ReferenceEngine(
        tiny_target(seed, family, vocabulary), tiny_head(seed, vocabulary, drafted),
        max_model_len=max_model_len, settings=WorkerSettings.load(**settings),
    )  # fmt: skip


def tiny_prompt(seed: int, length: int = 24, vocabulary: int = VOCABULARY) -> list[int]:
    """A prompt in which short stretches come back, so that the suffix cache has drafts."""
    rng = random.Random(seed)
    pieces = [[rng.randrange(vocabulary) for _ in range(4)] for _ in range(3)]
    tokens = [token for _ in range(length) for token in rng.choice(pieces)]
    return tokens[:length]


def learned_policy() -> Policy:
    """A policy of the kind that is learned, which uses both arms: it has learned to count."""
    weight = np.zeros((NUM_FEATURES, 1), np.float32)
    weight[FEATURES.index("score")] = 1.0
    layers = ((weight, np.zeros(1, np.float32)),)
    return Policy(scope="", version=1, threshold=2.0, layers=layers)


def all_methods() -> list[Method]:
    """Every method there is."""
    learned = learned_policy()
    return [method(name, policy=learned if name.startswith("hybrid") else None) for name in METHODS]


def session_of(
    engine: ReferenceEngine, m: Method, costs: LiveCosts | None = None, guarded: bool = False
) -> tuple[Session, KeepingLog]:
    """A session and the log of its events."""
    rule = m.rule() if m.rule is not None else None
    log = KeepingLog(rule.update if rule is not None else None)
    return m.session(engine, costs, guarded, log, rule or choose), log


def labelling(threshold: float, model: bool, **changes: Any) -> Method:
    """Cache drafts are proposed and labelled, and verified from ``threshold`` on."""
    return Method("labelling", frequency_policy("", threshold), model, **changes)

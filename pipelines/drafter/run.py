"""A training run's state: settings, what the target lends, the head and its optimiser."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from decoder.drafting.eagle3 import Eagle3Head, HeadConfig
from pipelines.drafter.copying import learn_to_copy
from pipelines.drafter.shards import AUX_LAYERS, Conversation
from pipelines.drafter.unroll import Pack
from pipelines.settled import settle

OUTPUT_RATE = 0.3
"""Learning rate of ``lm_head`` relative to the rest: its rows are the target's own, and what they
know of rare tokens is lost when they move far on little data."""
WEIGHT_DECAY = 0.05
PROMPT_WEIGHT, SOFT_POSITIONS = 0.2, 7000
"""Of :func:`draft_vocabulary`."""
COPY_SIZES = (80, *[4] * 80)
"""Conversations for the regressions, then of each batch, from which the head learns to copy."""


@dataclass(frozen=True)
class Settings:
    """How to train; the defaults are those of the shipped head."""

    aux_layers: tuple[int, ...] = AUX_LAYERS
    draft_vocab_size: int = 8400
    minutes: float = 60.0
    rows: int = 768
    """Chains a batch, about."""
    dtype: str = "float32"
    """Of products; weights, the residual stream and every softmax stay in float32."""
    learning_rate: float = 1.5e-3
    heldout_every: int = 16
    heldout_at_most: int = 48
    seed: int = 0


@dataclass(frozen=True)
class Target:
    """What the head shares with its target: embeddings (= output matrix) and final norm."""

    embedding: Tensor
    norm: Tensor
    config: Any

    @classmethod
    def load(cls, path: Path) -> Target:
        """Read a Llama checkpoint with tied embeddings."""
        from transformers import AutoConfig

        with safe_open(path / "model.safetensors", "pt") as f:
            embedding = f.get_tensor("model.embed_tokens.weight").float()
            norm = f.get_tensor("model.norm.weight").float()
        return cls(embedding, norm, AutoConfig.from_pretrained(path))


def draft_vocabulary(some: list[Conversation], size: int, embedding: Tensor) -> Tensor:
    """The ``size`` tokens most frequent in answers, as far as ``some`` tell: ascending ids.

    To what the answers hold is added what the target expected there: its probabilities at about
    :data:`SOFT_POSITIONS` random answer positions, scaled up, which know of tokens that few answers
    happen to hold. Prompts count a little. Ties go to the lowest ids: a BPE tokenizer numbers its
    merges by frequency.
    """
    held = torch.zeros(len(embedding))
    expected = torch.zeros(len(embedding))
    each = -(-SOFT_POSITIONS // len(some))
    for c in some:
        answer = c.tokens[c.prompt :]
        held += torch.bincount(answer, minlength=len(held))
        held += PROMPT_WEIGHT * torch.bincount(c.tokens[: c.prompt], minlength=len(held))
        chosen = c.prompt - 1 + torch.randperm(len(answer))[:each]
        logits = c.final[chosen].float() @ embedding.T
        expected += logits.softmax(-1).sum(0) * len(answer) / max(1, len(chosen))
    order = torch.sort(held + expected, descending=True, stable=True).indices
    return order[:size].sort().values


def new_head(target: Target, settings: Settings, vocabulary: Tensor) -> Eagle3Head:
    """A head for ``target``: a random layer under the target's own final norm and output rows."""
    c = target.config
    same = [f.name for f in fields(HeadConfig) if hasattr(c, f.name)]
    torch.manual_seed(settings.seed)
    shape = {name: getattr(c, name) for name in same} | {
        "draft_vocab_size": len(vocabulary),
        "rope_theta": float(c.rope_parameters["rope_theta"]),
        "aux_layers": settings.aux_layers,
    }
    head = Eagle3Head(HeadConfig(**shape))
    head.set_vocabulary(vocabulary)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.embedding[vocabulary])
        # a random layer under the target's full-size norm starts out confidently wrong
        # (cross-entropy 18, uniform is 9): quiet outputs learn faster
        head.norm.weight.copy_(0.3 * target.norm)
        head.midlayer.self_attn.o_proj.weight.mul_(0.1)
        head.midlayer.mlp.down_proj.weight.mul_(0.1)
    return head


@dataclass
class Run:
    """A training run's state: what a checkpoint holds, and nothing else."""

    head: Eagle3Head
    scale: Tensor
    """(layers * hidden): root mean square of each aux feature; folded into ``fc`` on export."""
    optimizer: torch.optim.AdamW
    batch: int = 0
    seconds: float = 0.0
    rows: int = 0
    best: float = -1.0

    @classmethod
    def start(cls, target: Target, settings: Settings, some: list[Conversation]) -> Run:
        """A new head that has learned to copy; vocabulary and feature scale come from ``some``.

        First positions stay out of the scale: their states are up to a thousand times larger than
        all others.
        """
        vocabulary = draft_vocabulary(some, settings.draft_vocab_size, target.embedding)
        sample = torch.cat([c.aux[1:] for c in some[:200]]).float()
        scale = sample.square().mean(0).sqrt()
        run = cls._of(new_head(target, settings, vocabulary), scale, settings)
        rng = random.Random(settings.seed)
        drawn = (rng.sample(some, min(n, len(some))) for n in COPY_SIZES)
        learn_to_copy(run.head, (Pack.of(part, target.embedding, scale) for part in drawn))
        return run

    @classmethod
    def _of(cls, head: Eagle3Head, scale: Tensor, settings: Settings) -> Run:
        output = list(head.lm_head.parameters())
        layer = [p for name, p in head.named_parameters() if not name.startswith("lm_head")]
        optimizer = torch.optim.AdamW(
            [{"params": layer, "scale": 1.0}, {"params": output, "scale": OUTPUT_RATE}],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=WEIGHT_DECAY,
        )
        return cls(head, scale, optimizer)

    def save(self, path: Path) -> None:
        """Write head, optimiser and counters as one file, whole or not at all."""
        held = {**vars(self), "head": self.head.state_dict()}
        held["optimizer"] = self.optimizer.state_dict()
        settle(path, lambda part: torch.save(held, part))

    @classmethod
    def resume(cls, path: Path, target: Target, settings: Settings) -> Run:
        """Read :meth:`save` back."""
        held = torch.load(path, weights_only=True)
        head = new_head(target, settings, torch.arange(len(held["head"]["d2t"])))
        head.load_state_dict(held.pop("head"))
        run = cls._of(head, held.pop("scale"), settings)
        run.optimizer.load_state_dict(held.pop("optimizer"))
        vars(run).update(held)
        return run

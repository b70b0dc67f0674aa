"""A training run's state: settings, what the target lends, the head and its optimiser."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from decoder.drafting.eagle3 import Eagle3Head, HeadConfig
from pipelines.drafter.conversations import draft_vocabulary, pack
from pipelines.drafter.copying import copiers, learn_to_copy
from pipelines.drafter.shards import Shards
from pipelines.reports import atomic_write


@dataclass(frozen=True)
class Settings:
    """How to train; the defaults are those of the shipped head."""

    aux_layers: tuple[int, ...] = (2, 15, 28)
    draft_vocab_size: int = 8400
    minutes: float = 60.0
    steps: int = 3
    """Training-time test: how far each chain is unrolled."""
    step_decay: float = 0.8
    later_share: float = 0.35
    """Share of the chains unrolled beyond step 0: most of what they teach at half of the price."""
    prompt_share: float = 0.4
    """Share of prompt positions that start a chain; every answer position does."""
    rows: int = 768
    """Chains a batch, about."""
    dtype: str = "float32"
    """Of products; weights, the residual stream and every softmax stay in float32."""
    learning_rate: float = 1.5e-3
    output_rate: float = 0.3
    """Learning rate of ``lm_head`` relative to the rest: its rows are the target's own, and what
    they know of rare tokens is lost when they move far on little data."""
    dropout: float = 0.05
    """Of the head's inputs (aux features and embeddings), while training."""
    weight_decay: float = 0.05
    warmup: int = 30
    copying: float = 0.3
    """Weight of the copiers' supervised attention at the start; falls to 0 with the rate."""
    heldout_every: int = 16
    heldout_at_most: int = 48
    evaluate_minutes: float = 5.0
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
            return cls(
                embedding,
                f.get_tensor("model.norm.weight").float(),
                AutoConfig.from_pretrained(path),
            )


def new_head(target: Target, settings: Settings, vocabulary: Tensor) -> Eagle3Head:
    """A head for ``target``: a random layer under the target's own final norm and output rows."""
    c = target.config
    torch.manual_seed(settings.seed)
    head = Eagle3Head(
        HeadConfig(
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            vocab_size=c.vocab_size,
            draft_vocab_size=len(vocabulary),
            rope_theta=float(c.rope_parameters["rope_theta"]),
            rms_norm_eps=c.rms_norm_eps,
            max_position_embeddings=c.max_position_embeddings,
            aux_layers=settings.aux_layers,
        )
    )
    head.set_vocabulary(vocabulary)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.embedding[vocabulary])
        # a random layer under the target's full-size norm starts out confidently wrong
        # (cross-entropy 18, uniform is 9): quiet outputs learn faster
        head.norm.weight.copy_(0.3 * target.norm)
        head.midlayer.self_attn.o_proj.weight.mul_(0.1)
        head.midlayer.mlp.down_proj.weight.mul_(0.1)
    return head


COPY_FIT, COPY_BATCH, COPY_BATCHES = 80, 4, 80
"""Sequences for the regressions, sequences a batch, and batches, of :meth:`Run.learn_to_copy`."""


def feature_scale(shards: Shards) -> Tensor:
    """Root mean square of each aux feature: (layers * hidden).

    First positions stay out: their states are up to a thousand times larger than all others.
    """
    sample = torch.cat([s.aux[1:] for s in shards.train[:200]]).float()
    return sample.square().mean(0).sqrt()


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
    def start(cls, target: Target, settings: Settings, shards: Shards) -> Run:
        """A new head, its vocabulary and feature scale taken from the shards there are."""
        size = settings.draft_vocab_size
        vocabulary = draft_vocabulary(shards.train, size, target.embedding)
        run = cls._of(new_head(target, settings, vocabulary), feature_scale(shards), settings)
        run.learn_to_copy(target, shards, settings)
        return run

    def learn_to_copy(self, target: Target, shards: Shards, settings: Settings) -> None:
        """Give the head its copiers before the rest of it learns."""
        rng = random.Random(settings.seed)
        sizes = [COPY_FIT] + [COPY_BATCH] * COPY_BATCHES
        drawn = (rng.sample(shards.train, min(n, len(shards.train))) for n in sizes)
        packs = (pack(sequences, target.embedding, self.scale) for sequences in drawn)
        learn_to_copy(self.head, packs, copiers(self.head))

    @classmethod
    def _of(cls, head: Eagle3Head, scale: Tensor, settings: Settings) -> Run:
        output = list(head.lm_head.parameters())
        layer = [p for name, p in head.named_parameters() if not name.startswith("lm_head")]
        optimizer = torch.optim.AdamW(
            [{"params": layer, "scale": 1.0}, {"params": output, "scale": settings.output_rate}],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
        )
        return cls(head, scale, optimizer)

    @property
    def exportable(self) -> Eagle3Head:
        """A copy of the head that takes the target's states as they are."""
        copied = copy.deepcopy(self.head)
        with torch.no_grad():
            copied.fc.weight.div_(self.scale)
        return copied

    def save(self, path: Path) -> None:
        """Write head, optimiser and counters as one safetensors file, atomically."""
        tensors = {f"head.{k}": v for k, v in self.head.state_dict().items()} | {
            "scale": self.scale
        }
        for name, parameter in self.head.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{name}"] = value
        counters = {k: getattr(self, k) for k in ("batch", "seconds", "rows", "best")}
        told = {"run": json.dumps(counters)}
        atomic_write(path, lambda part: save_file(tensors, part, told))

    @classmethod
    def resume(cls, path: Path, target: Target, settings: Settings) -> Run:
        """Read :meth:`save` back."""
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            counters = json.loads(file.metadata()["run"])
        head = new_head(target, settings, torch.arange(len(tensors["head.d2t"])))
        head.load_state_dict(
            {k.removeprefix("head."): v for k, v in tensors.items() if k.startswith("head.")}
        )
        run = cls._of(head, tensors["scale"], settings)
        for name, parameter in head.named_parameters():
            run.optimizer.state[parameter] = {
                key: tensors[f"optimizer.{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")
            }
        for key, value in counters.items():
            setattr(run, key, value)
        return run

"""Step 3: teach the head the target's next-token distribution, on its own drafts.

The label is soft: the target's distribution over the draft vocabulary, at every unrolled step
(weights fall by :attr:`Settings.step_decay` a step). The rate follows a cosine over *time*, so a
run on a shared machine ends when it was asked to; a pass lists the shards anew, so training can
start while they are being written.
"""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TextColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from decoder.drafting.eagle3 import Eagle3Head, HeadConfig
from pipelines.drafter.acceptance import Acceptance, evaluate
from pipelines.drafter.conversations import (
    Sequence,
    Shards,
    chain_rows,
    draft_vocabulary,
    pack,
)
from pipelines.drafter.unroll import Pack, unroll

Log = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Settings:
    """How to train; the defaults are those of the shipped head."""

    aux_layers: tuple[int, ...] = (2, 15, 28)
    draft_vocab_size: int = 8000
    minutes: float = 30.0
    steps: int = 3
    """Training-time test: how far each chain is unrolled."""
    step_decay: float = 0.8
    later_share: float = 0.4
    """Share of the chains unrolled beyond step 0: most of what they teach at half of the price."""
    prompt_share: float = 0.15
    """Share of prompt positions that start a chain; every answer position does."""
    rows: int = 500
    """Chains a batch, about."""
    learning_rate: float = 2e-3
    output_rate: float = 0.1
    """Learning rate of ``lm_head`` relative to the rest: its rows are the target's own, and what
    they know of rare tokens is lost when they move far on little data."""
    dropout: float = 0.1
    """Of the head's inputs (aux features and embeddings), while training."""
    weight_decay: float = 0.05
    warmup: int = 30
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


def dropped(batch: Pack, share: float) -> Pack:
    """``batch`` with a random ``share`` of its input features zeroed (and the rest scaled up)."""
    return replace(
        batch,
        aux=functional.dropout(batch.aux, share),
        embeds=functional.dropout(batch.embeds, share),
    )


def loss(
    head: Eagle3Head, batch: Pack, rows: Tensor, teacher: Tensor, settings: Settings
) -> Tensor:
    """Cross-entropy to the target's distribution, averaged per step, decayed over steps.

    ``teacher`` (draft vocabulary, hidden) is the target's output matrix on the draft vocabulary.
    """

    def thin(step: int, rows: Tensor) -> Tensor:
        share = settings.later_share if step == 1 else 1.0
        return torch.rand(len(rows)) < share

    total, weight = torch.zeros(()), 0.0
    with torch.no_grad():
        needed = torch.cat([rows + 1 + j for j in range(settings.steps)]).unique()
        needed = needed[needed < len(batch.tokens)]
        wanted = (batch.final[needed] @ teacher.T).softmax(-1)
    for j, step in enumerate(unroll(head, batch, rows, settings.steps, thin)):
        at = torch.searchsorted(needed, step.labels)
        entropy = functional.cross_entropy(step.logits, wanted[at])
        total = total + settings.step_decay**j * entropy
        weight += settings.step_decay**j
    return total / weight


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
        vocabulary = draft_vocabulary(
            shards.train, settings.draft_vocab_size, target.config.vocab_size
        )
        sample = torch.cat([s.aux for s in shards.train[:200]]).float()
        return cls._of(
            new_head(target, settings, vocabulary), sample.square().mean(0).sqrt(), settings
        )

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
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, {"run": json.dumps(counters)})
        partial.rename(path)

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


def _batches(
    sequences: list[Sequence], settings: Settings, rng: random.Random
) -> Iterator[list[Sequence]]:
    """One pass in random order, about ``settings.rows`` chains at a time."""
    order = rng.sample(sequences, len(sequences))
    batch, rows = list[Sequence](), 0.0
    for s in order:
        batch.append(s)
        rows += len(s.tokens) - s.prompt + settings.prompt_share * s.prompt
        if rows >= settings.rows:
            yield batch
            batch, rows = [], 0.0


def _rate(run: Run, settings: Settings) -> float:
    """Learning rate now: a short warm-up by batches, then a cosine over the minutes given."""
    done = min(1.0, run.seconds / (60 * settings.minutes))
    warm = min(1.0, (run.batch + 1) / settings.warmup)
    return settings.learning_rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)


def train(
    target: Target,
    states: Path,
    checkpoint: Path,
    settings: Settings,
    log: Log,
    improved: Callable[[Run, Acceptance], None],
) -> Run:
    """Train for ``settings.minutes``, resuming from ``checkpoint`` where there is one.

    A checkpoint whose minutes are used up starts them again: a new schedule on its weights.

    ``improved`` is called with the run whenever held-out accepted tokens are the best so far.
    """
    shards = Shards(states, settings.aux_layers, settings.heldout_every)
    shards.refresh()
    if checkpoint.exists():
        run = Run.resume(checkpoint, target, settings)
        if run.seconds >= 60 * settings.minutes:
            run.seconds = 0.0
    else:
        run = Run.start(target, settings, shards)
    teacher = target.embedding[run.head.target_ids]
    rng = random.Random(settings.seed + run.batch)
    evaluated = run.seconds

    def judge() -> None:
        heldout = shards.heldout[: settings.heldout_at_most]
        found = evaluate(run.head, heldout, target.embedding, run.scale)
        log(run.batch, found.metrics)
        if found.accepted > run.best:
            run.best = found.accepted
            improved(run, found)
        run.save(checkpoint)

    with Progress(
        *Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}")
    ) as bar:
        task = bar.add_task("training", total=60 * settings.minutes, loss=math.nan)
        while run.seconds < 60 * settings.minutes:
            shards.refresh()
            for sequences in _batches(shards.train, settings, rng):
                begun = time.monotonic()
                batch = pack(sequences, target.embedding, run.scale)
                rows = chain_rows(sequences, settings.prompt_share)
                value = loss(run.head, dropped(batch, settings.dropout), rows, teacher, settings)
                for group in run.optimizer.param_groups:
                    group["lr"] = group["scale"] * _rate(run, settings)
                run.optimizer.zero_grad()
                value.backward()
                torch.nn.utils.clip_grad_norm_(run.head.parameters(), 1.0)
                run.optimizer.step()
                run.batch, run.rows = run.batch + 1, run.rows + len(rows)
                run.seconds += time.monotonic() - begun
                bar.update(task, completed=run.seconds, loss=value.item())
                log(
                    run.batch,
                    {"loss": value.item(), "rows": run.rows, "rate": _rate(run, settings)},
                )
                if run.seconds - evaluated > 60 * settings.evaluate_minutes:
                    judge()
                    evaluated = run.seconds
                if run.seconds >= 60 * settings.minutes:
                    break
    judge()
    return run

"""Teach a head the target's next-token distribution, on its own drafts.

The label is soft: the target's distribution over the draft vocabulary, at every unrolled step. The
rate follows a cosine over *time*: a run on a shared machine ends when it was asked to.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipelines.lab.drafter.chains import chains
from pipelines.lab.drafter.checkpoint import WEIGHTS, HeadConfig
from pipelines.lab.drafter.head import Eagle3Head
from pipelines.lab.drafter.save import save_head
from pipelines.lab.drafter.unroll import (
    AUX_LAYERS,
    Conversations,
    Pack,
    copying_loss,
    learn_to_copy,
    unroll,
)
from pipelines.replay.cache_drafts import common_prefix
from pipelines.reports import Step, atomic_write

STEPS, STEP_DECAY = 3, 0.8
"""Training-time test: how far each chain is unrolled, and how a step's weight falls."""
PROMPT_SHARE, LATER_SHARE = 0.4, 0.35
"""Of prompt positions, those that start a chain, as every answer position does; and of the chains,
those unrolled beyond step 0: most of what they teach at half of the price."""
DROPOUT, WEIGHT_DECAY = 0.05, 0.05
"""The former of the head's inputs (aux features and embeddings)."""
OUTPUT_RATE = 0.3
"""Learning rate of ``lm_head`` relative to the rest: its rows are the target's own, and what they
know of rare tokens is lost when they move far on little data."""
WARMUP, COPYING = 30, 0.3
"""Batches until the learning rate is whole; weight of the copiers' supervised attention at the
start, which falls to 0 with the rate."""
COPY_SIZES = (80, *[4] * 80)
"""Conversations for the regressions, then of each batch, from which the head learns to copy."""
PROMPT_WEIGHT, SOFT_POSITIONS, EVALUATE_SECONDS = 0.2, 7000, 300.0
CARD = Path(__file__).with_name("card.md")
DRAFTED = 4
"""Tokens drafted in a simulated cycle."""


@dataclass(frozen=True)
class Settings:
    """How to train, as the shipped head was. ``rows``: chains of a batch, about; ``dtype``: of
    products; weights, the residual stream and every softmax stay in float32.
    """

    aux_layers: tuple[int, ...] = AUX_LAYERS
    draft_vocab_size: int = 8400
    minutes: float = 60.0
    rows: int = 768
    dtype: str = "float32"
    learning_rate: float = 1.5e-3
    heldout_every: int = 16
    heldout_at_most: int = 48
    seed: int = 0


class Target(NamedTuple):
    """What the head shares with its target: embeddings (= output matrix) and final norm."""

    embedding: Tensor
    norm: Tensor
    config: Any


def draft_vocabulary(some: Conversations, size: int, embedding: Tensor) -> Tensor:
    """The ``size`` tokens most frequent in answers, as far as ``some`` tell: ascending ids.

    To what answers hold are added the target's probabilities at about :data:`SOFT_POSITIONS` of
    their positions, scaled up, which know of rare tokens. Prompts count a little. Ties go to the
    lowest ids: a BPE tokenizer numbers its merges by frequency.
    """
    held, expected = torch.zeros(len(embedding)), torch.zeros(len(embedding))
    for c in some:
        answer = c.tokens[c.prompt :]
        held += torch.bincount(answer, minlength=len(held))
        held += PROMPT_WEIGHT * torch.bincount(c.tokens[: c.prompt], minlength=len(held))
        chosen = c.prompt - 1 + torch.randperm(len(answer))[: -(-SOFT_POSITIONS // len(some))]
        logits = c.final[chosen].float() @ embedding.T
        expected += logits.softmax(-1).sum(0) * len(answer) / max(1, len(chosen))
    order = torch.sort(held + expected, descending=True, stable=True).indices
    return order[:size].sort().values


def new_head(target: Target, settings: Settings, vocabulary: Tensor) -> Eagle3Head:
    """A head for ``target``: a random layer under the target's own final norm and output rows."""
    c = target.config
    torch.manual_seed(settings.seed)
    shape = {f.name: getattr(c, f.name) for f in fields(HeadConfig) if hasattr(c, f.name)} | {
        "draft_vocab_size": len(vocabulary),
        "rope_theta": float(c.rope_parameters["rope_theta"]),
        "aux_layers": settings.aux_layers,
    }
    head = Eagle3Head(HeadConfig(**shape))
    head.set_vocabulary(vocabulary)
    head.lm_head.weight.data.copy_(target.embedding[vocabulary])
    # a random layer under the target's full-size norm starts out confidently wrong (cross-entropy
    # 18, uniform is 9): quiet outputs learn faster
    head.norm.weight.data.copy_(0.3 * target.norm)
    head.midlayer.self_attn.o_proj.weight.data.mul_(0.1)
    head.midlayer.mlp.down_proj.weight.data.mul_(0.1)
    return head


@dataclass
class Run:
    """A training run's state: what a checkpoint holds, and nothing else."""

    head: Eagle3Head
    scale: Tensor
    """(layers * hidden): root mean square of each aux feature; folded into ``fc`` on export."""
    optimizer: torch.optim.AdamW = field(init=False)
    batch: int = 0
    seconds: float = 0.0
    rows: int = 0
    best: float = -1.0

    def __post_init__(self) -> None:
        """Make the optimiser."""
        output = list(self.head.lm_head.parameters())
        layer = [p for name, p in self.head.named_parameters() if not name.startswith("lm_head")]
        groups = [{"params": layer, "scale": 1.0}, {"params": output, "scale": OUTPUT_RATE}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)

    @classmethod
    def start(cls, target: Target, settings: Settings, some: Conversations) -> Run:
        """A new head that has learned to copy; vocabulary and feature scale come from ``some``."""
        vocabulary = draft_vocabulary(some, settings.draft_vocab_size, target.embedding)
        # first states are up to a thousand times larger than all others
        sample = torch.cat([c.aux[1:] for c in some[:200]]).float()
        run = cls(new_head(target, settings, vocabulary), sample.square().mean(0).sqrt())
        rng = random.Random(settings.seed)
        drawn = (rng.sample(some, min(n, len(some))) for n in COPY_SIZES)
        learn_to_copy(run.head, (Pack.of(part, target.embedding, run.scale) for part in drawn))
        return run

    def save(self, path: Path) -> None:
        """Write head, optimiser and counters as one file, whole or not at all."""
        held = {name: getattr(self, name).state_dict() for name in ("head", "optimizer")}
        atomic_write(path, lambda part: torch.save({**vars(self), **held}, part))

    @classmethod
    def resume(cls, path: Path, target: Target, settings: Settings) -> Run:
        """Read :meth:`save` back."""
        held = torch.load(path, weights_only=True)
        head = new_head(target, settings, torch.arange(len(held["head"]["d2t"])))
        head.load_state_dict(held.pop("head"))
        run = cls(head, held.pop("scale"))
        run.optimizer.load_state_dict(held.pop("optimizer"))
        vars(run).update(held)
        return run


def chain_rows(some: Conversations, prompt_share: float) -> Tensor:
    """Rows at which chains start: all that draft for answers, a random share of the others."""
    wanted = []
    for c in some:
        chosen = torch.rand(len(c.tokens)) < prompt_share
        chosen[c.prompt - 1 :] = True
        chosen[0] = chosen[-1] = False  # the first state is like no other, the last has no next
        wanted.append(chosen)
    return torch.cat(wanted).nonzero()[:, 0]


def loss(head: Eagle3Head, batch: Pack, rows: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy to the target's distribution, averaged per step, decayed over steps.

    ``teacher`` (draft vocabulary, hidden) is the target's output matrix on the draft vocabulary.
    """
    total, weight = torch.zeros(()), 0.0
    needed = torch.cat([rows + 1 + j for j in range(STEPS)]).unique()
    needed = needed[needed < len(batch.tokens)]
    wanted = (batch.final[needed] @ teacher.T).float().softmax(-1)
    for j, (_, labels, logits) in enumerate(unroll(head, batch, rows, STEPS, LATER_SHARE)):
        at = torch.searchsorted(needed, labels)
        total = total + STEP_DECAY**j * functional.cross_entropy(logits, wanted[at])
        weight += STEP_DECAY**j
    return total / weight


def _batches(some: Conversations, rows: int, rng: random.Random) -> Iterator[Conversations]:
    """Endless: all of ``some`` in random order, then anew, about ``rows`` chains at a time."""
    batch, chains = Conversations(), 0.0
    while True:
        for c in rng.sample(some, len(some)):
            batch.append(c)
            chains += c.answer + PROMPT_SHARE * c.prompt
            if chains >= rows:
                yield batch
                batch, chains = [], 0.0


def _learn(run: Run, some: Conversations, target: Target, settings: Settings) -> float:
    """One step on ``some``; its loss. Changes ``run``."""
    begun, done = time.monotonic(), min(1.0, run.seconds / (60 * settings.minutes))
    warm = min(1.0, (run.batch + 1) / WARMUP)
    rate = settings.learning_rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
    guided = COPYING * rate / settings.learning_rate
    batch = Pack.of(some, target.embedding, run.scale)
    rows, teacher = chain_rows(some, PROMPT_SHARE), target.embedding[run.head.target_ids]
    aux, embeds = (functional.dropout(x, DROPOUT) for x in (batch.aux, batch.embeds))
    with torch.autocast("cpu", torch.bfloat16, enabled=settings.dtype == "bfloat16"):
        value = loss(run.head, replace(batch, aux=aux, embeds=embeds), rows, teacher)
        guide = copying_loss(run.head, batch) if guided > 0.01 else torch.zeros(())
    for group in run.optimizer.param_groups:
        group["lr"] = group["scale"] * rate
    run.optimizer.zero_grad()
    (value + guided * guide).backward()
    torch.nn.utils.clip_grad_norm_(run.head.parameters(), 1.0)
    run.optimizer.step()
    run.batch, run.rows = run.batch + 1, run.rows + len(rows)
    run.seconds += time.monotonic() - begun
    return value.item()


class Acceptance(NamedTuple):
    """How greedy drafts fare on held-out greedy answers: accepted tokens a cycle, and by place."""

    by_step: tuple[float, ...]
    """Share of drafts at each place that match, given that all before them did."""
    accepted: float
    cycles: int


@torch.inference_mode()
def evaluate(head: Eagle3Head, some: Conversations, embedding: Tensor, scale: Tensor) -> Acceptance:
    """Simulate cycles of :data:`DRAFTED` greedy drafts over the greedy ones of ``some``."""
    reached, matched, cycles = [0] * DRAFTED, [0] * DRAFTED, 0
    words = nn.Embedding.from_pretrained(embedding)
    for c in (c for c in some if c.greedy):
        rows = torch.arange(c.prompt - 1, len(c.tokens) - 2)
        drafts = chains(head, words, c.tokens, c.aux.float() / scale, rows, DRAFTED).tolist()
        answer, at = c.tokens[c.prompt + 1 :].tolist(), 0
        while at < len(answer):
            wanted = answer[at : at + DRAFTED]
            n = common_prefix(drafts[at], wanted)
            for place in range(min(n + 1, len(wanted))):
                reached[place] += 1
                matched[place] += place < n
            cycles, at = cycles + 1, at + n + 1
    by_step = tuple(m / max(1, r) for m, r in zip(matched, reached, strict=True))
    return Acceptance(by_step, sum(matched) / max(1, cycles), cycles)


def train(
    target: Target,
    there: Conversations,
    checkpoint: Path,
    settings: Settings,
    step: Step,
    judged: Callable[[Run, Acceptance, bool], None],
) -> Run:
    """Train for ``settings.minutes``, resuming from ``checkpoint`` where there is one.

    A checkpoint whose minutes are used up starts them again: a new schedule on its weights.
    ``judged`` is told of each measurement on held-out conversations, and whether it is the best.
    """
    every, whole = settings.heldout_every, 60 * settings.minutes
    some = [c for place, c in enumerate(there) if place % every != every // 2]
    heldout = there[every // 2 :: every][: settings.heldout_at_most]
    if checkpoint.exists():
        run = Run.resume(checkpoint, target, settings)
        run.seconds = run.seconds if run.seconds < whole else 0.0
    else:
        run = Run.start(target, settings, some)
    evaluated, rng = run.seconds, random.Random(settings.seed + run.batch)
    for batch in _batches(some, settings.rows, rng):
        value = _learn(run, batch, target, settings)
        step(f"training (loss {value:.3f}), seconds", round(run.seconds), round(whole))
        if run.seconds - evaluated > EVALUATE_SECONDS or run.seconds >= whole:
            found, evaluated = evaluate(run.head, heldout, target.embedding, run.scale), run.seconds
            best, run.best = found.accepted > run.best, max(run.best, found.accepted)
            judged(run, found, best)
            run.save(checkpoint)
        if run.seconds >= whole:
            break
    return run


def export(
    run: Run, path: Path, settings: Settings, there: Conversations, found: Acceptance
) -> None:
    """Write the head of ``run`` and its card, which tells what it was made from."""
    head = copy.deepcopy(run.head)
    head.fc.weight.data.div_(run.scale)  # the head that ships takes the target's states as they are
    save_head(head, path)
    card = CARD.read_text(encoding="utf-8").format(
        run=run,
        megabytes=(path / WEIGHTS).stat().st_size / 1e6,
        conversations=len(there),
        tokens=sum(len(c.tokens) for c in there),
        answers=sum(c.answer for c in there),
        settings=settings,
        found=found,
        drafted=DRAFTED,
        by_step=", ".join(f"{a:.2f}" for a in found.by_step),
    )
    atomic_write(path / "README.md", lambda part: part.write_text(card, encoding="utf-8"))

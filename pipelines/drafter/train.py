"""Teach the head the target's next-token distribution, on its own drafts.

The label is soft: the target's distribution over the draft vocabulary, at every unrolled step. The
rate follows a cosine over *time*, so a run on a shared machine ends when it was asked to.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from decoder.drafting.eagle3 import Eagle3Head
from pipelines.drafter.acceptance import Acceptance, evaluate
from pipelines.drafter.copying import copying_loss
from pipelines.drafter.run import Run, Settings, Target
from pipelines.drafter.shards import Conversation
from pipelines.drafter.unroll import Pack, unroll
from pipelines.progress import Step

STEPS, STEP_DECAY = 3, 0.8
"""Training-time test: how far each chain is unrolled, and how a step's weight falls."""
LATER_SHARE = 0.35
"""Share of the chains unrolled beyond step 0: most of what they teach at half of the price."""
PROMPT_SHARE = 0.4
"""Share of prompt positions that start a chain; every answer position does."""
DROPOUT = 0.05
"""Of the head's inputs (aux features and embeddings)."""
WARMUP = 30
"""Batches until the learning rate is whole."""
COPYING = 0.3
"""Weight of the copiers' supervised attention at the start; falls to 0 with the rate."""
EVALUATE_SECONDS = 300.0


def chain_rows(some: list[Conversation], prompt_share: float) -> Tensor:
    """Rows of their pack at which chains start: every one whose draft is for the answer, and a
    random ``prompt_share`` of the others.
    """
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

    def thin(step: int, rows: Tensor) -> Tensor:
        return torch.rand(len(rows)) < (LATER_SHARE if step == 1 else 1.0)

    total, weight = torch.zeros(()), 0.0
    with torch.no_grad():
        needed = torch.cat([rows + 1 + j for j in range(STEPS)]).unique()
        needed = needed[needed < len(batch.tokens)]
        wanted = (batch.final[needed] @ teacher.T).float().softmax(-1)
    for j, (_, labels, logits) in enumerate(unroll(head, batch, rows, STEPS, thin)):
        at = torch.searchsorted(needed, labels)
        total = total + STEP_DECAY**j * functional.cross_entropy(logits, wanted[at])
        weight += STEP_DECAY**j
    return total / weight


def _batches(
    some: list[Conversation], rows: int, rng: random.Random
) -> Iterator[list[Conversation]]:
    """Endless: all of ``some`` in random order, then anew, about ``rows`` chains at a time."""
    batch, chains = list[Conversation](), 0.0
    while True:
        for c in rng.sample(some, len(some)):
            batch.append(c)
            chains += len(c.tokens) - c.prompt + PROMPT_SHARE * c.prompt
            if chains >= rows:
                yield batch
                batch, chains = [], 0.0


def _rate(run: Run, settings: Settings) -> float:
    """Share of the learning rate now: a short warm-up by batches, then a cosine over the time."""
    done = min(1.0, run.seconds / (60 * settings.minutes))
    warm = min(1.0, (run.batch + 1) / WARMUP)
    return settings.learning_rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)


def _learn(run: Run, some: list[Conversation], target: Target, settings: Settings) -> float:
    """One step on ``some``; its loss. Changes ``run``."""
    begun, rate = time.monotonic(), _rate(run, settings)
    batch = Pack.of(some, target.embedding, run.scale)
    rows = chain_rows(some, PROMPT_SHARE)
    aux, embeds = (functional.dropout(x, DROPOUT) for x in (batch.aux, batch.embeds))
    guided = COPYING * rate / settings.learning_rate
    with torch.autocast("cpu", torch.bfloat16, enabled=settings.dtype == "bfloat16"):
        teacher = target.embedding[run.head.target_ids]
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


def train(
    target: Target,
    there: list[Conversation],
    checkpoint: Path,
    settings: Settings,
    step: Step,
    judged: Callable[[Run, Acceptance, bool], None],
) -> Run:
    """Train for ``settings.minutes``, resuming from ``checkpoint`` where there is one.

    A checkpoint whose minutes are used up starts them again: a new schedule on its weights.

    Args:
        judged: told of each measurement on held-out conversations, and whether its accepted tokens
            are the best so far.
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

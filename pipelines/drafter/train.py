"""Step 3: teach the head the target's next-token distribution, on its own drafts.

The label is soft: the target's distribution over the draft vocabulary, at every unrolled step
(weights fall by :attr:`Settings.step_decay` a step). The rate follows a cosine over *time*, so a
run on a shared machine ends when it was asked to; a pass lists the shards anew, so training can
start while they are being written.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from decoder.drafting.eagle3 import Eagle3Head
from pipelines.drafter.acceptance import Acceptance, evaluate
from pipelines.drafter.conversations import chain_rows, pack
from pipelines.drafter.copying import copiers, copying_loss
from pipelines.drafter.run import Run, Settings, Target
from pipelines.drafter.shards import Sequence, Shards
from pipelines.drafter.unroll import Pack, unroll
from pipelines.progress import Step

Log = Callable[[int, dict[str, float]], None]


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
        wanted = (batch.final[needed] @ teacher.T).float().softmax(-1)
    for j, step in enumerate(unroll(head, batch, rows, settings.steps, thin)):
        at = torch.searchsorted(needed, step.labels)
        entropy = functional.cross_entropy(step.logits, wanted[at])
        total = total + settings.step_decay**j * entropy
        weight += settings.step_decay**j
    return total / weight


ROUND = 256
"""Sequences drawn at once; then the shards are listed anew."""


def _batches(
    sequences: list[Sequence], seen: Counter[int], settings: Settings, rng: random.Random
) -> Iterator[list[Sequence]]:
    """A random :data:`ROUND` of ``sequences``, about ``settings.rows`` chains at a time.

    What was ``seen`` (place in ``sequences`` -> times; counted up) less often comes more likely.
    """
    chance = [rng.random() ** (1 + seen[i]) for i in range(len(sequences))]
    drawn = sorted(range(len(sequences)), key=chance.__getitem__, reverse=True)[:ROUND]
    rng.shuffle(drawn)
    batch, rows = list[Sequence](), 0.0
    for i in drawn:
        s = sequences[i]
        seen[i] += 1
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
    step: Step,
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
    evaluated, seen = run.seconds, Counter[int]()
    chosen = copiers(run.head)

    def judge() -> None:
        heldout = shards.heldout[: settings.heldout_at_most]
        found = evaluate(run.head, heldout, target.embedding, run.scale)
        log(run.batch, found.metrics)
        if found.accepted > run.best:
            run.best = found.accepted
            improved(run, found)
        run.save(checkpoint)

    while run.seconds < 60 * settings.minutes:
        shards.refresh()
        for sequences in _batches(shards.train, seen, settings, rng):
            begun = time.monotonic()
            batch = pack(sequences, target.embedding, run.scale)
            rows = chain_rows(sequences, settings.prompt_share)
            noisy = dropped(batch, settings.dropout)
            guided = settings.copying * _rate(run, settings) / settings.learning_rate
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.dtype == "bfloat16"):
                value = loss(run.head, noisy, rows, teacher, settings)
                guide = copying_loss(run.head, batch, chosen) if guided > 0.01 else torch.zeros(())
            for group in run.optimizer.param_groups:
                group["lr"] = group["scale"] * _rate(run, settings)
            run.optimizer.zero_grad()
            (value + guided * guide).backward()
            torch.nn.utils.clip_grad_norm_(run.head.parameters(), 1.0)
            run.optimizer.step()
            run.batch, run.rows = run.batch + 1, run.rows + len(rows)
            run.seconds += time.monotonic() - begun
            whole = round(60 * settings.minutes)
            step(f"training (loss {value.item():.3f}), seconds", round(run.seconds), whole)
            log(
                run.batch,
                {
                    "loss": value.item(),
                    "copying": guide.item(),
                    "rows": run.rows,
                    "rate": _rate(run, settings),
                },
            )
            if run.seconds - evaluated > 60 * settings.evaluate_minutes:
                judge()
                evaluated = run.seconds
            if run.seconds >= 60 * settings.minutes:
                break
    judge()
    return run

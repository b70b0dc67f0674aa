"""``hvd train-drafter``: the steps of :mod:`pipelines.drafter`, over one directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from decoder.contracts.errors import ModelError
from pipelines import machine
from pipelines.progress import Step

if TYPE_CHECKING:
    from pipelines.drafter.export import Provenance
    from pipelines.drafter.run import Run, Settings

Stage = Literal["compose", "written", "train"]

COMPOSED, WRITTEN = 60000, 70000
"""First shard of each."""


def make_drafter(
    model: Path,
    folder: Path,
    out: Path,
    tokens: int,
    minutes: float,
    only: Stage | None,
    step: Step,
    console: Console,
) -> None:
    """Let the target write and read, train a head on its states; each step goes on where it ended.

    Args:
        folder: holds ``states/`` and the training checkpoint.
        out: where the best head is exported to.
        tokens: answer tokens that the target writes.
        only: one of the steps instead of all.
        console: told how good the head is, each time that is looked up.

    Raises:
        ModelError: a step's input is missing.
    """
    import torch

    from pipelines.drafter.run import Settings

    states, name = folder / "states", machine.serving_dtype(machine.cpu_flags())
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    if only in (None, "compose"):
        from pipelines.drafter.compose import compose

        compose(model, states, tokens, dtype, step, first_shard=COMPOSED)
    if only in (None, "written"):
        from pipelines.drafter.written import read

        read(model, states, dtype, step, first_shard=WRITTEN)
    if only in (None, "train"):
        if not any(states.glob("*.safetensors")):
            raise ModelError(f"no states in {states}: run hvd train-drafter --only compose first.")
        _train(model, folder, out, Settings(minutes=minutes, dtype=name), step, console)


def _train(
    model: Path, folder: Path, out: Path, settings: Settings, step: Step, console: Console
) -> None:
    from pipelines.drafter.acceptance import Acceptance
    from pipelines.drafter.export import export
    from pipelines.drafter.run import Target
    from pipelines.drafter.train import train

    def improved(run: Run, found: Acceptance) -> None:
        made = provenance(folder / "states", run, (settings,))
        export(run.exportable, out, made, found)
        console.print(f"{out}: {found.accepted:.2f} accepted tokens a cycle after {run.batch}")

    def log(batch: int, metrics: Mapping[str, float]) -> None:
        if "loss" not in metrics:  # a measurement, not one of thousands of batches
            shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
            console.print(f"batch {batch}: {shown}")

    states, checkpoint = folder / "states", folder / "head.safetensors"
    train(Target.load(model), states, checkpoint, settings, log, step, improved)


def provenance(states: Path, run: Run, runs: tuple[Settings, ...]) -> Provenance:
    """What the shards hold by now, and how much of it was used."""
    from safetensors import safe_open

    from pipelines.drafter.export import Provenance

    tokens = answers = 0
    sources = Counter[str]()
    for shard in sorted(states.glob("*.safetensors")):
        with safe_open(shard, "np") as file:
            lengths, prompts = file.get_tensor("lengths"), file.get_tensor("prompts")
        number = int(shard.name[:5])
        origin = "composed" if number < WRITTEN else "written"
        sources[origin] += len(lengths)
        tokens += int(lengths.sum())
        answers += int((lengths - prompts).sum())
    return Provenance(dict(sources), tokens, answers, run.batch, run.rows, runs)

"""``hvd train-drafter``: the four steps of :mod:`pipelines.drafter`, over one directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from decoder.contracts.errors import ModelError
from pipelines import machine

if TYPE_CHECKING:
    from pipelines.drafter.export import Provenance
    from pipelines.drafter.train import Run, Settings

Step = Literal["generate", "extract", "train"]


def make_drafter(
    model: Path, folder: Path, out: Path, tokens: int, minutes: float, only: Step | None
) -> None:
    """Generate answers, extract states, train a head; each step resumes where it stopped.

    Args:
        folder: holds ``generations.jsonl``, ``states/`` and the training checkpoint.
        out: where the best head is exported to.
        only: one step instead of all.

    Raises:
        ModelError: a step's input is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generations, states = folder / "generations.jsonl", folder / "states"
    if only in (None, "generate"):
        from pipelines.drafter.generate import generate

        generate(model, generations, tokens, machine.serving_dtype(machine.cpu_flags()))
    if only in (None, "extract"):
        if not generations.exists():
            raise ModelError(f"no {generations}: run hvd train-drafter --only generate first.")
        from pipelines.drafter.extract import extract

        extract(model, generations, states)
    if only in (None, "train"):
        if not any(states.glob("*.safetensors")):
            raise ModelError(f"no states in {states}: run hvd train-drafter --only extract first.")
        _train(model, folder, out, minutes)


def _train(model: Path, folder: Path, out: Path, minutes: float) -> None:
    from pipelines.drafter.acceptance import Acceptance
    from pipelines.drafter.export import export
    from pipelines.drafter.train import Settings, Target, train

    settings, console = Settings(minutes=minutes), Console(stderr=True)

    def improved(run: Run, found: Acceptance) -> None:
        made = _provenance(folder / "states", run, settings)
        export(run.exportable, out, made, found)
        console.print(f"{out}: {found.accepted:.2f} accepted tokens a cycle after {run.batch}")

    def log(batch: int, metrics: Mapping[str, float]) -> None:
        if "loss" not in metrics:  # a measurement, not one of thousands of batches
            shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
            console.print(f"batch {batch}: {shown}")

    train(
        Target.load(model), folder / "states", folder / "head.safetensors", settings, log, improved
    )


def _provenance(states: Path, run: Run, settings: Settings) -> Provenance:
    """What the shards hold by now, and how much of it was used."""
    from safetensors import safe_open

    from pipelines.drafter.export import Provenance

    sequences = tokens = answers = 0
    for shard in states.glob("*.safetensors"):
        with safe_open(shard, "np") as file:
            lengths, prompts = file.get_tensor("lengths"), file.get_tensor("prompts")
        sequences += len(lengths)
        tokens += int(lengths.sum())
        answers += int((lengths - prompts).sum())
    sources = {"answered by the target": sequences}
    return Provenance(sources, tokens, answers, run.batch, run.rows, (settings,))

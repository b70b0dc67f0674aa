"""``hvd bootstrap``: trace files in, a bundle or the figures of a check out, progress meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from decoder.payoff.token_classes import token_classes_of
from decoder.policy.first import read_first
from decoder.policy.probes import to_bytes
from decoder.settings import WorkerSettings
from learner.rows import joined
from pipelines.embedded import load_tokenizer
from pipelines.first.check import Compared, compare
from pipelines.first.make import GENERATIONS, Sample, card, fit, over_counting, sample, without
from pipelines.first.sets import ALLOWED, TraceSet, files_of, read_set
from pipelines.first.tokenizer import trained_tokenizer
from pipelines.progress import Shown
from pipelines.reports import atomic_write

CONTEXT: Final = 16_384
"""Tokens that a prompt and its output may have."""


@dataclass(frozen=True)
class Asked:
    """What to learn from.

    ``licences`` says what may be learned from, not what a policy may be checked on. ``tokenizer``
    is a checkpoint directory or hub name, None for the embedded model's.
    """

    paths: Sequence[Path]
    licences: tuple[str, ...] = ALLOWED
    generations: int = GENERATIONS
    tokenizer: str | None = None


class Reader:
    """Reads sets with one tokenizer, and shows that it does."""

    def __init__(self, tokenizer: Any, shown: Shown) -> None:
        self.classes: FloatArray = token_classes_of(tokenizer)
        self._tokenizer, self._shown = tokenizer, shown

    def sets(self, files: Sequence[Path], licences: tuple[str, ...] | None) -> list[TraceSet]:
        """The sets in ``files``, those without a generation under ``licences`` left out."""
        found = [
            read_set(file, self._tokenizer, licences, CONTEXT, self._shown.step) for file in files
        ]
        return [each for each in found if each.traces]


def make(asked: Asked, out: Path, console: Console) -> Policy:
    """Make a first policy, score it with each set left out, and write it to ``out`` at once.

    Raises:
        TraceError: a file cannot be read, or the licences leave fewer than two sets.
        ModelError: there is no such tokenizer.
    """
    settings, scores = WorkerSettings.load(), {}
    with Shown(console) as shown:
        reader = Reader(load_tokenizer(asked.tokenizer), shown)
        samples = _samples(asked, reader, settings, shown)
        for done, one in enumerate(samples):
            shown.step(f"leaving out {one.name}", done, len(samples))
            rest = without(samples, one.name)
            scores[one.name] = over_counting(one, rest, reader.classes, settings)
        shown.step("training on all", len(samples), len(samples))
        policy = fit(joined([s.rows for s in samples]))
    made_of = card(samples, asked.tokenizer or "the embedded model's", scores)
    policy = replace(policy, provenance=made_of)
    atomic_write(out, lambda part: part.write_bytes(to_bytes(policy)))
    return policy


def _samples(asked: Asked, reader: Reader, settings: WorkerSettings, shown: Shown) -> list[Sample]:
    sets = reader.sets(files_of(asked.paths), asked.licences)
    if len(sets) < 2:
        allowed = ", ".join(asked.licences)
        raise TraceError(
            f"{len(sets)} of the trace files have rows whose license is {allowed}: two are needed, "
            "so that one can be left out. Name more files, or allow more with --licence."
        )
    samples = []
    for done, each in enumerate(sets):
        shown.step(f"decoding {each.name}", done, len(sets))
        samples.append(sample(each, asked.generations, reader.classes, settings))
    return samples


def check(
    asked: Asked, bundle: Path, accepts: float, vocabulary: int | None, console: Console
) -> list[Compared]:
    """Compare a first policy with refits and with counting, on every set of ``asked``.

    A set that the bundle was made of is left out of a training of its own, from the same
    generations; all others are decoded by the bundle itself.

    Args:
        accepts: mean accepted length of model drafts where none was recorded; 0 for no drafter.
        vocabulary: decode with a tokenizer of so many entries, trained on the texts at hand,
            instead of the one that the policy was made with.

    Raises:
        TraceError: a file cannot be read, or holds too little.
        PolicyRefused: the bundle is missing, or no sound first policy.
    """
    policy, settings, files = read_first(bundle), WorkerSettings.load(), files_of(asked.paths)
    inside = {each["name"] for each in policy.provenance.get("sets", [])}
    made_of = [file for file in files if file.stem in inside]
    found: list[Compared] = []
    with Shown(console) as shown:
        known = Reader(load_tokenizer(asked.tokenizer), shown)
        samples = _samples(replace(asked, paths=made_of), known, settings, shown) if made_of else []
        reader = (
            known if vocabulary is None else Reader(trained_tokenizer(files, vocabulary), shown)
        )
        for done, each in enumerate(reader.sets(files, None)):
            shown.step(f"comparing on {each.name}", done, len(files))
            left_out = each.name in inside
            first = without(samples, each.name) if left_out else policy
            found.append(compare(each, first, left_out, reader.classes, settings, accepts))
    return found


def figures(found: Sequence[Compared], accepts: float, vocabulary: int | None) -> dict[str, Any]:
    """All figures of a check. JSON-ready."""
    return {
        "sets": [c.as_dict() for c in found],
        "of_refit": {"mean": _mean(found, "of_refit"), "least": min(c.of_refit for c in found)},
        "over_counting": {
            "mean": _mean(found, "over_counting"),
            "least": min(c.over_counting for c in found),
        },
        "settings": {"model_accepts": accepts, "vocabulary": vocabulary},
    }


def _mean(found: Sequence[Compared], name: str) -> float:
    return float(np.mean([getattr(c, name) for c in found]))


def table(found: Sequence[Compared]) -> Table:
    """A check's figures, a row a set."""
    shown = Table(caption="Tokens in the time of a plain step, nominal costs. Early: 50 requests.")
    shown.add_column("set", overflow="fold", min_width=12)
    for heading in ("requests", "refit", "first", "of refit", "early", "over counting"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for c in found:
        shown.add_row(
            c.name,
            str(c.generations),
            f"{c.rates['refit']:.2f}",
            f"{c.rates['first']:.2f}",
            f"{c.of_refit:.3f}",
            f"{c.early['first']:.2f}",
            f"{c.over_counting:.3f}",
        )
    shown.add_row(
        "mean", "", "", "", f"{_mean(found, 'of_refit'):.3f}", "",
        f"{_mean(found, 'over_counting'):.3f}",
    )  # fmt: skip
    return shown

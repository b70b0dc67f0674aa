"""The whole of ``hvd replay``: read, split, replay, train, tune, simulate, measure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import Kind, Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from decoder.engines.reference.method import Method, method
from decoder.policy.estimate import predict
from decoder.policy.rule import MODEL, NONE
from decoder.settings import WorkerSettings
from pipelines.progress import Step
from pipelines.replay import survival, walks
from pipelines.replay.engine import hybrid, simulate
from pipelines.replay.foresight import Foresight, foresee
from pipelines.replay.measure import ORACLE, Report, errors
from pipelines.replay.split import Shares, limited, split
from pipelines.replay.states import Progress, States, every_token
from pipelines.replay.tally import Tally
from pipelines.replay.traces import Notice, Trace, read

FREQUENCY: Final = 2.0
"""Threshold of the frequency hybrid that nobody tuned, in tokens of counted score."""


@dataclass(frozen=True)
class Plan:
    """What to replay and how.

    ``cycles`` trains and measures on the states of simulated cycles (what a server sees) and not on
    every token position (the paper). ``model_accepts`` is the model draft's mean accepted length
    where a recording does not hold it. ``limit`` counts generations of each file. With ``policy``
    nothing is trained.
    """

    shares: Shares = field(default_factory=Shares)
    cycles: bool = False
    model_accepts: float = 2.2
    limit: int | None = None
    context: int = 16_384
    policy: Policy | None = None
    kind: Kind = "payoff"


@dataclass(frozen=True)
class Side:
    """The training or the test sessions of a file. ``seen`` is what a network learns from, or is
    measured on; ``states`` and ``field`` are of every token position, and took ``seconds`` of
    processor time to make."""

    traces: list[Trace]
    states: States
    field: walks.Field
    seen: States
    seconds: float


@dataclass(frozen=True)
class Replayed:
    """One file, read and replayed."""

    name: str
    warm_up: list[Trace]
    train: Side
    test: Side
    left_out: dict[str, int]


class Study:
    """Replays files with one tokenizer, and measures policies on them.

    Attributes:
        notices: what was left out of the files read so far.
    """

    def __init__(self, plan: Plan, tokenizer: Any, token_classes: FloatArray, step: Step) -> None:
        settings = WorkerSettings.load()
        if not 0 <= plan.model_accepts <= settings.model_draft_tokens:
            raise TraceError(
                f"--model-accepts {plan.model_accepts:g}: a model draft has "
                f"{settings.model_draft_tokens} tokens, so give 0 to {settings.model_draft_tokens} "
                "or set HVD_WORKER_MODEL_DRAFT_TOKENS."
            )
        self.notices: list[Notice] = []
        self._plan, self._settings = plan, settings
        self._tokenizer, self._classes, self._step = tokenizer, token_classes, step

    def replay(self, path: Path) -> Replayed | None:
        """Read and replay one file; None, with a notice, if it holds too little to measure.

        Raises:
            TraceError: it cannot be read.
        """
        plan = self._plan
        reading = read(
            path,
            self._tokenizer,
            plan.context,
            lambda done, whole: self._step(f"reading {path.name}", done, whole),
        )
        self.notices += reading.notices
        parts = limited(split(reading.traces, plan.shares), plan.limit, plan.shares)
        if not parts.train or not parts.test:
            side = "test" if parts.train else "training"
            self.notices.append(
                Notice("small", f"{path}: left out, none of its sessions falls to {side}.")
            )
            return None
        warm = sum(len(t.output) for t in parts.warm_up)
        whole = 2 * warm + sum(len(t.output) for t in [*parts.train, *parts.test])
        done = 0

        def progress(tokens: int) -> None:
            nonlocal done
            done += tokens
            self._step(f"replaying {path.name}", done, whole)

        return Replayed(
            path.stem,
            parts.warm_up,
            self._side(parts.train, parts.warm_up, progress),
            self._side(parts.test, parts.warm_up, progress),
            dict(Counter(n.reason for n in reading.notices)),
        )

    def _side(self, traces: list[Trace], warm_up: list[Trace], progress: Progress) -> Side:
        mean, k = self._plan.model_accepts, self._settings.model_draft_tokens
        began = time.process_time()

        def warmed() -> None:
            nonlocal began
            began = time.process_time()

        states = every_token(traces, warm_up, self._classes, self._settings, progress, warmed)
        seconds = time.process_time() - began
        seen = states
        if self._plan.cycles:  # what a server sees that decodes by the frequency hybrid
            by = hybrid("frequency", method("frequency", threshold=FREQUENCY).policy)
            _, seen = simulate(traces, warm_up, by, self._classes, self._settings, mean)
        return Side(traces, states, walks.field_of(traces, states, mean, k), seen, seconds)

    def trained(self, files: Sequence[Replayed]) -> Foresight:
        """The paper's network, trained on the training sessions of all ``files``; or the policy
        that was given.

        Raises:
            TraceError: too few states.
        """
        given = self._plan.policy
        if given is None and self._plan.kind == "survival":
            parts = [survival.Part(f.train.traces, f.warm_up) for f in files]
            mean = self._plan.model_accepts
            given, _ = survival.learn(parts, self._classes, self._settings, mean, "replay")
        if given is not None:
            return Foresight(given, (given, given))
        return foresee([(f.train.traces, f.train.seen) for f in files], self._step)

    def measured(self, file: Replayed, found: Foresight) -> Report:
        """Simulate every method on the file's test sessions, each threshold as it comes and tuned
        on the training sessions."""
        policy = found.policy
        field, known = file.test.field, file.train.states.rows.features
        counted = file.test.states.rows.features[:, walks.SCORE]
        matched = file.test.states.rows.features[:, walks.MATCH]
        thresholds = {
            "frequency": FREQUENCY,
            "frequency_tuned": walks.tune(file.train.field, known[:, walks.SCORE]),
            "arctic": float(self._settings.model_draft_tokens),
        }
        tallies: dict[str, Tally] = {
            "none": walks.walk(field, np.full(len(field.row), NONE, np.int8)),
            "model": walks.walk(field, walks.arms_at(field, counted, float("inf"))),
            "model_best": self._best_length(field),
            "match4": walks.walk(field, walks.arms_at(field, matched, 4.0)),
            "buckets": self._decode(file.test.traces, file.warm_up, method("buckets"), file.name),
            "suffix": walks.walk(walks.without_model(field), walks.arms_at(field, counted, 0.0)),
        }
        for name, threshold in thresholds.items():
            tallies[name] = walks.walk(field, walks.arms_at(field, counted, threshold))
        hybrids = {"hybrid": policy}
        if policy.kind != "survival":
            best = found.tune(
                file.train.traces,
                lambda traces, by: self._decode(traces, [], hybrid("hybrid", by), file.name),
            )
            hybrids["hybrid_tuned"] = replace(policy, threshold=best)
            thresholds |= {name: p.threshold for name, p in hybrids.items()}
        for name, chosen in hybrids.items():
            by = hybrid(name, chosen)
            tallies[name] = self._decode(file.test.traces, file.warm_up, by, file.name)
        tallies[ORACLE] = walks.walk(field, *walks.oracle(field))
        return Report(
            file.name,
            len({t.session for t in file.test.traces}),
            len(file.test.traces),
            sum(len(t.output) for t in file.test.traces),
            len(file.train.states) + len(file.test.states),
            file.train.seconds + file.test.seconds,
            errors(predict(policy, file.test.seen.rows.features), file.test.seen.rows),
            tallies,
            thresholds,
            file.left_out,
        )

    def _best_length(self, field: walks.Field) -> Tally:
        """The model draft in every cycle, at the length that makes most of it."""
        always = np.full(len(field.row), MODEL, np.int8)
        lengths = range(1, self._settings.model_draft_tokens + 1)
        return max((walks.walk(walks.shorter(field, k), always) for k in lengths), key=_rate)

    def _decode(
        self, traces: Sequence[Trace], warm_up: Sequence[Trace], by: Method, name: str
    ) -> Tally:
        whole = sum(len(t.output) for t in [*warm_up, *traces])
        what, done = f"decoding {name} from {by.policy.threshold:g}", 0

        def progress(committed: int) -> None:
            nonlocal done
            done += committed
            self._step(what, done, whole)

        accepts = self._plan.model_accepts
        cycles, _ = simulate(
            traces, warm_up, by, self._classes, self._settings, accepts, progress=progress
        )
        return cycles.tally()


def _rate(tally: Tally) -> float:
    return tally.rate

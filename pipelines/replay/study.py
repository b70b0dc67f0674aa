"""The whole of ``hvd replay`` for trace files: read, split, train, tune, decode, measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from decoder.contracts.bundle import Kind, Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from decoder.engines.reference.method import Method, method
from decoder.policy.pricing import NOMINAL
from decoder.settings import WorkerSettings
from learner.rows import joined
from pipelines.progress import Step
from pipelines.replay.cycles import Tally
from pipelines.replay.engine import Simulator, hybrid
from pipelines.replay.hindsight import NEVER, Prices, Walker, above, oracle
from pipelines.replay.measure import ORACLE, Report
from pipelines.replay.split import Parts, Shares, limited, split
from pipelines.replay.traces import Notice, Trace, read
from pipelines.replay.training import paper, survival, taught, teachers

FREQUENCY: Final = 2.0
"""Threshold of the frequency hybrid that nobody tuned, in tokens of counted score."""
SHARES: Final = Shares()
CONTEXT: Final = 16_384
"""Tokens that a prompt and its output may have."""


@dataclass(frozen=True)
class Plan:
    """What to replay and how.

    ``model_accepts`` is the model draft's mean accepted length where a recording does not hold it.
    ``limit`` counts generations of each file. With ``policy`` nothing is trained.
    """

    model_accepts: float = 2.2
    limit: int | None = None
    policy: Policy | None = None
    kind: Kind = "payoff"


@dataclass(frozen=True)
class File:
    """One file, read and split."""

    name: str
    parts: Parts
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
        self._plan, self._settings, self._tokenizer, self._step = plan, settings, tokenizer, step
        self._simulator = Simulator(token_classes, settings, plan.model_accepts)

    def read(self, path: Path) -> File | None:
        """Read one file; None, with a notice, if it holds too little to measure.

        Raises:
            TraceError: it cannot be read.
        """
        told = partial(self._step, f"reading {path.name}")
        reading = read(path, self._tokenizer, CONTEXT, told)
        self.notices += reading.notices
        parts = limited(split(reading.traces, SHARES), self._plan.limit, SHARES)
        if not parts.train or not parts.test:
            side = "test" if parts.train else "training"
            self.notices.append(
                Notice("small", f"{path}: left out, none of its sessions falls to {side}.")
            )
            return None
        return File(path.stem, parts, dict(Counter(n.reason for n in reading.notices)))

    def trained(self, files: Sequence[File]) -> Policy:
        """The policy of the plan's kind that the training sessions of all ``files`` make; or the
        policy that was given.

        Raises:
            TraceError: too few labelled drafts.
        """
        if self._plan.policy is not None:
            return self._plan.policy
        parts = [file.parts for file in files]
        if self._plan.kind == "survival":
            rows = [taught(self._simulator, p.train, p.warm_up) for p in parts]
            return survival(joined(rows), "replay")
        counting = teachers()[1]
        seen = [self._simulator.decode(p.train, counting, p.warm_up)[1] for p in parts]
        return paper(joined(seen), "replay", self._step)

    def measured(self, file: File, policy: Policy) -> Report:
        """Decode the file's test sessions in every way, with one threshold of counting tuned on the
        training sessions."""
        parts, settings, k = file.parts, self._settings, self._settings.model_draft_tokens
        test = Walker(parts.test, parts.warm_up, settings, self._simulator.model_mean)
        train = Walker(parts.train, parts.warm_up, settings, self._simulator.model_mean)
        self._step(f"tuning on {file.name}", 0, 1)
        thresholds = {
            "frequency": FREQUENCY,
            "frequency_tuned": train.tuned(k),
            "arctic": float(k),
        }
        lengths = [test.by(above(NEVER, n)) for n in range(1, k + 1)]
        tallies: dict[str, Tally] = {
            "none": test.by(above(NEVER, 0)),
            "model": lengths[-1],
            "model_best": max(lengths, key=lambda tally: tally.rate),
            "match4": test.by(above(4.0, k, lambda draft: draft.match_len)),
            "buckets": self._decode(file.name, parts.test, parts.warm_up, method("buckets")),
            "suffix": test.by(above(0.0, 0)),
        }
        for name, threshold in thresholds.items():
            tallies[name] = test.by(above(threshold, k))
        by = hybrid("hybrid", policy)
        tallies["hybrid"] = self._decode(file.name, parts.test, parts.warm_up, by)
        tallies[ORACLE] = test.by(oracle(Prices(NOMINAL, settings), shorter=False))
        if policy.kind != "survival":
            thresholds["hybrid"] = policy.threshold
        return Report(
            file.name,
            len({t.session for t in parts.test}),
            len(parts.test),
            sum(len(t.output) for t in parts.test),
            tallies,
            thresholds,
            file.left_out,
        )

    def _decode(
        self, file: str, traces: Sequence[Trace], warm_up: Sequence[Trace], by: Method
    ) -> Tally:
        told = partial(self._step, f"decoding {file}, {by.name}")
        return self._simulator.decode(traces, by, warm_up, told)[0].tally()

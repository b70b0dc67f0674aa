"""Synthetic draft events: the payoff is a function of the features, the time of the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.contracts.identity import Pseudonyms
from learner.training import train
from learner.training.rows import hash_id
from tests.events import DraftEvent, from_events

SCORE, DRAFT_LEN, LAST = (FEATURES.index(n) for n in ("score", "draft_len", "payoff_last"))
NAMES = Pseudonyms(b"of these tests")
FIXED_US, TOKEN_US, MODEL_US = 20_000.0, 300.0, 8_000.0


@dataclass(frozen=True)
class Traffic:
    """``good`` is the share of drafts that survive whole; ``sign`` -1 turns what features mean."""

    seed: int = 0
    good: float = 0.4
    sign: int = 1
    model_accepted: float = 2.0
    prefix: str = "r"

    def events(self, requests: int, each: int = 20) -> list[DraftEvent]:
        rng = np.random.default_rng(self.seed)
        return [
            self._event(rng, f"{self.prefix}-{self.seed}-{r}", cycle)
            for r in range(requests)
            for cycle in range(each)
        ]

    def _event(self, rng: np.random.Generator, request: str, cycle: int) -> DraftEvent:
        features = rng.random(NUM_FEATURES).astype(np.float32)
        length = int(rng.integers(4, 25))
        is_good = rng.random() < self.good
        features[DRAFT_LEN] = length
        features[SCORE] = rng.random() * length  # tells nothing: the network must look elsewhere
        features[LAST] = (8.0 if is_good == (self.sign > 0) else 0.0) + rng.normal() * 0.5
        accepted = length if is_good else int(rng.integers(0, 2))
        arm = ("cache", "model", "none")[int(rng.choice(3, p=(0.4, 0.4, 0.2)))]
        verified = {"cache": length, "model": 3, "none": 0}[arm]
        time = FIXED_US + TOKEN_US * (1 + verified) + MODEL_US * (arm == "model")
        model = int(rng.binomial(3, self.model_accepted / 3)) if arm == "model" else None
        name = NAMES.of("request", request)
        return DraftEvent(
            number=hash_id(f"{request}/{cycle}") >> 11, time=1.0, request=name, tenant="",
            session="", choice=0, workload="w", cycle=cycle, position=cycle, policy_version=0,
            publication=0, role="champion", side="", round=None, parameter=6.0,
            parameter_name="threshold",
            predicted=1.0, predicted_model=0.0, arm=arm, draft_len=length, drafted_len=verified,
            verified_len=verified, accepted=accepted,
            label="verified" if arm == "cache" else "hindsight",
            censored="length" if rng.random() < 0.05 else "", model_accepted=model, batch_size=1,
            step_tokens=1 + verified, draft_us=50.0,
            step_us=float(time * rng.lognormal(0.0, 0.05)), share=1.0, features=features,
        )  # type: ignore[arg-type]  # fmt: skip


@cache
def learned() -> Policy:
    """A policy of survival that chooses well among drafts of a traffic like this."""
    rows = from_events(Traffic(seed=5).events(60))
    return train.export(train.fit(rows, "survival", 20), "s", 4.0, rows.features)

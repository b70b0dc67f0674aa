"""Drift detection: the fast network, trained on the newest drafts only, predicts better.

Two networks learn alike, one from all buffered drafts and one from the newest. On stationary
traffic the first has more data; after a change its old data hurt. The difference of their
log-likelihoods, summed in clusters, goes through river's Page-Hinkley test (Page 1954; Hinkley
1971). Model drafts are a separate stream, since a new drafter does not mean new text: there, a long
and a short memory of their acceptance rate replace the networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from river.drift import PageHinkley

from decoder.contracts.features import FloatArray
from learner.training.losses import Floats, Labels

STREAMS: Final = ("cache", "model")
MARGINS: Final = np.array([0.02, 0.01])
"""Required advantage in nats a cache draft, and a token of a model draft: on some stationary
traffic, the newest drafts alone predict a little better."""
MEMORIES: Final = np.array([20_000.0, 400.0])
"""Tokens of model drafts in the long and the short memory."""
SETTLING: Final = 3  # clusters that set the scale before the first test
FEWEST: Final = 30  # clusters tested before an alarm
MEMORY: Final = 64.0  # clusters over which the scale, their mean absolute value, is taken
SLACK: Final = 0.1  # tolerated rise above the running mean, in units of the scale
RISE: Final = 15.0
"""Rise of the sum, in units of the scale, that raises an alarm. A slack of 0.3 raised none in ten
million drafts of decision 28's streams; 0.1 raised six a million, in half the time, and an alarm
only adds a challenger."""


@dataclass(frozen=True)
class Alarm:
    """A change in the drafts of ``stream``, detected at ``row``."""

    row: int
    stream: str


@dataclass
class AcceptanceMemory:
    """Acceptance probability of a model draft's token, over two memories."""

    held: Floats = field(default_factory=lambda: np.full(len(MEMORIES), 1.0))
    tried: Floats = field(default_factory=lambda: np.full(len(MEMORIES), 2.0))

    def update(self, labels: Labels) -> Floats:
        """How much better the short memory predicted the model drafts, [n] in nats; then both take
        them in. Mutates."""
        chances = self.held / self.tried
        held, rejected = np.log(chances), np.log1p(-chances)
        advantages: Floats = labels.model_accepted * (held[1] - held[0])
        advantages += (labels.model_tried - labels.model_accepted) * (rejected[1] - rejected[0])
        tokens = float(labels.model_tried.sum())
        kept = (1.0 - 1.0 / MEMORIES) ** tokens
        # half a token either way keeps the probability between 0 and 1
        self.held = 0.5 + kept * (self.held - 0.5) + float(labels.model_accepted.sum())
        self.tried = 1.0 + kept * (self.tried - 1.0) + tokens
        return advantages

    def forget(self) -> None:
        """Reset the long memory to the short one, after a change. Mutates."""
        self.held[0], self.tried[0] = self.held[1], self.tried[1]


def excess(cache: Floats, model: Floats, tried: FloatArray) -> Floats:
    """Advantages [n] beyond the margins, [n, streams].

    Args:
        tried: [n], at-risk tokens of the model drafts.
    """
    advantages: Floats = np.stack([cache - MARGINS[0], model - MARGINS[1] * tried], axis=1)
    return advantages


@dataclass
class StreamTest:
    """Scale of a stream, and state of its Page-Hinkley test. Numbers are clipped to the scale."""

    count: int = 0
    scale: float = 0.0
    tested: float = 0.0
    mean: float = 0.0
    increase: float = 0.0
    least_increase: float = 0.0

    def update(self, number: float) -> bool:
        """Take in a cluster's number; whether it raises an alarm. Mutates."""
        alarm = False
        if self.count >= SETTLING and self.scale > 0.0:
            alarm = self._test(min(max(number / self.scale, -1.0), 1.0))
        self.count += 1
        self.scale += (abs(number) - self.scale) / min(self.count, MEMORY)
        return alarm

    def _test(self, number: float) -> bool:
        test: Any = PageHinkley(FEWEST, SLACK, RISE, alpha=1.0, mode="up")
        test._x_mean.n, test._x_mean._mean = self.tested, self.mean
        test._sum_increase, test._min_increase = self.increase, self.least_increase
        test.update(number)
        self.tested, self.mean = test._x_mean.n, test._x_mean.get()
        self.increase, self.least_increase = test._sum_increase, test._min_increase
        return bool(test.drift_detected)


@dataclass
class Detector:
    """Drift detector of a scope. After an alarm, the test of its stream starts anew."""

    drafter: AcceptanceMemory = field(default_factory=AcceptanceMemory)
    watches: dict[str, StreamTest] = field(
        default_factory=lambda: {s: StreamTest() for s in STREAMS}
    )

    def update(self, advantages: Sequence[Floats], row: int) -> list[Alarm]:
        """Take in sums [streams] of :func:`excess` over final clusters. Mutates."""
        alarms = []
        for cluster in advantages:
            for stream, advantage in zip(STREAMS, cluster.tolist(), strict=True):
                # 0 without verified model drafts
                if advantage and self.watches[stream].update(advantage):
                    alarms.append(Alarm(row, stream))
                    self.watches[stream] = StreamTest()
                    if stream == "model":
                        self.drafter.forget()
        return alarms

"""Training of networks, incrementally or from scratch, with torch modules and torch's Adam.

Kind ``payoff`` is the paper's network (Table 10: 256-256-1, ReLU, squared error, rate 1e-3). Kind
``survival`` is smaller and learns the hazard at each draft position by maximum likelihood. Weights
and moments are numpy arrays that torch trains in place: exports and checkpoints are plain numbers,
and ``decoder.policy`` serves them without torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch.optim.adam import adam

from decoder.contracts.bundle import OUTPUTS, PROBES, Kind, Policy
from decoder.contracts.features import NUM_FEATURES, FloatArray
from learner.training.losses import Labels, labels_of, losses, tensors
from learner.training.rows import Rows

HIDDEN: Final[dict[Kind, tuple[int, ...]]] = {"payoff": (256, 256), "survival": (64, 64)}
FAST: Final = 1e-3  # learning rate of a randomly initialised network (paper, Table 10)
SLOW: Final = 3e-4
"""Learning rate of a trained network. Some hundred drafts of a few requests are soon overfitted: at
the rate above, candidates lost up to 1% when traffic changed, until the first policy was back; at
this one 0.6%, with the same gains."""
MAX_NORM: Final = 10.0
"""Gradient clipping: one large gradient would fill Adam's second moment, and stop learning for a
thousand steps."""
MAX_FEATURE: Final = 1e4
"""Normalised features are clipped to it: anybody may send an absurd one, whose gradient is NaN."""
SEED: Final = 42
BATCH: Final = 65_536
MIN_STD: Final = 0.05
"""Lower bound of standard deviations: a feature that was constant while fitting would otherwise be
normalised to thousands when it first varies. Features are tokens, log tokens, or shares."""

Layers = Sequence[tuple[FloatArray, FloatArray]]


class Network(torch.nn.Module):
    """Perceptrons of one shape; each layer is one batched product, as calls dominate the cost.

    ``weights`` [networks, parameters] hold the layers of each, a weight [in, out] before its bias.
    """

    def __init__(self, weights: torch.Tensor, widths: Sequence[int]) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(weights)
        self._shapes = list(itertools.pairwise(widths))
        self._sizes = [size for i, o in self._shapes for size in (i * o, o)]

    def forward(self, entering: torch.Tensor) -> torch.Tensor:
        """Outputs [networks, n, out] for normalised features [networks, n, in]."""
        parts = self.weights.split(self._sizes, dim=1)
        for layer, shape in enumerate(self._shapes):
            weight, bias = parts[2 * layer].unflatten(1, shape), parts[2 * layer + 1]
            entering = torch.baddbmm(bias[:, None], entering, weight)
            if layer < len(self._shapes) - 1:
                entering = entering.relu()
        return entering


@dataclass
class Trainer:
    """Networks in training, with their normaliser ``mean`` and ``std``.

    ``weights``, ``momentum`` and ``squares`` (Adam's moments) are float32 [networks, parameters];
    ``steps`` [1] counts optimiser steps. :meth:`descend` updates them in place.
    """

    kind: Kind
    widths: tuple[int, ...]
    weights: FloatArray
    momentum: FloatArray
    squares: FloatArray
    mean: FloatArray
    std: FloatArray
    rate: float
    steps: FloatArray

    @cached_property
    def network(self) -> Network:
        """The torch module of ``weights``."""
        return Network(torch.from_numpy(self.weights), self.widths)

    def descend(self, gradient: torch.Tensor) -> None:
        """A step of Adam along ``gradient`` [networks, parameters]. Mutates.

        The optimiser's class would import torch's compiler, 150 MB, at its first step.
        """
        moments = (torch.from_numpy(each) for each in (self.momentum, self.squares))
        momentum, squares = ([each] for each in moments)
        steps = [torch.from_numpy(self.steps)[0]]
        with torch.no_grad():
            adam(
                [self.network.weights], [gradient], momentum, squares, [], steps, fused=True,
                amsgrad=False, beta1=0.9, beta2=0.999, lr=self.rate, weight_decay=0.0, eps=1e-8,
                maximize=False,
            )  # fmt: skip

    def layers(self, network: int = 0) -> list[tuple[FloatArray, FloatArray]]:
        """Views of one network's layers, as (weight [in, out], bias [out])."""
        found, at = [], 0
        for inputs, outputs in itertools.pairwise(self.widths):
            row, middle = self.weights[network], at + inputs * outputs
            found.append((row[at:middle].reshape(inputs, outputs), row[middle : middle + outputs]))
            at = middle + outputs
        return found

    def copy(self, source: int, target: int) -> None:
        """Copy network ``source`` to ``target``. Mutates."""
        for held in (self.weights, self.momentum, self.squares):
            held[target] = held[source]


def normaliser(features: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation, [features], of ``features`` [n, features]."""
    mean = features.mean(axis=0, dtype=np.float64).astype(np.float32)
    std = features.std(axis=0, dtype=np.float64).astype(np.float32)
    return mean, np.maximum(std, np.float32(MIN_STD))


def start(
    kind: Kind, normal: tuple[FloatArray, FloatArray], layers: Layers = (), rate: float = FAST,
    networks: int = 1,
) -> Trainer:  # fmt: skip
    """Create equal networks from ``layers`` ([in, out] weights), or with uniform random weights
    bounded by one over the root of a layer's inputs."""
    if not layers:
        draw = np.random.default_rng(SEED)
        made = []
        for inputs, outputs in itertools.pairwise((NUM_FEATURES, *HIDDEN[kind], OUTPUTS[kind])):
            bound = inputs**-0.5
            shapes = (inputs, outputs), (outputs,)
            weight, bias = (draw.uniform(-bound, bound, s).astype(np.float32) for s in shapes)
            made.append((weight, bias))
        layers = made
    widths = (NUM_FEATURES, *(len(bias) for _, bias in layers))
    row = np.concatenate([part.ravel() for layer in layers for part in layer])
    weights = np.tile(row.astype(np.float32), (networks, 1))
    moments = np.zeros_like(weights), np.zeros_like(weights)
    mean, std = (part.copy() for part in normal)
    return Trainer(kind, widths, weights, *moments, mean, std, rate, np.zeros(1, np.float32))


def outputs_of(trainer: Trainer, features: FloatArray) -> torch.Tensor:
    """Raw outputs [networks, n, outputs] for ``features`` [n, features]."""
    entering = _normalised(trainer, features).expand(len(trainer.weights), -1, -1)
    with torch.no_grad(), one_thread():
        outputs: torch.Tensor = trainer.network(entering)
    return outputs


def update(trainer: Trainer, rows: Rows, batch: int) -> None:
    """Train each network with minibatches of ``batch`` rows, ordered by step, then by network; skip
    steps whose gradient is not finite. Mutates."""
    shape = (-1, len(trainer.weights), batch)
    columns = _normalised(trainer, rows.features), *tensors(labels_of(rows))
    steps = zip(*(part.unflatten(0, shape) for part in columns), strict=True)
    with one_thread():
        for entering, *labels in steps:
            found = losses(trainer.kind, trainer.network(entering), Labels(*labels))
            (gradient,) = torch.autograd.grad(found.mean(dim=-1).sum(), trainer.network.weights)
            norms = gradient.norm(dim=1, keepdim=True)
            if torch.isfinite(norms).all():
                trainer.descend(gradient.mul_((MAX_NORM / norms).clamp(max=1.0)))


def fit(rows: Rows, kind: Kind = "survival", epochs: int = 20) -> Trainer:
    """Train from scratch on labelled drafts, as the paper does (Table 10).

    On small data, batches are smaller, so that an epoch takes about fifty steps.
    """
    n = len(rows)
    size = min(BATCH, max(64, n // 50))
    trainer = start(kind, normaliser(rows.features))
    order = np.random.default_rng(SEED)
    for _ in range(epochs):
        for chunk in np.array_split(order.permutation(n), max(1, -(-n // size))):
            update(trainer, rows.take(chunk), len(chunk))
    return trainer


def export(
    trainer: Trainer, scope: str, threshold: float, probes: FloatArray, network: int = 0
) -> Policy:
    """A copy of a network as a policy of version 0, with up to ``PROBES`` rows of ``probes`` [n,
    features]."""
    policy = Policy(
        scope=scope,
        version=0,
        threshold=threshold,
        kind=trainer.kind,
        mean=trainer.mean.copy(),
        std=trainer.std.copy(),
        layers=tuple((weight.copy(), bias.copy()) for weight, bias in trainer.layers(network)),
    )
    return policy.with_probes(probes[:PROBES])


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: small products gain nothing from a second, and wait for it on busy
    cores (learning took twelve times as long)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _normalised(trainer: Trainer, features: FloatArray) -> torch.Tensor:
    with np.errstate(over="ignore"):  # clipped below
        entering = features - trainer.mean
        entering /= trainer.std  # in place: a second large array costs more than the division
    return torch.from_numpy(np.clip(entering, -MAX_FEATURE, MAX_FEATURE, out=entering))

"""Networks in training, incrementally or from scratch: what a policy's layers come from.

The kind ``payoff`` is the paper's (Table 10: 256-256-1, ReLU, squared error, rate 1e-3), the kind
``survival`` is smaller and learns the hazard at each draft position by likelihood. The gradient is
written out (back-propagation through ReLU layers) and followed by Adam (Kingma and Ba 2015): on
networks this small an automatic one spends seven eighths of its time on calling itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from decoder.compiled import Float32Matrix, entry_point
from decoder.contracts.bundle import OUTPUTS, PROBES, Kind, Policy
from decoder.contracts.features import NUM_FEATURES, FloatArray
from learner.training.losses import Faced, Floats, faced, payoff_loss, survival_loss
from learner.training.rows import Rows

HIDDEN: Final[dict[Kind, tuple[int, ...]]] = {"payoff": (256, 256), "survival": (64, 64)}
QUICK: Final = 1e-3
"""Learning rate of a network that starts at random (paper, Table 10)."""
CAREFUL: Final = 3e-4
"""For a network that was good already. Some hundred drafts of a handful of requests are soon
learned by heart: at the rate above, what won on one kind of traffic lost up to 1% when another came
until the first policy was back, at this one 0.6%, and gained no less where it was right."""
MOMENTUM: Final = 0.9
SQUARES: Final = 0.999
TINY: Final = 1e-8
"""Of Adam: the memories of gradient and squared gradient, and what keeps a quotient finite."""
STEEPEST: Final = 10.0
"""Norm of a gradient that is followed as it is; a longer one is cut to it. One absurd feature would
otherwise fill the memory of squares, and nothing be learned for the next thousand steps."""
SEED: Final = 42
BATCH: Final = 65_536
MIN_STD: Final = 0.05
"""A feature that happened not to vary while the normaliser was fitted would otherwise enter the
network in the thousands the first time it does. Features are tokens, log tokens, or shares."""

Layers = Sequence[tuple[FloatArray, FloatArray]]
_PRODUCTS: Final = ThreadpoolController()
"""Limited to one thread: products this small gain nothing from a second, and wait for it where
other work has its core (learning took twelve times as long)."""


@dataclass
class Trainer:
    """A network in training. Weights only mean something together with ``mean`` and ``std``.

    ``weights`` and the moments hold all layers in one row, each weight [in, out] before its bias.
    Networks of one kind, shape, normaliser and rate may be one trainer that learns side by side
    (:func:`abreast`): then each has a row, and ``updates`` a number. ``[...]`` below is nothing
    for one network, and their number for several.
    """

    kind: Kind
    widths: tuple[int, ...]
    weights: FloatArray
    momentum: FloatArray
    squares: FloatArray
    mean: FloatArray
    std: FloatArray
    rate: float
    updates: NDArray[np.int64]

    def layers(self, row: FloatArray | None = None) -> list[tuple[FloatArray, FloatArray]]:
        """Views of ``weights``, or of another ``row`` like it, as (weight [..., in, out], bias
        [..., out])."""
        row = self.weights if row is None else row
        found, at = [], 0
        for inputs, outputs in itertools.pairwise(self.widths):
            middle, end = at + inputs * outputs, at + (inputs + 1) * outputs
            weight = row[..., at:middle].reshape(*row.shape[:-1], inputs, outputs)
            found.append((weight, row[..., middle:end]))
            at = end
        return found


def normaliser(features: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation [features] of ``features`` [n, features], the latter bounded."""
    mean = features.mean(axis=0, dtype=np.float64).astype(np.float32)
    std = features.std(axis=0, dtype=np.float64).astype(np.float32)
    return mean, np.maximum(std, np.float32(MIN_STD))


def start(
    kind: Kind, mean: FloatArray, std: FloatArray, layers: Layers = (), rate: float = QUICK
) -> Trainer:
    """A trainer that continues from ``layers`` ([in, out] weights), or begins at random.

    At random is uniformly within the root of one over a layer's inputs.
    """
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
    weights = np.concatenate([part.ravel() for layer in layers for part in layer])
    still = np.zeros_like(weights)
    moments = still, still.copy()
    none_yet = np.zeros((), np.int64)
    return Trainer(kind, widths, weights, *moments, mean.copy(), std.copy(), rate, none_yet)


def abreast(trainers: Sequence[Trainer]) -> Trainer:
    """Single networks of one kind, shape, normaliser and rate as one trainer, which does to each
    what it would have done by itself: with networks this small, calls cost as much as what they
    compute. Rows are copies."""
    rows: dict[str, Any] = {
        name: np.stack([getattr(each, name) for each in trainers]) for name in _OWN
    }
    return replace(trainers[0], **rows)


def apart(trainer: Trainer) -> list[Trainer]:
    """Each network of ``trainer`` by itself, in views."""
    return [
        replace(trainer, **{name: getattr(trainer, name)[index, ...] for name in _OWN})
        for index in range(len(trainer.updates))
    ]


def outputs_of(trainer: Trainer, features: FloatArray) -> FloatArray:
    """Raw outputs [..., n, outputs] of the network for ``features`` [n, features]."""
    with _PRODUCTS.limit(limits=1, user_api="blas"):
        return _forward(trainer, _entering(trainer, features))[-1]


def update(trainer: Trainer, rows: Rows) -> float:
    """One step of Adam of a single network on the minibatch ``rows``; returns its loss. Mutates.

    A loss or a gradient that is not finite, or whose square is not, leaves the weights alone.
    """
    return float(updates(trainer, rows, len(rows))[0])


def updates(trainer: Trainer, rows: Rows, batch: int) -> list[Floats]:
    """:func:`update` of each network on ``batch`` of ``rows`` after ``batch``, as often as they
    suffice for all: a step's minibatches, network by network, lie before those of the next step.

    What does not depend on the weights is worked out for all of them at once.

    Returns:
        the losses [...] of each step.
    """
    shape = (-1, *trainer.updates.shape, batch)
    alone = _PRODUCTS.limit(limits=1, user_api="blas")
    with alone, np.errstate(all="ignore"):  # what overflows is left alone
        columns = _entering(trainer, rows.features), *faced(rows)
        steps = zip(*(part.reshape(*shape, *part.shape[1:]) for part in columns), strict=True)
        return [_step(trainer, entering, Faced(*found)) for entering, *found in steps]


def fit(rows: Rows, kind: Kind = "survival", epochs: int = 20) -> Trainer:
    """Train from scratch on labelled drafts, as the paper does (Table 10).

    Batches shrink on small data so that an epoch still takes about fifty steps: twenty epochs of
    one step each would leave the network where it began.
    """
    n = len(rows)
    size = min(BATCH, max(64, n // 50))
    trainer = start(kind, *normaliser(rows.features))
    order = np.random.default_rng(SEED)
    for _ in range(epochs):
        for chunk in np.array_split(order.permutation(n), max(1, -(-n // size))):
            update(trainer, rows.take(chunk))
    return trainer


def take_over(trainer: Trainer, other: Trainer) -> None:
    """Go on from where ``other``, of the same shape and normaliser, stands. Mutates."""
    for name in _OWN:
        getattr(trainer, name)[...] = getattr(other, name)


def export(trainer: Trainer, scope: str, threshold: float, probes: FloatArray) -> Policy:
    """The network as a policy of version 0 with up to ``PROBES`` rows of ``probes`` [n, features].

    Arrays are copies: training on does not change the policy.
    """
    policy = Policy(
        scope=scope,
        version=0,
        threshold=threshold,
        kind=trainer.kind,
        mean=trainer.mean.copy(),
        std=trainer.std.copy(),
        layers=tuple((weight.copy(), bias.copy()) for weight, bias in trainer.layers()),
    )
    return policy.with_probes(probes[:PROBES])


_OWN: Final = ("weights", "momentum", "squares", "updates")
"""What each of several networks has for itself."""


def _entering(trainer: Trainer, features: FloatArray) -> FloatArray:
    """``features`` [n, features] as the first layer takes them."""
    entering = features - trainer.mean
    entering /= trainer.std  # in place: a second large array costs more than the division
    return entering


def _forward(trainer: Trainer, entering: FloatArray) -> list[FloatArray]:
    """What enters each layer, then what leaves the last."""
    entered = [entering]
    layers = trainer.layers()
    for index, (weight, bias) in enumerate(layers):
        hidden = entered[-1] @ weight
        hidden += bias[..., None, :]
        if index < len(layers) - 1:
            # beside an array of zeros: beside a number it takes four times as long
            np.maximum(hidden, np.zeros_like(hidden), out=hidden)
        entered.append(hidden)
    return entered


def _gradient(trainer: Trainer, entering: FloatArray, found: Faced) -> tuple[Floats, FloatArray]:
    entered = _forward(trainer, entering)
    loss_of = survival_loss if trainer.kind == "survival" else payoff_loss
    value, back = loss_of(entered[-1], found)
    slope = np.empty_like(trainer.weights)
    parts, layers = trainer.layers(slope), trainer.layers()
    ones = np.ones((1, entering.shape[-2]), np.float32)  # a product sums faster than a sum
    for index in reversed(range(len(layers))):
        weight, bias = parts[index]
        np.matmul(entered[index].swapaxes(-1, -2), back, out=weight)
        np.matmul(ones, back, out=bias[..., None, :])
        if index:
            back = back @ layers[index][0].swapaxes(-1, -2)
            back *= entered[index] > _ZERO
    return value, slope


def _step(trainer: Trainer, entering: FloatArray, found: Faced) -> Floats:
    value, slope = _gradient(trainer, entering, found)
    squared = np.vecdot(slope, slope)
    steepness = np.sqrt(squared, dtype=np.float64)
    wrong = ~(np.isfinite(value) & np.isfinite(steepness))
    kept = None
    if wrong.any():
        kept = {name: getattr(trainer, name)[wrong] for name in _OWN}
        slope[wrong] = 0.0
        value = np.where(np.isfinite(value) & wrong, np.inf, value)
    _adam(trainer, slope, np.minimum(1.0, STEEPEST / np.maximum(steepness, TINY)))
    for name, before in kept.items() if kept else ():
        getattr(trainer, name)[wrong] = before
    return value


def _adam(trainer: Trainer, slope: FloatArray, scale: Floats) -> None:
    """A step down ``slope`` times ``scale`` [...]. Mutates the trainer."""
    trainer.updates += 1
    bare = np.sqrt(1.0 - SQUARES**trainer.updates)  # of what the memory of squares began with
    length = trainer.rate * bare / (1.0 - MOMENTUM**trainer.updates)
    enters = scale * (1.0 - MOMENTUM), scale * np.sqrt(1.0 - SQUARES)
    by = np.stack([*enters, TINY * bare, length], axis=-1).astype(np.float32)
    rows = (trainer.weights, trainer.momentum, trainer.squares, slope, by)
    _descend(*(each.reshape(-1, each.shape[-1]) for each in rows))


@entry_point
def _descend(
    weights: Float32Matrix,
    momentum: Float32Matrix,
    squares: Float32Matrix,
    slope: Float32Matrix,
    by: Float32Matrix,
) -> None:
    """Adam for networks in rows, each with four numbers ``by`` which to go: what its slope enters
    both memories with, what keeps the quotient finite, and how far. In one pass, where a dozen of
    numpy's take twice as long. Mutates the first three."""
    for row in range(len(by)):
        enters, enters_squared, tiny, length = by[row]
        for i in range(weights.shape[1]):
            steep = slope[row, i] * enters_squared
            mean = momentum[row, i] * np.float32(MOMENTUM) + slope[row, i] * enters
            square = squares[row, i] * np.float32(SQUARES) + steep * steep
            momentum[row, i], squares[row, i] = mean, square
            weights[row, i] -= mean / (np.sqrt(square) + tiny) * length


_ZERO: Final = np.float32(0.0)

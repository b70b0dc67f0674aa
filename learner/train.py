"""Networks in training, incrementally or from scratch, exported as numbers that numpy multiplies.

The kind ``payoff`` is the paper's (Table 10: 256-256-1, ReLU, squared error, rate 1e-3), the kind
``survival`` is smaller and learns the hazard at each draft position by likelihood.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from decoder.contracts.bundle import OUTPUTS, PROBES, Kind, Policy
from decoder.contracts.features import NUM_FEATURES, FloatArray
from learner.losses import payoff_loss, survival_loss
from learner.rows import Rows

HIDDEN: Final[dict[Kind, tuple[int, ...]]] = {"payoff": (256, 256), "survival": (64, 64)}
QUICK: Final = 1e-3
"""Learning rate of a network that starts at random (paper, Table 10)."""
CAREFUL: Final = 1e-4
"""For a network that was good already. Some hundred drafts of a handful of requests are soon
learned by heart: going on at the rate above, a good network became worse on the requests to come,
at this one better. Traffic that has turned about needs the other."""
SEED: Final = 42
MIN_STD: Final = 0.05
"""A feature that happened not to vary while the normaliser was fitted would otherwise enter the
network in the thousands the first time it does. Features are tokens, log tokens, or shares."""

Layers = Sequence[tuple[FloatArray, FloatArray]]


@dataclass
class Trainer:
    """A network in training. Weights only mean something together with ``mean`` and ``std``."""

    kind: Kind
    network: nn.Sequential
    optimiser: torch.optim.Adam
    mean: FloatArray
    std: FloatArray
    rate: float
    updates: int = 0


def normaliser(features: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation [features] of ``features`` [n, features], the latter bounded."""
    mean = features.mean(axis=0, dtype=np.float64).astype(np.float32)
    std = features.std(axis=0, dtype=np.float64).astype(np.float32)
    return mean, np.maximum(std, np.float32(MIN_STD))


def start(
    kind: Kind,
    mean: FloatArray,
    std: FloatArray,
    layers: Layers = (),
    seed: int = SEED,
    rate: float = QUICK,
) -> Trainer:
    """A trainer that continues from ``layers`` ([in, out] weights), or begins at random.

    The global random state of torch is left as it was.
    """
    widths = [NUM_FEATURES, *HIDDEN[kind], OUTPUTS[kind]]
    if layers:
        widths = [NUM_FEATURES, *(weight.shape[1] for weight, _ in layers)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        linears = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    for linear, (weight, bias) in zip(linears, layers, strict=False):
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(weight.T))
            linear.bias.copy_(torch.tensor(bias))
    modules: list[nn.Module] = []
    for linear in linears:
        modules += [linear, nn.ReLU()]
    network = nn.Sequential(*modules[:-1])
    return Trainer(kind, network, _adam(network, rate), mean.copy(), std.copy(), rate)


def continue_from(policy: Policy, rate: float = QUICK) -> Trainer:
    """A trainer at the weights of ``policy``, which must have a network."""
    return start(policy.kind, policy.mean, policy.std, policy.layers, rate=rate)


def _adam(network: nn.Sequential, rate: float) -> torch.optim.Adam:
    return torch.optim.Adam(network.parameters(), lr=rate)


def forward(trainer: Trainer, features: FloatArray) -> torch.Tensor:
    """Raw outputs [n, outputs] of the network for ``features`` [n, features]."""
    scaled = (features - trainer.mean) / trainer.std
    return trainer.network(torch.from_numpy(scaled))  # type: ignore[no-any-return]


def loss(trainer: Trainer, rows: Rows) -> torch.Tensor:
    """Mean loss [] of the trainer's kind on ``rows``."""
    outputs = forward(trainer, rows.features)
    if trainer.kind == "survival":
        return survival_loss(outputs, rows)
    accepted, censored = torch.from_numpy(rows.accepted), torch.from_numpy(rows.censored)
    return payoff_loss(outputs[:, 0], accepted, censored)


def held_out_loss(trainer: Trainer, rows: Rows) -> float:
    """Mean loss on ``rows``; 0 where there are none."""
    with torch.no_grad():
        return float(loss(trainer, rows)) if len(rows) else 0.0


def update(trainer: Trainer, rows: Rows) -> float:
    """One optimiser step on the minibatch ``rows``; returns its loss. Mutates the trainer.

    A loss that is not finite is returned and the weights are left alone.
    """
    value = loss(trainer, rows)
    result = float(value.detach())
    if np.isfinite(result):
        trainer.optimiser.zero_grad(set_to_none=True)
        value.backward()
        trainer.optimiser.step()
        trainer.updates += 1
    return result


def fit(
    rows: Rows,
    kind: Kind = "survival",
    epochs: int = 20,
    batch: int = 65_536,
    seed: int = SEED,
    report: Callable[[int, float], None] | None = None,
) -> Trainer:
    """Train from scratch on labelled drafts, as the paper does (Table 10).

    ``batch`` shrinks on small data so that an epoch still takes about fifty steps: twenty epochs of
    one step each would leave the network where it began.

    Args:
        report: called after each epoch with its number from 0 and its mean loss.
    """
    n = len(rows)
    size = min(batch, max(64, n // 50))
    trainer = start(kind, *normaliser(rows.features), seed=seed)
    order = np.random.default_rng(seed)
    for epoch in range(epochs):
        chunks = np.array_split(order.permutation(n), max(1, -(-n // size)))
        losses = [update(trainer, rows.take(c)) for c in chunks]
        if report is not None:
            report(epoch, float(np.mean(losses)))
    return trainer


def renormalise(trainer: Trainer, mean: FloatArray, std: FloatArray) -> None:
    """Move the trainer to another normaliser without changing what it predicts.

    Input ``x`` entered as ``(x - m) / s`` and now enters as ``(x - m') / s'``; the first layer
    absorbs the difference: ``W' = W s' / s`` and ``b' = b + W (m' - m) / s``. Mutates the trainer;
    Adam starts anew, since its moments belong to the old scale.
    """
    first = trainer.network[0]
    assert isinstance(first, nn.Linear)
    weight = first.weight.detach().double()
    shift = torch.from_numpy((mean.astype(np.float64) - trainer.mean) / trainer.std)
    scale = torch.from_numpy(std.astype(np.float64) / trainer.std)
    with torch.no_grad():
        first.bias.copy_(first.bias.double() + weight @ shift)
        first.weight.copy_(weight * scale)
    trainer.mean, trainer.std = mean.copy(), std.copy()
    trainer.optimiser = _adam(trainer.network, trainer.rate)


def is_finite(trainer: Trainer) -> bool:
    """Whether every weight is a finite number."""
    return all(bool(torch.isfinite(p).all()) for p in trainer.network.parameters())


def export(trainer: Trainer, scope: str, threshold: float, probes: FloatArray) -> Policy:
    """The network as a policy of version 0 with up to ``PROBES`` rows of ``probes`` [n, features].

    Arrays are copies: training on does not change the policy.
    """
    layers = tuple(
        (
            np.ascontiguousarray(linear.weight.detach().numpy().T).copy(),
            linear.bias.detach().numpy().copy(),
        )
        for linear in trainer.network
        if isinstance(linear, nn.Linear)
    )
    policy = Policy(
        scope=scope,
        version=0,
        threshold=threshold,
        kind=trainer.kind,
        mean=trainer.mean.copy(),
        std=trainer.std.copy(),
        layers=layers,
    )
    return policy.with_probes(probes[:PROBES])


def snapshot(trainer: Trainer) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Weights, normaliser and the optimiser's moments, for :func:`restored`."""
    arrays: dict[str, NDArray[Any]] = {"mean": trainer.mean, "std": trainer.std}
    for index, parameter in enumerate(trainer.network.parameters()):
        arrays[f"weight.{index}"] = parameter.detach().numpy().copy()
        state = trainer.optimiser.state.get(parameter)
        if state:
            for name in ("exp_avg", "exp_avg_sq", "step"):
                arrays[f"{name}.{index}"] = np.array(state[name].numpy())
    return arrays, {"updates": trainer.updates, "kind": trainer.kind, "rate": trainer.rate}


def restored(arrays: dict[str, NDArray[Any]], numbers: dict[str, Any]) -> Trainer:
    """The trainer that :func:`snapshot` saw; its next update is the one that would have followed.

    Raises:
        KeyError: arrays or numbers are missing.
        ValueError: arrays have shapes that do not chain.
    """
    count = sum(name.startswith("weight.") for name in arrays)
    weights = [arrays[f"weight.{index}"] for index in range(count)]
    layers = [(weights[i].T, weights[i + 1]) for i in range(0, count, 2)]
    kind, rate = numbers["kind"], float(numbers["rate"])
    trainer = start(kind, arrays["mean"], arrays["std"], layers, rate=rate)
    for index, parameter in enumerate(trainer.network.parameters()):
        if f"step.{index}" in arrays:
            trainer.optimiser.state[parameter] = {
                name: torch.tensor(arrays[f"{name}.{index}"])
                for name in ("exp_avg", "exp_avg_sq", "step")
            }
    trainer.updates = int(numbers["updates"])
    return trainer

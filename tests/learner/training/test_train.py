"""The network that is trained is the one that serves; its loss is what became of drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits
from torch.nn.functional import logsigmoid

from decoder.contracts.bundle import BUCKET_OF, BUCKETS, Kind
from decoder.policy.estimate import predict
from decoder.policy.first import first_policy
from learner.evaluation import tune
from learner.training import train
from learner.training.losses import faced, payoff_loss, survival_likelihood, survival_loss
from learner.training.rows import Rows, joined
from tests.events import from_events
from tests.learner.traffic import Traffic

ROWS = from_events(Traffic(seed=1).events(60))


def trained(kind: Kind = "payoff", rows: Rows = ROWS, epochs: int = 3) -> train.Trainer:
    return train.fit(rows, kind, epochs)


def served(trainer: train.Trainer) -> np.ndarray:
    return predict(train.export(trainer, "s", 6.0, ROWS.features), ROWS.features)


def gradient(trainer: train.Trainer, rows: Rows) -> tuple[float, np.ndarray]:
    loss, slope = train._gradient(trainer, train._entering(trainer, rows.features), faced(rows))
    return float(loss), slope


def torch_gradient(trainer: train.Trainer, rows: Rows) -> tuple[float, np.ndarray]:
    """The same by automatic differentiation."""
    layers = [
        tuple(torch.tensor(part, requires_grad=True) for part in layer)
        for layer in trainer.layers()
    ]
    hidden = torch.tensor((rows.features - trainer.mean) / trainer.std)
    for index, (weight, bias) in enumerate(layers):
        hidden = hidden @ weight + bias
        hidden = hidden.relu() if index < len(layers) - 1 else hidden
    found = faced(rows)
    if trainer.kind == "survival":
        ended = torch.tensor(found.ended)
        lived = torch.tensor(found.positions) - ended
        likelihood = lived * logsigmoid(-hidden) + ended * logsigmoid(hidden)
        loss = -likelihood.sum(dim=1).mean()
    else:
        error = hidden[:, 0] - torch.tensor(rows.accepted)
        missed = torch.where(torch.tensor(rows.censored), error.clamp(max=0.0), error)
        loss = missed.square().mean()
    loss.backward()
    return float(loss.detach()), np.concatenate(
        [part.grad.numpy().ravel() for layer in layers for part in layer if part.grad is not None]
    )


@pytest.mark.parametrize("kind", ["survival", "payoff"])
def test_the_gradient_is_that_of_automatic_differentiation(kind: Kind) -> None:
    trainer = trained(kind, epochs=1)
    for rows in (ROWS.take(np.arange(128)), ROWS.take(np.arange(1))):
        loss, mine = gradient(trainer, rows)
        expected, theirs = torch_gradient(trainer, rows)
        assert loss == pytest.approx(expected, rel=1e-4)
        assert np.abs(mine - theirs).max() < 1e-4 * max(1.0, np.abs(theirs).max())


def test_steps_are_those_of_adam() -> None:
    """As the paper has them (Kingma and Ba, algorithm 1), from slopes that are cut where steep."""
    trainer = train.start("survival", *train.normaliser(ROWS.features))
    weights = trainer.weights.astype(np.float64)
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for step in range(1, 11):
        rows = ROWS.take(np.arange(64 * step - 64, 64 * step))
        _, slope = gradient(trainer, rows)
        slope = slope * min(1.0, train.STEEPEST / float(np.linalg.norm(slope)))
        mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2
        spread = np.sqrt(square / (1 - 0.999**step)) + 1e-8
        weights -= trainer.rate * mean / (1 - 0.9**step) / spread
        train.update(trainer, rows)
    assert np.abs(trainer.weights - weights).max() < 1e-6


def test_fit_learns_and_repeats() -> None:
    one, again, begun = trained(epochs=8), trained(epochs=8), trained(epochs=1)
    assert gradient(one, ROWS)[0] < 0.5 * gradient(begun, ROWS)[0]
    assert np.array_equal(served(one), served(again))


def test_continues_from_a_policy() -> None:
    trainer = trained()
    policy = train.export(trainer, "s", 6.0, ROWS.features)
    before = predict(policy, ROWS.features)
    raw = np.minimum(np.maximum(train.outputs_of(trainer, ROWS.features)[:, 0], 0), ROWS.draft_len)
    assert np.abs(before - raw).max() < 1e-3
    assert np.array_equal(
        served(train.start(policy.kind, policy.mean, policy.std, policy.layers)), before
    )
    train.update(trainer, ROWS)
    assert np.array_equal(predict(policy, ROWS.features), before), "what is exported stands still"


def test_an_heir_takes_the_same_next_step() -> None:
    trainer, heir = trained("survival"), trained("survival", epochs=1)
    train.take_over(heir, trainer)
    for one in (trainer, heir):
        train.update(one, ROWS)
    assert np.array_equal(trainer.weights, heir.weights)
    assert not np.shares_memory(trainer.weights, heir.weights)


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    trainer = trained()
    before = served(trainer)
    huge = replace(ROWS, features=np.full_like(ROWS.features, 3e38))
    assert not np.isfinite(train.update(trainer, huge))
    assert np.array_equal(served(trainer), before)


def test_one_absurd_draft_does_not_end_the_learning() -> None:
    trainer = trained("survival", epochs=5)
    batch = ROWS.take(np.arange(128))
    features = batch.features.copy()
    features[0] = 1e9
    train.update(trainer, replace(batch, features=features))
    poisoned = gradient(trainer, ROWS)[0]
    for first in range(0, 1024, 128):
        train.update(trainer, ROWS.take(np.arange(first, first + 128)))
    assert gradient(trainer, ROWS)[0] < poisoned + 0.05
    assert gradient(trainer, ROWS)[0] < 1.1 * gradient(trained("survival"), ROWS)[0]


@pytest.mark.parametrize("kind", ["survival", "payoff"])
def test_networks_abreast_learn_as_each_would_by_itself(kind: Kind) -> None:
    alone = [trained(kind, epochs=epochs) for epochs in (1, 3)]
    abreast = train.abreast(alone)
    batches = [ROWS.take(np.arange(first, first + 64)) for first in range(0, 6 * 64, 64)]
    absurd = replace(batches[3], features=np.full_like(batches[3].features, 3e38))
    batches[3] = absurd  # one of them leaves this step out
    for place in range(0, 6, 2):
        train.updates(abreast, joined(batches[place : place + 2]), 64)
    for place, batch in enumerate(batches):
        train.update(alone[place % 2], batch)
    outputs = train.outputs_of(abreast, ROWS.features)
    for one, other, said in zip(alone, train.apart(abreast), outputs, strict=True):
        assert np.abs(one.weights - other.weights).max() < 1e-6
        assert np.allclose(train.outputs_of(one, ROWS.features), said, atol=1e-4)
        assert one.updates == other.updates


def test_products_keep_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    forward = train._forward

    def counting(*args: object) -> object:
        counted.extend(one["num_threads"] for one in train._PRODUCTS.info())
        return forward(*args)

    monkeypatch.setattr(train, "_forward", counting)
    trainer = train.start("survival", *train.normaliser(ROWS.features))
    with threadpool_limits(2, "blas"):
        train.update(trainer, ROWS.take(np.arange(64)))
        train.outputs_of(trainer, ROWS.features)
    assert counted and set(counted) == {1}


def naive_cache(logits: np.ndarray, length: int, accepted: int, censored: bool) -> float:
    """What was seen of one cache draft, one position at a time."""
    breaking = 1 / (1 + np.exp(-logits[BUCKET_OF].astype(float)))
    total = sum(np.log(1 - breaking[j]) for j in range(accepted))
    return total + (0.0 if censored or accepted == length else np.log(breaking[accepted]))


def test_the_likelihood_is_that_of_what_was_seen() -> None:
    outputs = np.random.default_rng(0).normal(size=(200, BUCKETS)).astype(np.float32)
    found = faced(ROWS.take(np.arange(200)))
    naive = [
        naive_cache(outputs[i], ROWS.draft_len[i], int(ROWS.accepted[i]), ROWS.censored[i])
        for i in range(200)
    ]
    assert survival_likelihood(outputs, found) == pytest.approx(naive, rel=1e-4)
    loss, _ = survival_loss(outputs, found)
    assert loss == pytest.approx(-np.mean(naive), rel=1e-4)


@settings(max_examples=50)
@given(st.floats(-20, 40, width=16), st.floats(0, 30, width=16))
def test_a_censored_label_is_a_lower_bound(output: float, bound: float) -> None:
    accepted, censored = np.float32([bound]), np.array([True])
    rows = replace(ROWS.take(np.arange(1)), accepted=accepted, censored=censored)
    value, slope = payoff_loss(np.float32([[output]]), faced(rows))
    if output >= bound:
        assert value == 0 and slope[0, 0] == 0
    else:
        assert value > 0 and slope[0, 0] < 0


def test_the_error_of_a_bound_is_one_sided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "predict", lambda *_: np.float32([5, 5, 2]))
    labels = {"accepted": np.float32([3, 3, 6]), "censored": np.array([False, True, True])}
    assert tune.error_of(first_policy("s"), replace(ROWS.take(np.arange(3)), **labels)) == 2.0

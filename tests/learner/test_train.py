"""The network that is trained is the one that serves; the gradient is that of an automatic one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from decoder.contracts.bundle import Kind
from decoder.policy.estimate import predict
from decoder.policy.probes import from_bytes, to_bytes
from learner import train
from learner.losses import faced
from learner.rows import Rows, from_events, joined
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
    trainer = train.start("survival", *train.normaliser(ROWS.features))
    weights = torch.tensor(trainer.weights, requires_grad=True)
    adam = torch.optim.Adam([weights], lr=trainer.rate)
    for first in range(0, 640, 64):
        rows = ROWS.take(np.arange(first, first + 64))
        _, slope = gradient(trainer, rows)
        steepness = float(np.linalg.norm(slope))
        weights.grad = torch.tensor(slope * min(1.0, train.STEEPEST / steepness))
        adam.step()
        train.update(trainer, rows)
    assert np.abs(trainer.weights - weights.detach().numpy()).max() < 1e-6


def test_what_is_served_is_what_was_trained() -> None:
    trainer = trained()
    raw = train.outputs_of(trainer, ROWS.features)[:, 0]
    clipped = np.minimum(np.maximum(raw, 0), ROWS.draft_len)
    policy = from_bytes(to_bytes(train.export(trainer, "s", 6.0, ROWS.features)), "s")
    assert np.abs(predict(policy, ROWS.features) - clipped).max() < 1e-3


def test_fit_learns_reports_and_repeats() -> None:
    losses: list[float] = []
    fits = [train.fit(ROWS, "payoff", 8, report=lambda _, x: losses.append(x)) for _ in range(2)]
    assert len(losses) == 16 and losses[7] < 0.3 * losses[0]
    assert np.array_equal(served(fits[0]), served(fits[1]))


def test_continues_from_a_policy() -> None:
    policy = train.export(trained(), "s", 6.0, ROWS.features)
    assert np.array_equal(served(train.continue_from(policy)), predict(policy, ROWS.features))


def test_a_restored_trainer_takes_the_same_next_step() -> None:
    trainer = trained()
    again = train.restored(*train.snapshot(trainer))
    for one in (trainer, again):
        train.update(one, ROWS)
    assert np.array_equal(served(trainer), served(again)) and trainer.updates == again.updates


def test_an_exported_policy_stands_still() -> None:
    trainer = trained()
    policy = train.export(trainer, "s", 6.0, ROWS.features)
    before = predict(policy, ROWS.features)
    train.update(trainer, ROWS)
    assert np.array_equal(predict(policy, ROWS.features), before)


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


def test_who_takes_over_goes_on_as_the_other_would() -> None:
    one, other = trained("survival"), trained("survival", epochs=1)
    train.take_over(other, one)
    for each in (one, other):
        train.update(each, ROWS)
    assert np.array_equal(one.weights, other.weights)
    assert not np.shares_memory(one.weights, other.weights)


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


def test_networks_that_differ_are_not_put_abreast() -> None:
    one = trained("survival")
    for other in (trained("payoff"), replace(one, mean=one.mean + 1), replace(one, rate=9.0)):
        with pytest.raises(ValueError, match="differ"):
            train.abreast([one, other])


def test_survival_training_tells_long_drafts_from_short_ones() -> None:
    policy = train.export(trained("survival", epochs=20), "s", 6.0, ROWS.features)
    expected = predict(from_bytes(to_bytes(policy), "s"), ROWS.features)
    whole = (ROWS.accepted == ROWS.draft_len) & (ROWS.draft_len >= 6)
    assert expected[whole].mean() > 3 * expected[ROWS.accepted <= 1].mean()
    assert (expected <= ROWS.draft_len).all() and (expected >= 0).all()

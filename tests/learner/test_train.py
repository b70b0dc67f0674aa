"""The network torch trains is the one numpy serves, and censored labels only push up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.policy import from_bytes, predict, to_bytes
from learner import train
from learner.rows import Rows, from_events
from tests.learner.traffic import Traffic

ROWS = from_events(Traffic(seed=1).events(60))


def trained(rows: Rows = ROWS, epochs: int = 3) -> train.Trainer:
    return train.fit(rows.features, rows.accepted, rows.censored, epochs=epochs)


def served(trainer: train.Trainer) -> np.ndarray:
    return predict(train.export(trainer, "s", 6.0, ROWS.features), ROWS.features)


def test_numpy_serves_what_torch_trained() -> None:
    trainer = trained()
    raw = train.forward(trainer, ROWS.features).detach().numpy()
    clipped = np.minimum(np.maximum(raw, 0), ROWS.draft_len)
    policy = from_bytes(to_bytes(train.export(trainer, "s", 6.0, ROWS.features)), "s")
    assert np.abs(predict(policy, ROWS.features) - clipped).max() < 1e-3


def test_fit_learns_reports_and_repeats() -> None:
    losses: list[float] = []
    fits = [
        train.fit(
            ROWS.features, ROWS.accepted, ROWS.censored, 8, report=lambda _, x: losses.append(x)
        )
        for _ in range(2)
    ]
    assert len(losses) == 16 and losses[7] < 0.3 * losses[0]
    assert np.array_equal(served(fits[0]), served(fits[1]))


@settings(max_examples=50, deadline=None)
@given(st.floats(-20, 40, width=16), st.floats(0, 30, width=16))
def test_a_censored_label_is_a_lower_bound(output: float, bound: float) -> None:
    out = torch.tensor([output], requires_grad=True)
    value = train.loss(out, torch.tensor([bound]), torch.tensor([True]))
    value.backward()
    assert out.grad is not None
    if output >= bound:
        assert value == 0 and out.grad.item() == 0
    else:
        assert value > 0 and out.grad.item() < 0


def test_renormalising_changes_no_prediction() -> None:
    trainer = trained()
    before = served(trainer)
    train.renormalise(trainer, trainer.mean + 0.7, trainer.std * 1.9)
    assert np.abs(served(trainer) - before).max() < 1e-3


def test_continues_from_a_policy() -> None:
    policy = train.export(trained(), "s", 6.0, ROWS.features)
    assert np.array_equal(served(train.continue_from(policy)), predict(policy, ROWS.features))


def test_a_restored_trainer_takes_the_same_next_step() -> None:
    trainer = trained()
    again = train.restored(*train.snapshot(trainer))
    for one in (trainer, again):
        train.update(one, ROWS.features, ROWS.accepted, ROWS.censored)
    assert np.array_equal(served(trainer), served(again)) and trainer.updates == again.updates


def test_an_exported_policy_stands_still() -> None:
    trainer = trained()
    policy = train.export(trainer, "s", 6.0, ROWS.features)
    before = predict(policy, ROWS.features)
    train.update(trainer, ROWS.features, ROWS.accepted, ROWS.censored)
    assert np.array_equal(predict(policy, ROWS.features), before)


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    trainer = trained()
    before = served(trainer)
    huge = np.full_like(ROWS.features, 3e38)
    assert not np.isfinite(train.update(trainer, huge, ROWS.accepted, ROWS.censored))
    assert np.array_equal(served(trainer), before) and train.is_finite(trainer)

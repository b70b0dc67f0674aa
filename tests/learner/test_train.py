"""The network torch trains is the one numpy serves, and censored labels only push up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.bundle import BUCKETS, Kind
from decoder.policy.estimate import predict
from decoder.policy.probes import from_bytes, to_bytes
from decoder.policy.rule import MODEL
from decoder.policy.survival import BUCKET_OF
from learner import train
from learner.losses import payoff_loss, survival_loss, survived
from learner.rows import Rows, from_events
from tests.learner.traffic import Traffic

ROWS = from_events(Traffic(seed=1).events(60))


def trained(kind: Kind = "payoff", rows: Rows = ROWS, epochs: int = 3) -> train.Trainer:
    return train.fit(rows, kind, epochs)


def served(trainer: train.Trainer) -> np.ndarray:
    return predict(train.export(trainer, "s", 6.0, ROWS.features), ROWS.features)


def test_numpy_serves_what_torch_trained() -> None:
    trainer = trained()
    raw = train.forward(trainer, ROWS.features)[:, 0].detach().numpy()
    clipped = np.minimum(np.maximum(raw, 0), ROWS.draft_len)
    policy = from_bytes(to_bytes(train.export(trainer, "s", 6.0, ROWS.features)), "s")
    assert np.abs(predict(policy, ROWS.features) - clipped).max() < 1e-3


def test_fit_learns_reports_and_repeats() -> None:
    losses: list[float] = []
    fits = [train.fit(ROWS, "payoff", 8, report=lambda _, x: losses.append(x)) for _ in range(2)]
    assert len(losses) == 16 and losses[7] < 0.3 * losses[0]
    assert np.array_equal(served(fits[0]), served(fits[1]))


@settings(max_examples=50, deadline=None)
@given(st.floats(-20, 40, width=16), st.floats(0, 30, width=16))
def test_a_censored_label_is_a_lower_bound(output: float, bound: float) -> None:
    out = torch.tensor([output], requires_grad=True)
    value = payoff_loss(out, torch.tensor([bound]), torch.tensor([True]))
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
        train.update(one, ROWS)
    assert np.array_equal(served(trainer), served(again)) and trainer.updates == again.updates


def test_an_exported_policy_stands_still() -> None:
    trainer = trained()
    policy = train.export(trainer, "s", 6.0, ROWS.features)
    before = predict(policy, ROWS.features)
    train.update(trainer, ROWS)
    assert np.array_equal(predict(policy, ROWS.features), before)


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    trainer = trained()
    before = served(trainer)
    huge = replace(ROWS, features=np.full_like(ROWS.features, 3e38))
    assert not np.isfinite(train.update(trainer, huge))
    assert np.array_equal(served(trainer), before) and train.is_finite(trainer)


@given(st.integers(0, 200))
def test_positions_lived_through_are_counted_by_bucket(accepted: int) -> None:
    (counts,) = survived(np.array([accepted]))
    naive = np.bincount(BUCKET_OF[:accepted], minlength=BUCKETS)
    assert counts.tolist() == naive.tolist()


def naive_log_likelihood(logits: np.ndarray, length: int, accepted: int, censored: bool) -> float:
    """What was seen of one cache draft, one position at a time."""
    breaking = 1 / (1 + np.exp(-logits[BUCKET_OF].astype(float)))
    total = sum(np.log(1 - breaking[j]) for j in range(accepted))
    return total + (0.0 if censored or accepted == length else np.log(breaking[accepted]))


def test_the_survival_loss_is_the_likelihood_of_what_was_seen() -> None:
    rows = ROWS.take(np.arange(200))
    outputs = np.random.default_rng(0).normal(size=(200, BUCKETS + 1)).astype(np.float32)
    expected = [
        naive_log_likelihood(outputs[i], rows.draft_len[i], int(rows.accepted[i]), rows.censored[i])
        for i in range(200)
    ]
    for i in range(200):
        if rows.arm[i] == MODEL:
            chance = 1 / (1 + np.exp(-float(outputs[i, BUCKETS])))
            m = rows.model_accepted[i]
            expected[i] += m * np.log(chance)
            expected[i] += np.log(1 - chance) if m < rows.verified_len[i] else 0.0
    loss = survival_loss(torch.from_numpy(outputs), rows)
    assert float(loss) == pytest.approx(-np.mean(expected), rel=1e-4)


def test_survival_training_tells_long_drafts_from_short_ones() -> None:
    policy = train.export(trained("survival", epochs=20), "s", 6.0, ROWS.features)
    expected = predict(from_bytes(to_bytes(policy), "s"), ROWS.features)
    whole = (ROWS.accepted == ROWS.draft_len) & (ROWS.draft_len >= 6)
    assert expected[whole].mean() > 3 * expected[ROWS.accepted <= 1].mean()
    assert (expected <= ROWS.draft_len).all() and (expected >= 0).all()

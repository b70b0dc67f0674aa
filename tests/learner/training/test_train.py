"""The network that is trained is the one that serves; its loss is what became of drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.bundle import BUCKET_OF, BUCKETS, Kind, frequency_policy
from decoder.contracts.features import FEATURES
from decoder.policy.estimate import network, predict
from learner import checkpoint
from learner.evaluation.skill import FIGURES, WINDOW, Skill, curves, skill_of
from learner.training import train
from learner.training.losses import WORST, labels_of, losses, scores, tensors
from learner.training.rows import Rows, joined
from tests.events import from_events
from tests.learner.traffic import Traffic

ROWS = from_events(Traffic(seed=1).events(60))
BOTH = pytest.mark.parametrize("kind", ["survival", "payoff"])


def trained(kind: Kind = "payoff", rows: Rows = ROWS, epochs: int = 3) -> train.Trainer:
    return train.fit(rows, kind, epochs)


def served(trainer: train.Trainer) -> np.ndarray:
    return predict(train.export(trainer, "s", 6.0, ROWS.features), ROWS.features)


def loss(trainer: train.Trainer, rows: Rows) -> float:
    outputs = train.outputs_of(trainer, rows.features)
    return float(losses(trainer.kind, outputs, tensors(labels_of(rows))).mean())


@BOTH
def test_the_exported_policy_equals_the_trained_network(kind: Kind) -> None:
    """``decoder.policy`` computes what torch's module does, of each of several networks."""
    trainer = train.start(kind, train.normaliser(ROWS.features), networks=2)
    train.update(trainer, ROWS.take(np.arange(768)), 128)
    outputs = train.outputs_of(trainer, ROWS.features).numpy()
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-4, "each learned from its own minibatches"
    for place in range(2):
        policy = train.export(trainer, "s", 6.0, ROWS.features, place)
        assert np.abs(network(policy, ROWS.features) - outputs[place]).max() < 1e-3
        raw = outputs[place, :, 0].clip(0.0, ROWS.draft_len)
        if kind == "payoff":
            assert np.abs(predict(policy, ROWS.features) - raw).max() < 1e-3
    kept = predict(policy, ROWS.features)
    train.update(trainer, ROWS.take(np.arange(256)), 128)
    assert np.array_equal(predict(policy, ROWS.features), kept), "what is exported stands still"


def test_fit_learns_and_is_reproducible() -> None:
    one, again, begun = trained(epochs=8), trained(epochs=8), trained(epochs=1)
    assert loss(one, ROWS) < 0.5 * loss(begun, ROWS)
    assert np.array_equal(served(one), served(again))


@BOTH
def test_batched_networks_learn_as_single_ones(kind: Kind) -> None:
    normal = train.normaliser(ROWS.features)
    alone = [train.start(kind, normal) for _ in range(2)]
    both = train.start(kind, normal, networks=2)
    batches = [ROWS.take(np.arange(first, first + 64)) for first in range(0, 6 * 64, 64)]
    train.update(both, joined(batches), 64)
    for place, batch in enumerate(batches):
        train.update(alone[place % 2], batch, 64)
    for one, mine in zip(alone, both.weights, strict=True):
        assert np.abs(one.weights[0] - mine).max() < 1e-5
        assert one.steps == both.steps == 3


@BOTH
def test_training_resumes_exactly_from_a_checkpoint(kind: Kind) -> None:
    trainer = train.start(kind, train.normaliser(ROWS.features), networks=2)
    train.update(trainer, ROWS.take(np.arange(512)), 128)
    told = checkpoint.unpack(checkpoint.pack({"trainer": trainer}))
    again = checkpoint.restore(train.Trainer, told["trainer"])
    for one in (trainer, again):
        train.update(one, ROWS.take(np.arange(512, 1024)), 128)
    assert np.array_equal(trainer.weights, again.weights)
    assert np.array_equal(trainer.squares, again.squares) and again.steps == 4
    trainer.copy(0, 1)
    train.update(trainer, joined([ROWS.take(np.arange(128))] * 2), 128)
    assert np.array_equal(trainer.weights[0], trainer.weights[1]), "its moments are copied, too"


@BOTH
def test_absurd_drafts_do_not_stop_training(kind: Kind) -> None:
    trainer = trained(kind, epochs=5)
    before = loss(trainer, ROWS)
    batch = ROWS.take(np.arange(128))
    for absurd in (1e9, -1e9, 3e38):
        features = batch.features.copy()
        features[0] = absurd
        train.update(trainer, replace(batch, features=features), 128)
    assert np.isfinite(trainer.weights).all()
    for first in range(0, 1024, 128):
        train.update(trainer, ROWS.take(np.arange(first, first + 128)), 128)
    assert loss(trainer, ROWS) < 1.2 * before + 0.05


def test_training_uses_one_thread() -> None:
    trainer, counted = trained(), list[int]()
    trainer.network.register_forward_hook(lambda *_: counted.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train.update(trainer, ROWS.take(np.arange(64)), 64)
        train.outputs_of(trainer, ROWS.features)
        assert set(counted) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def naive(logits: np.ndarray, length: int, accepted: int, censored: bool) -> float:
    """The log-likelihood of one cache draft's label, one position at a time."""
    hazard = 1 / (1 + np.exp(-logits[BUCKET_OF].astype(float)))
    total = sum(np.log(1 - hazard[j]) for j in range(accepted))
    return total + (0.0 if censored or accepted == length else np.log(hazard[accepted]))


def test_the_likelihood_is_that_of_a_censored_survival_time() -> None:
    outputs = np.random.default_rng(0).normal(size=(200, BUCKETS)).astype(np.float32)
    labels = tensors(labels_of(ROWS.take(np.arange(200))))
    expected = [
        naive(outputs[i], ROWS.draft_len[i], int(ROWS.accepted[i]), ROWS.censored[i])
        for i in range(200)
    ]
    found = losses("survival", torch.from_numpy(outputs), labels)
    assert (-found).tolist() == pytest.approx(expected, rel=1e-4)
    assert scores("survival", torch.from_numpy(outputs), labels) == pytest.approx(
        np.clip(expected, WORST, 0.0), rel=1e-4
    )


@settings(max_examples=50)
@given(st.floats(-20, 40, width=16), st.floats(0, 30, width=16))
def test_a_censored_label_is_a_lower_bound(output: float, bound: float) -> None:
    accepted, censored = np.float32([bound]), np.array([True])
    rows = replace(ROWS.take(np.arange(1)), accepted=accepted, censored=censored)
    outputs = torch.tensor([[output]], requires_grad=True)
    labels = tensors(labels_of(rows))
    value = losses("payoff", outputs, labels).sum()
    (slope,) = torch.autograd.grad(value, outputs)
    if output >= bound:
        assert value == 0 and slope[0, 0] == 0
    else:
        assert value > 0 and slope[0, 0] < 0


@BOTH
def test_a_nan_prediction_scores_worst(kind: Kind) -> None:
    width = BUCKETS if kind == "survival" else 1
    outputs = torch.full((1, width), float("nan"))
    assert scores(kind, outputs, tensors(labels_of(ROWS.take(np.arange(1))))).tolist() == [WORST]


def labelled(predicted: list[float], accepted: list[float], censored: list[bool]) -> Rows:
    """Drafts for which the counting policy predicts ``predicted``."""
    rows = ROWS.take(np.arange(len(predicted)))
    features = rows.features.copy()
    features[:, [FEATURES.index("score"), FEATURES.index("draft_len")]] = np.stack(
        [predicted, np.full(len(predicted), 24.0)], axis=1
    )
    labels = {"accepted": np.float32(accepted), "censored": np.array(censored)}
    return replace(rows, features=features, **labels)


COUNTING = frequency_policy("s")
SIX = labelled(
    [7, 7, 7, 2, 2, 2, 7], [6, 9, 1, 8, 0, 3, 5], [False, False, False, False, False, True, True]
)


def test_precision_recall_and_error_are_the_papers() -> None:
    """Of drafts whose label is a lower bound below six nobody knows on which side they are; above
    a bound there is no error."""
    skill = skill_of(COUNTING, SIX)
    figures = skill.figures()
    assert (figures["precision"], figures["recall"]) == (2 / 3, 2 / 3)
    assert figures["f1"] == pytest.approx(2 / 3)
    assert figures["mae"] == pytest.approx((1 + 2 + 6 + 6 + 2 + 1 + 0) / 7)
    table = skill.table()
    assert (table["drafts"], table["high_payoff"], table["selected"]) == (5, 3 / 5, 3 / 5)
    assert skill_of(COUNTING, SIX.take(np.arange(0))).figures() == dict.fromkeys(FIGURES, 0.0)


def test_figures_cover_the_newest_drafts_only() -> None:
    whole = joined([ROWS] * 2)
    rolling, newest = Skill(WINDOW), Skill()
    for first in range(0, len(whole), 64):
        rolling.update(COUNTING, whole.part(first, first + 64))
    newest.update(COUNTING, whole.part(len(whole) - WINDOW, len(whole)))
    assert rolling.figures() == pytest.approx(newest.figures())


def test_curves_end_at_the_figures() -> None:
    found = curves({"": COUNTING, "champion_": COUNTING}, ROWS)
    assert found["mae"] == found["champion_mae"] and len(found["mae"]) == 32
    last = {name: found[name][-1] for name in FIGURES}
    assert last == pytest.approx(skill_of(COUNTING, ROWS).figures())
    assert all(len(values) == 1 for values in curves({"": COUNTING}, ROWS.part(0, 0)).values())

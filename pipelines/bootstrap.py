"""The first policy of a scope, by the paper's replay (Appendix B), and its place in the registry.

``rebuild`` makes the bundle that ships with the project from the target's own generations;
``ensure_registered`` puts the shipped bundle into MLflow as version 1 where a scope has none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from decoder.contracts.errors import ModelError
from decoder.contracts.events import DraftEvent
from decoder.contracts.policy import PAPER_THRESHOLD, Policy, from_bytes, predict, to_bytes
from decoder.payoff.token_classes import token_class_table
from decoder.scope import scope_of
from decoder.settings import WorkerSettings
from decoder.worker import SHIPPED_POLICIES
from learner import train
from learner.registry import Registry
from pipelines.embedded import drafter_path, ensure_model
from pipelines.replay import read_token_traces, replay

TEST_SHARE = 0.25
"""Last part of the traces, measured and never trained on."""


def embedded_scope() -> str:
    """Scope of the embedded target with the shipped drafter."""
    drafter = drafter_path()
    return scope_of(str(ensure_model()), str(drafter) if drafter else None)


def vocabulary_classes(model: Path) -> Any:
    """float32 [vocabulary, classes] of a checkpoint's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return token_class_table(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))


def _columns(events: list[DraftEvent]) -> tuple[Any, Any, Any]:
    features = np.stack([e.features for e in events])
    accepted = np.array([e.accepted for e in events], np.float32)
    return features, accepted, np.array([bool(e.censored) for e in events])


def scores(policy: Policy, events: list[DraftEvent]) -> dict[str, float]:
    """Error in tokens, and precision and recall at the paper's six, on resolved drafts."""
    features, accepted, censored = _columns(events)
    predicted, truth = predict(policy, features)[~censored], accepted[~censored]
    chosen, high = predicted >= PAPER_THRESHOLD, truth >= PAPER_THRESHOLD
    both = float((chosen & high).sum())
    return {
        "states": float(len(truth)),
        "mae": float(np.abs(predicted - truth).mean()),
        "high_payoff_share": float(high.mean()),
        "precision_at_6": both / max(float(chosen.sum()), 1.0),
        "recall_at_6": both / max(float(high.sum()), 1.0),
    }


def rebuild(generations: Path) -> tuple[Path, dict[str, float]]:
    """Train the embedded scope's bundle on ``generations`` and write it where it ships from.

    Returns:
        the bundle's path and its scores on the part not trained on.

    Raises:
        ModelError: ``generations`` does not exist or holds too little.
    """
    if not generations.exists():
        raise ModelError(f"no {generations}: make it with 'hvd train-drafter --only generate'.")
    traces = list(read_token_traces(generations))
    events = replay(traces, vocabulary_classes(ensure_model()), WorkerSettings.load())
    first_test = traces[int(len(traces) * (1 - TEST_SHARE))].session if traces else ""
    split = next((i for i, e in enumerate(events) if e.request.split("/")[0] == first_test), 0)
    training, test = events[:split], events[split:]
    if len(training) < 1000:
        raise ModelError(f"{generations} gives {len(training)} drafts to train on; 1000 needed.")
    trainer = train.fit(*_columns(training))
    policy = train.export(trainer, embedded_scope(), PAPER_THRESHOLD, _columns(test)[0])
    figures = scores(policy, test)
    policy = replace(
        policy,
        version=1,
        provenance={
            "made_by": "bootstrap replay of the target's own generations (paper, Appendix B)",
            "traces": len(traces),
            "drafts_trained_on": len(training),
            "scores": {k: round(v, 4) for k, v in figures.items()},
        },
    )
    SHIPPED_POLICIES.mkdir(exist_ok=True)
    for old in SHIPPED_POLICIES.glob("*.safetensors"):
        old.unlink()
    path = SHIPPED_POLICIES / f"{policy.scope}.safetensors"
    path.write_bytes(to_bytes(policy))
    return path, figures


def ensure_registered(tracking_uri: str) -> int:
    """Register the shipped bundle as the embedded scope's first champion, if it has none.

    Returns:
        the version that is champion.

    Raises:
        ModelError: no bundle is shipped for this target and drafter.
    """
    scope, registry = embedded_scope(), Registry(tracking_uri)
    champion = registry.champion(scope)
    if champion is not None:
        return champion.version
    path = SHIPPED_POLICIES / f"{scope}.safetensors"
    if not path.exists():
        raise ModelError(f"no policy ships for scope {scope}: make one with 'hvd bootstrap'.")
    policy = from_bytes(path.read_bytes(), scope)
    version = registry.register(
        policy, params={"source": "bootstrap"}, metrics=policy.provenance.get("scores", {})
    )
    registry.promote(scope, version)
    return version

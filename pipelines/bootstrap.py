"""The first policy of a scope, by replay (paper, Appendix B), and its place in the registry.

``rebuild`` makes the bundle that ships with the project from the target's own generations, those of
the workloads and answers to asks of many more kinds: the model arm is recorded at every position,
the production router decodes the recordings cycle by cycle, and the labelled drafts of those cycles
are what is learned from. ``ensure_registered`` puts
the shipped bundle into MLflow as version 1 where a scope has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.progress import track

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import ModelError
from decoder.engines.reference.method import method
from decoder.payoff.token_classes import token_class_table
from decoder.policy.estimate import predict
from decoder.policy.probes import from_bytes, to_bytes
from decoder.scope import scope_of
from decoder.settings import WorkerSettings
from decoder.worker import SHIPPED_POLICIES
from learner.registry import Registry
from learner.rows import Rows
from pipelines.embedded import drafter_path, ensure_model
from pipelines.replay.engine import hybrid, simulate
from pipelines.replay.measure import errors
from pipelines.replay.split import Shares, split
from pipelines.replay.survival import Part, learn, walks
from pipelines.replay.tally import Tally
from pipelines.replay.traces import Trace, read_token_traces

SHARES: Final = Shares(train=0.7, warm_up=0.05)
GENERATIONS: Final = Path("var/generations.jsonl")
ANSWERS: Final = Path("var/answers.jsonl")


def embedded_scope() -> str:
    """Scope of the embedded target with the shipped drafter."""
    drafter = drafter_path()
    return scope_of(str(ensure_model()), str(drafter) if drafter else None)


def vocabulary_classes(model: Path) -> Any:
    """float32 [vocabulary, classes] of a checkpoint's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return token_class_table(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))


def with_model_arm(traces: Sequence[Trace], target: Path, drafter: Path) -> list[Trace]:
    """``traces`` with the drafter's accepted length at every position, by teacher forcing.

    Traces that do not fit the context are left out.
    """
    from decoder.engines.reference.engine import ReferenceEngine
    from decoder.engines.reference.recording import record

    engine = ReferenceEngine.load(target, drafter)
    fitting = [t for t in traces if len(t.prompt) + len(t.output) <= engine.max_model_len]
    return [
        replace(
            t, model_accepted=np.array(record(engine, _ids(t.prompt), _ids(t.output)), np.int32)
        )
        for t in track(fitting, "recording the model arm", transient=True)
    ]


def _ids(tokens: Any) -> list[int]:
    return np.asarray(tokens).tolist()  # type: ignore[no-any-return]


def rebuild(files: Sequence[Path]) -> tuple[Path, dict[str, float]]:
    """Train the embedded scope's bundle on recorded generations and write it where it ships from.

    Args:
        files: generations; each has a suffix cache of its own, as another worker's would be.

    Returns:
        the bundle's path and its scores on sessions not trained on, at nominal costs.

    Raises:
        ModelError: a file does not exist or holds too little, or there is no drafter.
    """
    target, drafter = ensure_model(), drafter_path()
    for file in files:
        if not file.exists():
            raise ModelError(
                f"no {file}: 'hvd train-drafter --only generate' makes generations, 'hvd bootstrap "
                "--answers 600' answers."
            )
    if drafter is None:
        raise ModelError("no drafter ships for the embedded model: make one, hvd train-drafter.")
    traces = [with_model_arm(list(read_token_traces(f)), target, drafter) for f in files]
    return _trained(traces, target)


def _trained(traces: Sequence[list[Trace]], target: Path) -> tuple[Path, dict[str, float]]:
    parts = [split(each, SHARES) for each in traces]
    classes, settings = vocabulary_classes(target), WorkerSettings.load()
    policy, rows = learn(
        [Part(p.train, p.warm_up) for p in parts], classes, settings, None, embedded_scope()
    )
    policy = replace(policy, version=1)
    test, warm_up = [t for p in parts for t in p.test], [t for p in parts for t in p.warm_up]
    figures = _figures(policy, test, warm_up, classes, settings)
    policy = replace(
        policy,
        provenance={
            "made_by": "bootstrap replay of the target's own generations, cycle by cycle",
            "traces": sum(map(len, traces)),
            "drafts_trained_on": len(rows),
            "scores": {k: round(v, 4) for k, v in figures.items()},
        },
    )
    SHIPPED_POLICIES.mkdir(exist_ok=True)
    for old in SHIPPED_POLICIES.glob("*.safetensors"):
        old.unlink()
    path = SHIPPED_POLICIES / f"{policy.scope}.safetensors"
    path.write_bytes(to_bytes(policy))
    return path, figures


def _figures(
    policy: Policy,
    test: list[Trace],
    warm_up: list[Trace],
    classes: Any,
    settings: WorkerSettings,
) -> dict[str, float]:
    """Errors on the cycles it decodes, and its rate beside the fixed methods', nominal costs."""
    methods = {
        "rate": hybrid("hybrid", policy),
        "rate_model": walks()[0],
        "rate_suffix": method("suffix"),
        "rate_frequency": method("frequency"),
        "rate_none": replace(method("suffix"), policy=method("greedy").policy),
    }
    tallies: dict[str, Tally] = {}
    visited: Rows | None = None
    for name, each in methods.items():
        cycles, states = simulate(test, warm_up, each, classes, settings)
        tallies[name] = cycles.tally()
        visited = states.rows if visited is None else visited
    assert visited is not None
    found = errors(predict(policy, visited.features), visited).figures()
    return {**found, **{name: tally.rate for name, tally in tallies.items()}}


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

"""The policy bundle: one immutable value that says how a worker chooses between drafts.

Workers run :func:`predict` and :func:`decide`; the learner tunes and gates with these very
functions, so what was measured is what serves. On the wire a bundle is a safetensors file: float32
arrays, and a metadata header with everything else as JSON. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from decoder.contracts.errors import PolicyRefused
from decoder.contracts.events import Arm
from decoder.contracts.features import FEATURES, NUM_FEATURES, SCHEMA_ID

FloatArray = NDArray[np.float32]
Kind = Literal["payoff", "frequency"]

PAPER_THRESHOLD: Final = 6.0
"""Predicted accepted tokens from which the paper verifies a cache draft (Section 4, Appendix A)."""
PROBES: Final = 16
PROBE_TOLERANCE: Final = 1e-3
"""Tokens. A worker whose arithmetic strays further from the learner's refuses the bundle."""
MAX_BUNDLE_BYTES: Final = 4 * 1024 * 1024

ARMS: Final[tuple[Arm, ...]] = ("none", "model", "cache")
NONE, MODEL, CACHE = range(3)


@dataclass(frozen=True)
class Policy:
    """How to choose, valid for one scope and one feature schema.

    ``layers`` are (weight [in, out], bias [out]) float32 pairs of a ReLU network over
    ``(x - mean) / std``; the paper's Table 10 has widths 256, 256, 1. With ``kind="frequency"``
    there are no layers, and the suffix cache's own score stands in for the prediction (the paper's
    Frequency-Based Hybrid): what a scope starts from before anything was learned.
    ``use_model`` is false when the learner found the model draft slower than drafting nothing.
    """

    scope: str
    version: int
    threshold: float
    kind: Kind = "payoff"
    mean: FloatArray = field(default_factory=lambda: np.zeros(NUM_FEATURES, np.float32))
    std: FloatArray = field(default_factory=lambda: np.ones(NUM_FEATURES, np.float32))
    layers: tuple[tuple[FloatArray, FloatArray], ...] = ()
    use_model: bool = True
    model_payoff: float = 0.0
    schema_id: str = SCHEMA_ID
    probe_inputs: FloatArray = field(
        default_factory=lambda: np.zeros((0, NUM_FEATURES), np.float32)
    )
    provenance: dict[str, Any] = field(default_factory=dict)

    def with_probes(self, inputs: FloatArray) -> Policy:
        """The same policy carrying up to ``PROBES`` rows of ``inputs`` [n, features] as probes."""
        return replace(self, probe_inputs=np.ascontiguousarray(inputs[:PROBES], np.float32))


def frequency_policy(scope: str, threshold: float = 2.0) -> Policy:
    """Version 0 of a scope: verify the cache draft when its counted score reaches ``threshold``."""
    return Policy(scope=scope, version=0, threshold=threshold, kind="frequency")


def predict(policy: Policy, features: FloatArray) -> FloatArray:
    """Expected accepted length of each cache draft.

    Args:
        features: float32 [n, features].

    Returns:
        float32 [n], tokens, at least 0 and at most each draft's own length.
    """
    lengths = features[:, _DRAFT_LEN]
    if policy.kind == "frequency":
        return np.minimum(features[:, _SCORE], lengths)
    hidden = (features - policy.mean) / policy.std
    last = len(policy.layers) - 1
    for index, (weight, bias) in enumerate(policy.layers):
        hidden = hidden @ weight
        hidden += bias
        if index < last:
            np.maximum(hidden, 0.0, out=hidden)
    expected: FloatArray = np.minimum(np.maximum(hidden[:, 0], 0.0), lengths)
    return expected


_SCORE: Final = FEATURES.index("score")
_DRAFT_LEN: Final = FEATURES.index("draft_len")


def decide(policy: Policy, predicted: FloatArray, has_model: bool) -> NDArray[np.int8]:
    """Arm of each request with a cache draft: CACHE where the prediction reaches the threshold.

    Args:
        predicted: float32 [n] from :func:`predict`.
        has_model: whether the engine has a model drafter at all.

    Returns:
        int8 [n] of ``NONE``, ``MODEL`` or ``CACHE``.
    """
    otherwise = MODEL if has_model and policy.use_model else NONE
    return np.where(predicted >= policy.threshold, CACHE, otherwise).astype(np.int8)


def _arrays(policy: Policy) -> dict[str, FloatArray]:
    arrays = {"mean": policy.mean, "std": policy.std, "probe_inputs": policy.probe_inputs}
    arrays["probe_outputs"] = predict(policy, policy.probe_inputs)
    for index, (weight, bias) in enumerate(policy.layers):
        arrays[f"layers.{index}.weight"], arrays[f"layers.{index}.bias"] = weight, bias
    return {name: np.ascontiguousarray(a, np.float32) for name, a in arrays.items()}


def _digest(arrays: dict[str, FloatArray], header: str) -> str:
    sha = hashlib.sha256(header.encode())
    for name in sorted(arrays):
        sha.update(f"{name}{arrays[name].shape}".encode())
        sha.update(arrays[name].tobytes())
    return sha.hexdigest()


def to_bytes(policy: Policy) -> bytes:
    """``policy`` as a safetensors file, with a digest over arrays and header."""
    header = json.dumps(
        {
            "contract": "hvd.policy.v1",
            "scope": policy.scope,
            "version": policy.version,
            "kind": policy.kind,
            "threshold": policy.threshold,
            "use_model": policy.use_model,
            "model_payoff": policy.model_payoff,
            "schema_id": policy.schema_id,
            "provenance": policy.provenance,
        },
        sort_keys=True,
    )
    arrays = _arrays(policy)
    return save(arrays, metadata={"policy": header, "digest": _digest(arrays, header)})


def _metadata(data: bytes) -> dict[str, str]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])["__metadata__"]  # type: ignore[no-any-return]


def from_bytes(data: bytes, scope: str | None = None) -> Policy:
    """Read, check and probe a bundle.

    Args:
        scope: when given, the scope the bundle must be made for.

    Raises:
        PolicyRefused: with a ``reason``: damaged or truncated, another contract, digest, scope or
            schema, shapes that do not chain, numbers that are not finite, or probe outputs that
            this machine does not reproduce.
    """
    try:
        if len(data) > MAX_BUNDLE_BYTES:
            raise ValueError(f"{len(data)} bytes, at most {MAX_BUNDLE_BYTES} allowed")
        arrays, metadata = load(data), _metadata(data)
        header = json.loads(metadata["policy"])
        if header["contract"] != "hvd.policy.v1":
            raise ValueError(f"contract {header['contract']!r}")
        count = sum(name.endswith(".weight") for name in arrays)
        policy = Policy(
            scope=str(header["scope"]),
            version=int(header["version"]),
            threshold=float(header["threshold"]),
            kind=header["kind"],
            mean=arrays["mean"],
            std=arrays["std"],
            layers=tuple(
                (arrays[f"layers.{i}.weight"], arrays[f"layers.{i}.bias"]) for i in range(count)
            ),
            use_model=bool(header["use_model"]),
            model_payoff=float(header["model_payoff"]),
            schema_id=str(header["schema_id"]),
            probe_inputs=arrays["probe_inputs"],
            provenance=dict(header["provenance"]),
        )
        outputs = arrays["probe_outputs"]
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise PolicyRefused("malformed", f"policy bundle cannot be read: {error}") from error
    if metadata.get("digest") != _digest(arrays, metadata["policy"]):
        raise PolicyRefused("digest", "policy bundle is damaged: its digest does not match")
    _check(policy, scope)
    probed = predict(policy, policy.probe_inputs)
    if outputs.shape != probed.shape or (np.abs(probed - outputs) > PROBE_TOLERANCE).any():
        raise PolicyRefused("probe", "policy bundle predicts other payoffs here than where made")
    return policy


def _check(policy: Policy, scope: str | None) -> None:
    if scope is not None and policy.scope != scope:
        raise PolicyRefused("scope", f"policy for scope {policy.scope}, this worker has {scope}")
    if policy.schema_id != SCHEMA_ID:
        raise PolicyRefused("schema", f"policy for {policy.schema_id}, this worker has {SCHEMA_ID}")
    if policy.kind not in ("payoff", "frequency") or (policy.kind == "payoff") != bool(
        policy.layers
    ):
        raise PolicyRefused(
            "malformed", f"policy kind {policy.kind!r} with these layers is unknown"
        )
    width = NUM_FEATURES
    if policy.mean.shape != (width,) or policy.std.shape != (width,):
        raise PolicyRefused("shape", f"policy normaliser is not of shape ({width},)")
    if policy.probe_inputs.ndim != 2 or policy.probe_inputs.shape[1] != width:
        raise PolicyRefused("shape", f"policy probes are not of shape (n, {width})")
    for weight, bias in policy.layers:
        if weight.ndim != 2 or weight.shape[0] != width or bias.shape != (weight.shape[1],):
            raise PolicyRefused("shape", f"policy layer {weight.shape} does not follow {width}")
        width = weight.shape[1]
    if policy.layers and width != 1:
        raise PolicyRefused("shape", f"policy predicts {width} numbers, expected 1")
    numbers = [
        policy.mean,
        policy.std,
        policy.probe_inputs,
        *(a for pair in policy.layers for a in pair),
    ]
    finite = all(np.isfinite(a).all() for a in numbers) and np.isfinite(policy.threshold)
    if not finite or (policy.std <= 0).any():
        raise PolicyRefused("nonfinite", "policy holds numbers that are not finite")

"""A policy on the wire: a safetensors file of float32 arrays, with a metadata header that holds
everything else as JSON. Self-contained, with probes and a digest. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from decoder.contracts.errors import PolicyRefused
from decoder.contracts.features import NUM_FEATURES, SCHEMA_ID
from decoder.contracts.policy import OUTPUTS, Kind, Policy, predict
from decoder.contracts.survival import FloatArray

PROBE_TOLERANCE: Final = 1e-3
"""Tokens. A worker whose arithmetic strays further from the learner's refuses the bundle."""
MAX_BUNDLE_BYTES: Final = 4 * 1024 * 1024


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
            "rate": policy.rate,
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
            rate=float(header["rate"]),
            kind=cast("Kind", str(header["kind"])),
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
    if policy.kind not in OUTPUTS or bool(OUTPUTS[policy.kind]) != bool(policy.layers):
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
    if policy.layers and width != OUTPUTS[policy.kind]:
        raise PolicyRefused(
            "shape", f"policy predicts {width} numbers, expected {OUTPUTS[policy.kind]}"
        )
    numbers = [
        policy.mean,
        policy.std,
        policy.probe_inputs,
        *(a for pair in policy.layers for a in pair),
    ]
    finite = all(np.isfinite(a).all() for a in numbers) and np.isfinite(policy.threshold)
    finite = finite and np.isfinite(policy.rate) and policy.rate > 0
    if not finite or (policy.std <= 0).any():
        raise PolicyRefused("nonfinite", "policy holds numbers that are not finite")

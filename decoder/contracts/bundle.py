"""The policy record, and its form on the wire.

On the wire it is a safetensors file of float32 arrays with a metadata header that holds everything
else as JSON: self-contained, with probes and a digest. No pickle anywhere. What a policy predicts
and decides is ``decoder.policy``; :mod:`decoder.policy.probes` reads and writes whole bundles.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from decoder.contracts.errors import PolicyRefused
from decoder.contracts.features import NUM_FEATURES, SCHEMA_ID, FloatArray

CONTRACT: Final = "hvd.policy.v1"
MAX_BUNDLE_BYTES: Final = 4 * 1024 * 1024

BUCKET_ENDS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Last draft position (from 1) of each bucket of a survival network's outputs; one more bucket
holds everything behind."""
PROBES: Final = 16
"""Rows of features a bundle carries with what its maker predicted for them, at most."""
BUCKETS: Final = len(BUCKET_ENDS) + 1
MAX_DRAFT: Final = 512
"""Longest cache draft that can be configured."""

Kind = Literal["frequency", "payoff", "survival"]
OUTPUTS: Final[dict[str, int]] = {"frequency": 0, "payoff": 1, "survival": BUCKETS + 1}
"""Numbers the network of each kind predicts: a survival network's last is the model draft's."""


@dataclass(frozen=True)
class Policy:
    """How to choose, valid for one scope and one feature schema.

    ``layers`` are (weight [in, out], bias [out]) float32 pairs of a ReLU network over
    ``(x - mean) / std``. ``threshold`` is in tokens and belongs to the kinds ``frequency`` (what a
    scope starts from before anything was learned) and ``payoff``; ``rate``, tokens a request
    commits in the time of a step that verifies no draft, to ``survival``: it is what a worker
    starts from, and what its own rate replaces. ``use_model`` is false
    when the learner found the model draft slower than drafting nothing. ``model_payoff`` is the
    mean accepted length of model drafts when the policy was made.
    """

    scope: str
    version: int
    threshold: float
    kind: Kind = "payoff"
    mean: FloatArray = field(default_factory=lambda: np.zeros(NUM_FEATURES, np.float32))
    std: FloatArray = field(default_factory=lambda: np.ones(NUM_FEATURES, np.float32))
    layers: tuple[tuple[FloatArray, FloatArray], ...] = ()
    rate: float = 2.0
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

    @cached_property
    def folded(self) -> tuple[tuple[FloatArray, FloatArray], ...]:
        """``layers`` with the normaliser absorbed into the first, for raw features."""
        if not self.layers:
            return ()
        (weight, bias), *rest = self.layers
        with np.errstate(all="ignore"):  # a policy that cannot be served is refused by its checks
            scaled = weight.astype(np.float64) / self.std.astype(np.float64)[:, None]
            shifted = bias - self.mean.astype(np.float64) @ scaled
        return ((scaled.astype(np.float32), shifted.astype(np.float32)), *rest)

    @cached_property
    def flat(self) -> tuple[FloatArray, NDArray[np.int64]]:
        """:attr:`folded` in one row, each weight before its bias, and the widths on the way."""
        parts = [part.ravel() for layer in self.folded for part in layer]
        widths = [len(self.folded[0][0]), *(len(bias) for _, bias in self.folded)]
        return np.concatenate(parts), np.array(widths, np.int64)

    @property
    def parameter(self) -> float:
        """The decision parameter in force: ``rate`` of a survival policy, else ``threshold``."""
        return self.rate if self.kind == "survival" else self.threshold


def frequency_policy(scope: str, threshold: float = 2.0) -> Policy:
    """Version 0 of a scope: verify the cache draft when its counted score reaches ``threshold``."""
    return Policy(scope=scope, version=0, threshold=threshold, kind="frequency")


Arrays = dict[str, FloatArray]


def pack(policy: Policy, probe_outputs: FloatArray) -> bytes:
    """``policy`` as a safetensors file, with a digest over arrays and header.

    Args:
        probe_outputs: float32 [probes], what it predicts for its ``probe_inputs``.
    """
    header = json.dumps(
        {
            "contract": CONTRACT,
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
    arrays = {"mean": policy.mean, "std": policy.std, "probe_inputs": policy.probe_inputs}
    arrays["probe_outputs"] = probe_outputs
    for index, (weight, bias) in enumerate(policy.layers):
        arrays[f"layers.{index}.weight"], arrays[f"layers.{index}.bias"] = weight, bias
    arrays = {name: np.ascontiguousarray(a, np.float32) for name, a in arrays.items()}
    return save(arrays, metadata={"policy": header, "digest": _digest(arrays, header)})


def unpack(data: bytes) -> tuple[Policy, FloatArray]:
    """Read and check a bundle.

    Returns:
        the policy, and the outputs [probes] that its maker saw for its ``probe_inputs``.

    Raises:
        PolicyRefused: with a ``reason``: damaged or truncated, another contract, digest or schema,
            shapes that do not chain, or numbers that are not finite.
    """
    try:
        if len(data) > MAX_BUNDLE_BYTES:
            raise ValueError(f"{len(data)} bytes, at most {MAX_BUNDLE_BYTES} allowed")
        arrays, metadata = load(data), _metadata(data)
        header = json.loads(metadata["policy"])
        if header["contract"] != CONTRACT:
            raise ValueError(f"contract {header['contract']!r}")
        policy = _policy(header, arrays)
        outputs = arrays["probe_outputs"]
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise PolicyRefused("malformed", f"policy bundle cannot be read: {error}") from error
    if metadata.get("digest") != _digest(arrays, metadata["policy"]):
        raise PolicyRefused("digest", "policy bundle is damaged: its digest does not match")
    _check(policy)
    return policy, outputs


def _policy(header: dict[str, Any], arrays: Arrays) -> Policy:
    count = sum(name.endswith(".weight") for name in arrays)
    return Policy(
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


def _digest(arrays: Arrays, header: str) -> str:
    sha = hashlib.sha256(header.encode())
    for name in sorted(arrays):
        sha.update(f"{name}{arrays[name].shape}".encode())
        sha.update(arrays[name].tobytes())
    return sha.hexdigest()


def _metadata(data: bytes) -> dict[str, str]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])["__metadata__"]  # type: ignore[no-any-return]


def _check(policy: Policy) -> None:
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

"""The policy record and its serialised form.

Serialised, it is a safetensors file of float32 arrays whose metadata header holds everything else
as JSON: self-contained, with probes and a digest, without pickle. ``decoder.policy`` predicts and
decides with it; :mod:`decoder.policy.probes` reads and writes complete bundles.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from safetensors import SafetensorError
from safetensors.numpy import load, save

from decoder.contracts.errors import PolicyRefused
from decoder.contracts.features import FEATURES, NUM_FEATURES, SCHEMA_ID, FloatArray

UNREADABLE: Final = (
    SafetensorError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError,
    RecursionError, MemoryError,
)  # fmt: skip
"""Errors of reading a damaged bundle."""
CONTRACT: Final = "hvd.policy.v2"
MAX_BUNDLE_BYTES: Final = 4 * 1024 * 1024

BUCKET_ENDS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Last draft position (from 1) of each bucket of a survival network's outputs; one more bucket
holds all later positions."""
PROBES: Final = 16
"""Most probes of a bundle: rows of features, with the outputs that its maker computed for them."""
BUCKETS: Final = len(BUCKET_ENDS) + 1
MAX_DRAFT: Final = 512  # longest cache draft that can be configured
BUCKET_OF: Final = np.searchsorted(np.array(BUCKET_ENDS), np.arange(1, MAX_DRAFT + 1))
"""Bucket of draft position ``j`` at index ``j - 1``: int64 [MAX_DRAFT]."""

CHAMPION: Final = "champion"
TRIAL: Final = "trial"
FIRST: Final = "first"
ROLES: Final = (CHAMPION, TRIAL, FIRST)
"""Roles of a published policy: it serves, is compared with the one that serves, or serves where
there is no other. Part of its key on the topic."""
ANY_SCOPE: Final = "any"
"""Scope of a first policy that names no target and no drafter, and is valid for every scope of its
feature schema. Policies of other roles may not have it."""
NUMBERS_A_TERM: Final = 1_000_000
"""A publication's number is the term of its publisher's lease times this, plus a count."""
LEAP: Final = 1_000_000 * NUMBERS_A_TERM
"""Largest accepted increase of a publication's number, a million terms. A larger one is an error,
and would leave no numbers for later publications."""
LAST_PUBLICATION: Final = 2**53
MAX_PROVENANCE: Final = 65_536
MAX_LAYERS: Final = 16
_DEPTH: Final = 16
PARAMETERS: Final = (-1e30, 1e30)  # bounds of a policy's parameters, exclusive

Kind = Literal["frequency", "payoff", "survival"]
OUTPUTS: Final[dict[str, int]] = {"frequency": 0, "payoff": 1, "survival": BUCKETS}
"""Outputs of the network of each kind."""


@dataclass(frozen=True)
class Policy:
    """A policy for choosing drafts, valid for one scope and one feature schema.

    ``layers`` are (weight [in, out], bias [out]) float32 pairs of a ReLU network over
    ``(x - mean) / std``. ``threshold``, in tokens, decides for the kinds ``frequency`` (counting,
    not trained) and ``payoff``; for ``survival`` the worker's live rate decides. ``use_model`` is
    false when the learner found model drafts slower than no drafts. ``model_payoff`` is the mean
    accepted length of model drafts when the policy was trained. ``publication`` numbers the
    publications for this scope and ``role``; 0: never published. ``share`` is the share of a
    worker's steps for a policy of role ``trial``, without meaning in other roles.
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
    publication: int = 0
    role: str = CHAMPION
    share: float = 0.0
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
        with np.errstate(all="ignore"):  # the checks refuse a policy that overflows
            scaled = weight.astype(np.float64) / self.std.astype(np.float64)[:, None]
            shifted = bias - self.mean.astype(np.float64) @ scaled
        return ((scaled.astype(np.float32), shifted.astype(np.float32)), *rest)

    @cached_property
    def flat(self) -> tuple[FloatArray, NDArray[np.int64]]:
        """:attr:`folded` as one row, each weight before its bias, and the widths of the layers."""
        parts = [part.ravel() for layer in self.folded for part in layer]
        widths = [len(self.folded[0][0]), *(len(bias) for _, bias in self.folded)]
        return np.concatenate(parts), np.array(widths, np.int64)

    @cached_property
    def digest(self) -> str:
        """Identity of its decisions: SHA-256 of kind, parameters and weights, hexadecimal.

        Independent of version, publication, role and provenance. The threshold is included where it
        decides.
        """
        threshold = 0.0 if self.kind == "survival" else float(self.threshold)
        sha = hashlib.sha256(f"{self.kind} {threshold} {self.use_model}".encode())
        for part in (part for layer in self.folded for part in layer):
            sha.update(np.ascontiguousarray(part).tobytes())
        return sha.hexdigest()

    @property
    def parameter_name(self) -> str:
        """The decision parameter: ``rate`` (the worker's, live) for ``survival``, else
        ``threshold``."""
        return "rate" if self.kind == "survival" else "threshold"


def frequency_policy(scope: str, threshold: float = 2.0) -> Policy:
    """The baseline, which needs no training: verify a cache draft whose counted score reaches
    ``threshold``."""
    return Policy(scope, 0, threshold, "frequency")


Arrays = dict[str, FloatArray]
Word = Annotated[str, StringConstraints(max_length=256)]


class Header(BaseModel):
    """A bundle's fields except its arrays, as JSON under ``policy`` in the file's metadata."""

    model_config = ConfigDict(strict=True, extra="ignore")

    contract: Annotated[Literal["hvd.policy.v2"], Field(exclude=True)]
    scope: Word
    version: Annotated[int, Field(ge=0, le=2**31 - 1)]
    kind: Kind
    threshold: float
    use_model: bool
    model_payoff: float
    publication: Annotated[int, Field(ge=0, le=LAST_PUBLICATION)]
    role: Word
    share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    schema_id: Word
    provenance: dict[str, Any]


def pack(policy: Policy, probe_outputs: FloatArray) -> bytes:
    """``policy`` as a safetensors file, with a digest over arrays and header.

    Args:
        probe_outputs: float32 [probes], its outputs for its ``probe_inputs``.
    """
    fields = {name: getattr(policy, name) for name in Header.model_fields if name != "contract"}
    if not policy.share:  # absent, as in earlier releases, so that digests stay the same
        del fields["share"]
    header = json.dumps({"contract": CONTRACT, **fields}, sort_keys=True)
    arrays = {"mean": policy.mean, "std": policy.std, "probe_inputs": policy.probe_inputs}
    arrays["probe_outputs"] = probe_outputs
    for index, (weight, bias) in enumerate(policy.layers):
        arrays[f"layers.{index}.weight"], arrays[f"layers.{index}.bias"] = weight, bias
    arrays = {name: np.ascontiguousarray(a, np.float32) for name, a in arrays.items()}
    return _canonical(save(arrays, metadata={"policy": header, "digest": _digest(arrays, header)}))


def _canonical(data: bytes) -> bytes:
    """A safetensors file with its header sorted; the library writes it in random order."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(
        json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    return data[:8] + header.encode().ljust(size) + data[8 + size :]


def unpack(data: bytes) -> tuple[Policy, FloatArray]:
    """Read and check a bundle, whatever its bytes.

    Returns:
        the policy, and the outputs [probes] that its maker computed for its ``probe_inputs``.

    Raises:
        PolicyRefused: with a ``reason``: damaged or truncated, another contract, digest, dtype or
            schema, shapes that do not chain, numbers that are not finite, no probes, or the scope
            :data:`ANY_SCOPE` in another role than the first policy's.
    """
    try:
        if len(data) > MAX_BUNDLE_BYTES:
            raise ValueError(f"{len(data)} bytes, at most {MAX_BUNDLE_BYTES} allowed")
        arrays, metadata = load(data), metadata_of(data)
        policy = _policy(Header.model_validate_json(metadata["policy"]), arrays)
        outputs = arrays["probe_outputs"]
    except UNREADABLE as error:
        raise PolicyRefused("malformed", f"policy bundle cannot be read: {error}") from error
    foreign = sorted(name for name, array in arrays.items() if array.dtype != np.float32)
    if foreign:
        dtype = arrays[foreign[0]].dtype
        raise PolicyRefused("dtype", f"policy array {foreign[0]} is of {dtype}, not float32")
    if metadata.get("digest") != _digest(arrays, metadata["policy"]):
        raise PolicyRefused("digest", "policy bundle is damaged: its digest does not match")
    _check(policy, outputs)
    return policy, outputs


def _policy(header: Header, arrays: Arrays) -> Policy:
    count = sum(name.endswith(".weight") for name in arrays)
    if count > MAX_LAYERS:
        raise ValueError(f"{count} layers, at most {MAX_LAYERS} allowed")
    if _deeper(header.provenance, _DEPTH):
        raise ValueError(f"provenance nested more than {_DEPTH} deep")
    if len(json.dumps(header.provenance)) > MAX_PROVENANCE:
        raise ValueError(f"provenance of more than {MAX_PROVENANCE} bytes")
    layers = tuple((arrays[f"layers.{i}.weight"], arrays[f"layers.{i}.bias"]) for i in range(count))
    return Policy(
        **header.model_dump(), mean=arrays["mean"], std=arrays["std"], layers=layers,
        probe_inputs=arrays["probe_inputs"],
    )  # fmt: skip


def _deeper(value: object, levels: int) -> bool:
    """Whether JSON ``value`` is nested more than ``levels`` deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper(v, levels - 1) for v in inner)


def _digest(arrays: Arrays, header: str) -> str:
    sha = hashlib.sha256(header.encode())
    for name in sorted(arrays):
        sha.update(f"{name}{arrays[name].shape}".encode())
        sha.update(arrays[name].tobytes())
    return sha.hexdigest()


def metadata_of(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])["__metadata__"]  # type: ignore[no-any-return]


def _check(policy: Policy, outputs: FloatArray) -> None:
    """Refuse a policy that cannot serve, or probes that no draft can have."""
    inputs, numbers = policy.probe_inputs, [policy.mean, policy.std]
    if policy.schema_id != SCHEMA_ID:
        raise PolicyRefused("schema", f"policy for {policy.schema_id}, this worker has {SCHEMA_ID}")
    if policy.scope == ANY_SCOPE and policy.role != FIRST:
        raise PolicyRefused("scope", f"policy of role {policy.role} for any scope: name its own")
    if bool(OUTPUTS[policy.kind]) != bool(policy.layers):
        raise PolicyRefused("malformed", f"policy of kind {policy.kind} with these layers")
    width = NUM_FEATURES
    if policy.mean.shape != (width,) or policy.std.shape != (width,):
        raise PolicyRefused("shape", f"policy normaliser is not of shape ({width},)")
    if inputs.shape[1:] != (width,) or len(inputs) > PROBES or outputs.shape != (len(inputs),):
        raise PolicyRefused("shape", f"policy has no 0 to {PROBES} probes with an output each")
    for weight, bias in policy.layers:
        if weight.ndim != 2 or weight.shape[0] != width or bias.shape != (weight.shape[1],):
            raise PolicyRefused("shape", f"policy layer {weight.shape} does not follow {width}")
        width = weight.shape[1]
        numbers += [weight, bias]
    if policy.layers and width != OUTPUTS[policy.kind]:
        expected = OUTPUTS[policy.kind]
        raise PolicyRefused("shape", f"policy predicts {width} numbers, expected {expected}")
    finite = all(np.isfinite(array).all() for array in (*numbers, inputs))
    low, high = PARAMETERS
    bounded = low < policy.threshold < high and low < policy.model_payoff < high
    if not (finite and bounded and (policy.std > 0).all()):
        raise PolicyRefused("nonfinite", "policy holds numbers that are not finite")
    if policy.layers and not len(inputs):
        raise PolicyRefused("probe", "policy with a network and no probe: make one with probes")
    lengths = inputs[:, FEATURES.index("draft_len")]
    possible = (lengths >= 0).all() and (lengths <= MAX_DRAFT).all()
    if not possible or not (np.abs(inputs) < _PROBE_LIMIT).all() or not np.isfinite(outputs).all():
        raise PolicyRefused("probe", "policy with probes of drafts that cannot be")


_PROBE_LIMIT: Final = 1e9

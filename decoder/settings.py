"""Settings of one serving worker, read from ``HVD_WORKER_*``."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from decoder.contracts.settings import Settings, secret, setting
from decoder.contracts.trials import HOLDOUT_VARIANTS

FACTOR: Final = 4.0
WHOLE_FACTOR: Final = 2.0
"""Tokens of a cache draft for each matched token: where a policy predicts where to truncate, and
where a rule verifies whole drafts and loses by longer ones (decision 12)."""


class WorkerSettings(Settings):
    """What two deployments of a worker may set differently.

    The suffix-cache defaults are Table 7 of the paper, except the factor: a policy that chooses how
    much of a draft to verify loses nothing by seeing more of it.
    """

    renamed: ClassVar[Mapping[str, str]] = {"HVD_WORKER_SIDES": "HVD_WORKER_VARIANTS"}
    model_config = SettingsConfigDict(env_prefix="HVD_WORKER_", frozen=True, extra="forbid")

    enabled: bool = setting(False, "switches the vLLM plugin on")
    name: str = Field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}",
        min_length=1,
        max_length=250,  # a record adds six
        description="name of this worker in telemetry",
    )
    telemetry: bool = setting(True, "send events to Kafka and take policies from it")
    metrics: bool = setting(True, "publish Prometheus metrics")
    queue_size: int = setting(
        262_144,
        "draft events to buffer in memory, half a KiB each, while Kafka is away; later "
        "ones are dropped",
        ge=1,
    )
    events_per_s: float = setting(
        0.0,
        "approximate draft events a second; above it, requests are sampled at random "
        "(head sampling); 0 sends all",
        ge=0,
        le=1e9,
    )
    policy_file: Path | None = setting(None, "bundle to start from, before Kafka answers")
    start: Literal["first", "counting"] = setting(
        "first", "initial policy: the shipped first policy, or counted scores"
    )
    holdout: float = setting(
        0.02, "share of steps for the permanent live comparison; 0 compares nothing", ge=0, le=0.9
    )
    variants: Annotated[tuple[str, ...], NoDecode] = setting(
        ("plain",),
        f"variants compared with the champion, comma-separated: {', '.join(HOLDOUT_VARIANTS)}",
    )
    floor: bool = setting(True, "fall back to the best fixed arm while it is faster")
    model_draft_tokens: int = setting(4, "tokens of an EAGLE3 chain at most", ge=1, le=16)
    tenants: Literal["middleware", "client", "shared"] = setting(
        "shared",
        "source of a request's tenant: the middleware, which hvd serve enables; the "
        "client, in vllm_xargs.hvd_tenant; or none: all requests share text",
    )
    tenant_header: str = setting(
        "", "header that names the tenant; one that only your gateway can set"
    )
    id_key: str = secret("", "the operator's key, which hashes names")
    id_key_file: Path | None = setting(None, "file that holds the key instead")
    suffix_max_depth: int = setting(
        64, "tokens of context and cache draft together at most", ge=2, le=512
    )
    suffix_max_draft: int = setting(64, "tokens of a cache draft at most", ge=1, le=512)
    suffix_max_factor: float = Field(
        default_factory=lambda given: WHOLE_FACTOR if given.get("start") == "counting" else FACTOR,
        gt=0,
        le=512,
        description="tokens of a cache draft, at most, for each context token matched; lower where "
        "counted scores decide first, which verify whole drafts",
    )
    suffix_max_offset: float = setting(
        0.0, "tokens added to that, whatever the match", ge=-512, le=512
    )
    suffix_min_prob: float = setting(
        0.1, "counted probability below which a cache draft ends", ge=0, le=1
    )
    cache_gib: float = Field(
        2.0, gt=0, le=56, description="GiB of text to copy from, all tenants together"
    )

    @field_validator("variants", mode="before")
    @classmethod
    def _known_variants(cls, value: Any) -> tuple[str, ...]:
        given = value.split(",") if isinstance(value, str) else value
        names = tuple(dict.fromkeys(name for part in given if (name := str(part).strip())))
        if any(name not in HOLDOUT_VARIANTS for name in names):
            raise ValueError(
                f"name some of {', '.join(HOLDOUT_VARIANTS)}, with commas between them"
            )
        return names

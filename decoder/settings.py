"""Settings of one serving worker, read from ``HVD_WORKER_*``."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from decoder.contracts.settings import Settings
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

    enabled: bool = Field(False, description="switches the vLLM plugin on")
    name: str = Field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}",
        min_length=1,
        max_length=250,  # a record adds six
        description="name of this worker in telemetry",
    )
    telemetry: bool = Field(True, description="send events to Kafka and take policies from it")
    metrics: bool = Field(True, description="publish Prometheus metrics")
    queue_size: int = Field(
        262_144,
        ge=1,
        description="draft events to buffer in memory, half a KiB each, while Kafka is away; later "
        "ones are dropped",
    )
    events_per_s: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="approximate draft events a second; above it, requests are sampled at random "
        "(head sampling); 0 sends all",
    )
    policy_file: Path | None = Field(None, description="bundle to start from, before Kafka answers")
    start: Literal["first", "counting"] = Field(
        "first",
        description="initial policy: the shipped first policy, or counted scores",
    )
    holdout: float = Field(
        0.02,
        ge=0,
        le=0.9,
        description="share of steps for the permanent live comparison; 0 compares nothing",
    )
    variants: Annotated[tuple[str, ...], NoDecode] = Field(
        ("plain",),
        description=f"variants compared with the champion, comma-separated: "
        f"{', '.join(HOLDOUT_VARIANTS)}",
    )
    floor: bool = Field(True, description="fall back to the best fixed arm while it is faster")
    model_draft_tokens: int = Field(4, ge=1, le=16, description="tokens of an EAGLE3 chain at most")
    tenants: Literal["middleware", "client", "shared"] = Field(
        "shared",
        description="source of a request's tenant: the middleware, which hvd serve enables; the "
        "client, in vllm_xargs.hvd_tenant; or none: all requests share text",
    )
    tenant_header: str = Field(
        "", description="header that names the tenant; one that only your gateway can set"
    )
    id_key: str = Field("", repr=False, description="the operator's key, which hashes names")
    id_key_file: Path | None = Field(None, description="file that holds the key instead")
    suffix_max_depth: int = Field(
        64, ge=2, le=512, description="tokens of context and cache draft together at most"
    )
    suffix_max_draft: int = Field(64, ge=1, le=512, description="tokens of a cache draft at most")
    suffix_max_factor: float = Field(
        default_factory=lambda given: WHOLE_FACTOR if given.get("start") == "counting" else FACTOR,
        gt=0,
        le=512,
        description="tokens of a cache draft, at most, for each context token matched; lower where "
        "counted scores decide first, which verify whole drafts",
    )
    suffix_max_offset: float = Field(
        0.0, ge=-512, le=512, description="tokens added to that, whatever the match"
    )
    suffix_min_prob: float = Field(
        0.1, ge=0, le=1, description="counted probability below which a cache draft ends"
    )
    cache_gib: float = Field(  # a larger cache would overflow int32 positions
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

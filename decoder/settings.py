"""Settings of one serving worker, read from ``HVD_WORKER_*``."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from decoder.contracts.errors import SettingsError
from decoder.contracts.settings import Settings
from decoder.contracts.trials import HOLDOUT_SIDES

FACTOR: Final = 4.0
WHOLE_FACTOR: Final = 2.0
"""Tokens of a cache draft for each one matched: where a policy foresees which place to cut at, and
where a rule verifies drafts whole, which loses by longer ones (decision 12)."""


def user_cache() -> Path:
    """Where this project keeps for one user what can be made again.

    Raises:
        SettingsError: the user has no such folder.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a container's user that no file knows
        raise SettingsError(
            "this user has no home: set HOME, or XDG_CACHE_HOME, to a folder that it may write."
        ) from None
    return root / "hybrid-verified-decoding"


class WorkerSettings(Settings):
    """What two deployments of a worker may want to differ in.

    The suffix-cache defaults are Table 7 of the paper, but for the factor: a policy that chooses
    how much of a draft to verify loses nothing by being shown more of it.
    """

    model_config = SettingsConfigDict(env_prefix="HVD_WORKER_", frozen=True, extra="forbid")

    enabled: bool = Field(False, description="switches the vLLM plugin on")
    name: str = Field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}",
        min_length=1,
        max_length=250,  # a record takes six more
        description="how this worker calls itself in telemetry",
    )
    telemetry: bool = Field(True, description="send events to Kafka and take policies from it")
    metrics: bool = Field(True, description="publish Prometheus metrics")
    queue_size: int = Field(
        65_536, ge=1, description="draft events that may wait to be handed over"
    )
    events_per_s: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="draft events sent a second, about: above it whole requests are left out, by "
        "chance; 0 sends all",
    )
    spill_mib: int = Field(
        256,
        ge=0,
        description="MiB of draft events kept in a file while Kafka is away; 0 keeps none",
    )
    spill_folder: Path = Field(
        default_factory=lambda: user_cache() / "spill",
        description="where that file is; the user's cache by default",
    )
    policy_file: Path | None = Field(None, description="bundle to start from, before Kafka answers")
    start: Literal["first", "counting"] = Field(
        "first",
        description="what decides before anything is learned: the first policy, or counted scores",
    )
    holdout: float = Field(
        0.02,
        ge=0,
        le=0.9,
        description="part of the steps that the sides compared for ever share; 0 compares none",
    )
    sides: Annotated[tuple[str, ...], NoDecode] = Field(
        ("plain",), description=f"who they are, with commas: {', '.join(HOLDOUT_SIDES)}"
    )
    floor: bool = Field(True, description="fall back to the best fixed arm while it is faster")
    model_draft_tokens: int = Field(4, ge=1, le=16, description="tokens of an EAGLE3 chain at most")
    tenants: Literal["middleware", "client", "shared"] = Field(
        "shared",
        description="who says whose a request is: the middleware, which hvd serve switches on; the "
        "client itself, in vllm_xargs.hvd_tenant; or nobody, and all requests share",
    )
    tenant_header: str = Field(
        "", description="header that names the tenant; one that only your gateway can set"
    )
    id_key: str = Field(
        "", repr=False, description="the operator's key, under which names are hashed"
    )
    id_key_file: Path | None = Field(None, description="file that holds the key instead")
    suffix_max_depth: int = Field(
        64, ge=2, le=512, description="tokens of context and cache draft together at most"
    )
    suffix_max_draft: int = Field(64, ge=1, le=512, description="tokens of a cache draft at most")
    suffix_max_factor: float = Field(
        default_factory=lambda given: WHOLE_FACTOR if given.get("start") == "counting" else FACTOR,
        gt=0,
        le=512,
        description="tokens of a cache draft, at most, for each context token matched; fewer where "
        "counted scores decide at first, which verify drafts whole",
    )
    suffix_max_offset: float = Field(
        0.0, ge=-512, le=512, description="tokens added to that, whatever was matched"
    )
    suffix_min_prob: float = Field(
        0.1, ge=0, le=1, description="counted chance below which a cache draft does not go on"
    )
    cache_gib: float = Field(  # positions of more would not be int32
        2.0, gt=0, le=56, description="GiB that text to copy from takes, of all tenants together"
    )

    @field_validator("sides", mode="before")
    @classmethod
    def _named(cls, value: Any) -> tuple[str, ...]:
        given = value.split(",") if isinstance(value, str) else value
        names = tuple(dict.fromkeys(name for part in given if (name := str(part).strip())))
        if any(name not in HOLDOUT_SIDES for name in names):
            raise ValueError(f"name some of {', '.join(HOLDOUT_SIDES)}, with commas between them")
        return names

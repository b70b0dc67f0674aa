"""Consistency check of an engine's ranks: all run this plugin, in one version, with one set of
settings, or none does.

A rank without the plugin is stock vLLM: it joins no broadcast of ours, and the others would wait
for it. Ray and engines on several hosts start ranks with packages and variables of their own, and
vLLM only logs a plugin that cannot be imported. Ranks therefore compare themselves through their
group's store, which needs nothing from an absent rank, and the process that started them asks each.
"""

from __future__ import annotations

import json
from datetime import timedelta
from importlib import metadata
from typing import Any, Final

from decoder.contracts.errors import EngineError
from decoder.settings import WorkerSettings

TIMEOUT_S: Final = 60.0
"""How long to wait for a rank. All have just formed their group, and have loaded no weights yet."""
_PER_RANK: Final = {"enabled", "name", "policy_file", "id_key", "id_key_file"}
"""Settings in which ranks may differ: names and paths of a machine, and generated keys."""
_PACKAGE: Final = "hybrid-verified-decoding"


def configuration() -> dict[str, Any]:
    """What must be equal on all ranks, by variable, as JSON."""
    settings = WorkerSettings.load().model_dump(mode="json", exclude=_PER_RANK)
    variables = {f"HVD_WORKER_{name.upper()}": value for name, value in settings.items()}
    return {_PACKAGE: metadata.version(_PACKAGE), **variables}


def compare_ranks(group: Any) -> None:
    """Compare this rank with the others of a vLLM group; a rank alone returns at once.

    Raises:
        EngineError: a rank differs, or does not answer.
    """
    if group.world_size == 1:
        return
    mine, store = configuration(), group.cpu_group.get_group_store()
    keys = [f"hvd/{rank}" for rank in range(group.world_size)]
    store.set(keys[group.rank_in_group], json.dumps(mine))
    for rank, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=TIMEOUT_S))
            other = json.loads(store.get(key))
        except RuntimeError:  # a file store raises no other error
            other = None
        _compare(rank, other, f"rank {group.rank_in_group}", mine)


def compare_workers(executor: Any) -> None:
    """Compare all ranks of a vLLM executor with this process, which started them.

    Raises:
        EngineError: a rank differs, or has no adapter.
    """

    def on_rank(worker: Any) -> dict[str, Any] | None:  # sent by value: the package may be missing
        try:
            from decoder.engines.vllm.consistency import configuration
            from decoder.engines.vllm.hooks import adapter_of
        except ImportError:
            return None
        return configuration() if adapter_of(worker.model_runner) is not None else None

    for rank, other in enumerate(executor.collective_rpc(on_rank)):
        _compare(rank, other, "the process that started it", configuration())


def _compare(rank: int, other: dict[str, Any] | None, who: str, mine: dict[str, Any]) -> None:
    if other == mine:
        return
    problem = "runs without this plugin, or has ended"
    if other is not None:
        names = [name for name in {**mine, **other} if other.get(name) != mine.get(name)]
        there, here = ([f"{n} {one.get(n)}" for n in names] for one in (other, mine))
        problem = f"has {', '.join(there)} where {who} has {', '.join(here)}"
    raise EngineError(
        f"rank {rank} {problem}: install the same {_PACKAGE} on every node, set the same HVD_* "
        "there, and name hybrid_verified_decoding in VLLM_PLUGINS wherever that is set."
    )

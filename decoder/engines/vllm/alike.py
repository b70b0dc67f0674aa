"""All ranks of an engine have this plugin, in one version and with the same settings, or none does.

A rank without it is stock vLLM: it takes part in no broadcast of ours, and the others would wait
for it. Ray and engines on several hosts start ranks with packages and variables of their own, and
vLLM only logs a plugin that cannot be imported. So ranks look for each other in their group's
store, which asks nothing of a rank that is not there, and whoever started them asks them all.
"""

from __future__ import annotations

import json
from datetime import timedelta
from importlib import metadata
from typing import Any, Final

from decoder.contracts.errors import EngineError
from decoder.settings import WorkerSettings

PATIENCE_S: Final = 60.0
"""How long a rank is waited for. All have just made their group, and have read no weights yet."""
_OWN: Final = {"enabled", "name", "policy_file", "id_key", "id_key_file"}
"""What ranks may differ in: names of the machine's own, and a key that each has made itself."""
_PACKAGE: Final = "hybrid-verified-decoding"


def told() -> dict[str, Any]:
    """What has to be the same on all ranks, by variable, as JSON."""
    given = WorkerSettings.load().model_dump(mode="json", exclude=_OWN)
    named = {f"HVD_WORKER_{name.upper()}": value for name, value in given.items()}
    return {_PACKAGE: metadata.version(_PACKAGE), **named}


def meet(group: Any) -> None:
    """Look for the other ranks of a vLLM group, and compare what they say; alone, do nothing.

    Raises:
        EngineError: a rank says something else, or nothing.
    """
    if group.world_size == 1:
        return
    mine, store = told(), group.cpu_group.get_group_store()
    keys = [f"hvd/{rank}" for rank in range(group.world_size)]
    store.set(keys[group.rank_in_group], json.dumps(mine))
    for rank, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=PATIENCE_S))
            theirs = json.loads(store.get(key))
        except RuntimeError:  # a store in a file raises no other
            theirs = None
        _compare(rank, theirs, f"rank {group.rank_in_group}", mine)


def ask(executor: Any) -> None:
    """Ask all ranks of a vLLM executor, and compare with this process, which started them.

    Raises:
        EngineError: a rank says something else, or has no adapter.
    """

    def asked(worker: Any) -> dict[str, Any] | None:  # sent by value: it may find no such package
        try:
            from decoder.engines.vllm.alike import told
            from decoder.engines.vllm.attached import adapter_of
        except ImportError:
            return None
        return told() if adapter_of(worker.model_runner) is not None else None

    for rank, theirs in enumerate(executor.collective_rpc(asked)):
        _compare(rank, theirs, "the process that started it", told())


def _compare(rank: int, theirs: dict[str, Any] | None, who: str, mine: dict[str, Any]) -> None:
    if theirs == mine:
        return
    what = "runs without this plugin, or has ended"
    if theirs is not None:
        names = [name for name in {**mine, **theirs} if theirs.get(name) != mine.get(name)]
        there, here = ([f"{n} {one.get(n)}" for n in names] for one in (theirs, mine))
        what = f"has {', '.join(there)} where {who} has {', '.join(here)}"
    raise EngineError(
        f"rank {rank} {what}: install the same {_PACKAGE} on every node, set the same HVD_* there, "
        "and name hybrid_verified_decoding in VLLM_PLUGINS wherever that is set."
    )

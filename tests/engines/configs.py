"""Configurations as vLLM makes them of its arguments; no engine is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decoder.engines.vllm import runner_choice
from pipelines.embedded import DRAFTER, ensure_model

Change = Callable[[Any], None]


def config(method: str = "eagle3", **changes: Any) -> Any:
    """For few short requests; ``tokens`` are draft tokens, the others arguments of the engine."""
    given = dict(changes.pop("speculative", {}))
    tokens = changes.pop("tokens", 16 if method == "eagle3" else None)
    if tokens is not None:
        given["num_speculative_tokens"] = tokens
    arguments: dict[str, Any] = {
        "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 96,
        "disable_log_stats": False,
    }  # fmt: skip
    return _made(method, given, **arguments | changes)


def engine(method: str = "eagle3", **speculative: Any) -> Any:
    """As ``hvd serve`` starts it, with ``speculative`` in its place."""
    if method == "eagle3":
        usual = {"num_speculative_tokens": 64, "disable_eagle_block_drop": True}
        speculative = usual | speculative
    return _made(method, speculative, max_model_len=1024)


def _made(method: str, speculative: dict[str, Any], **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    need_no_trees()
    given: dict[str, Any] = {"method": method}
    if method == "eagle3":
        given |= {"model": str(DRAFTER), "disable_padded_drafter_batch": True}
    return EngineArgs(
        model=str(ensure_model()), dtype="float32",
        speculative_config=given | speculative if method else None, **arguments,
    ).create_engine_config()  # fmt: skip


def need_no_trees() -> None:
    """As where the plugin is loaded: method suffix needs no package of suffix trees."""
    from vllm.config import speculative

    speculative.has_arctic_inference = lambda: True


def setting(path: str, value: Any) -> Change:
    """A change of one field, behind vLLM's own checks of what goes with what."""

    def change(config: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            config = getattr(config, parent)
        object.__setattr__(config, name, value)

    return change


def on_v2(config: Any) -> None:
    """Have a configuration say that vLLM has chosen its V2 runner, and our worker on it."""
    config.__class__ = type("OnV2", (type(config),), {"use_v2_model_runner": True})
    config.parallel_config.worker_cls = next(iter(runner_choice.WORKERS.values()))

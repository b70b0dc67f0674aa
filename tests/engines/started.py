"""What vLLM makes of settings where the plugin is there before it looks at them, and a Triton, but
no package of suffix trees."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

METHODS: Final[dict[str, dict[str, Any]]] = {
    "eagle3": {"disable_padded_drafter_batch": False}, "suffix": {"num_speculative_tokens": 9}
}  # fmt: skip
V2: Final = "VLLM_USE_V2_MODEL_RUNNER"


@contextmanager
def kept() -> Iterator[list[str]]:
    """What is logged meanwhile, by whom ever: vLLM sets up its handlers more than once."""
    said, make = list[str](), logging.getLogRecordFactory()

    def made(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        said.append(record.getMessage())
        return record

    logging.setLogRecordFactory(made)
    yield said
    logging.setLogRecordFactory(make)


def main() -> dict[str, Any]:
    """Make each configuration, where V2 is asked for and where nothing is."""
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    from decoder.engines.vllm.plugin import register
    from decoder.engines.vllm.requirements import check
    from decoder.settings import WorkerSettings
    from tests.engines import configs

    register()
    result = {}
    with (
        mock.patch.dict(sys.modules, arctic_inference=None),
        mock.patch.object(configs, "need_no_trees", lambda: None),  # that is the plugin's own
        mock.patch.dict(os.environ),
        kept() as said,
    ):
        for name, asked in (("", {}), (" on V2", {V2: "1"})):
            os.environ.pop(V2, None)
            os.environ.update(asked)
            for method, given in METHODS.items():
                made = configs.engine(method, **given if asked or method == "suffix" else {})
                check(made, WorkerSettings())
                scheduler = made.scheduler_config
                result[method + name] = {
                    "v2": made.use_v2_model_runner, "worker": made.parallel_config.worker_cls,
                    "scheduler": scheduler.scheduler_cls, "ahead": scheduler.async_scheduling,
                    "log": "\n".join(said),
                }  # fmt: skip
                if method == "suffix":
                    SuffixDecodingProposer(made)
    return result

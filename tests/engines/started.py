"""What vLLM makes of settings with the plugin: ``python -m tests.engines.started RESULT``."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, Final

from tests.engines import interpreted

METHODS: Final[dict[str, dict[str, Any]]] = {
    "eagle3": {"disable_padded_drafter_batch": False}, "suffix": {"num_speculative_tokens": 9}
}  # fmt: skip
V2: Final = "VLLM_USE_V2_MODEL_RUNNER"


def kept() -> list[str]:
    """What is logged from now on, by whom ever: vLLM sets up its handlers more than once."""
    said, make = list[str](), logging.getLogRecordFactory()

    def made(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        said.append(record.getMessage())
        return record

    logging.setLogRecordFactory(made)
    return said


def main(result_file: str) -> None:
    """Make each configuration, where V2 is asked for and where nothing is."""
    sys.modules["arctic_inference"] = None  # type: ignore[assignment]
    os.environ.pop(V2, None)
    interpreted.install(None)
    from decoder.engines.vllm.plugin import register

    register()
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    from decoder.engines.vllm.requirements import check
    from decoder.settings import WorkerSettings
    from tests.engines import configs

    configs.need_no_trees = lambda: None  # that is the plugin's own
    said, result = kept(), {}
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
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])

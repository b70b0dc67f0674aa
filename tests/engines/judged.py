"""What vLLM judges by a length, a list or a state: ``python -m tests.engines.judged RESULT``.

Everything is asked twice, so that drafts of the second time run across each edge. The asks are made
of what the model writes without any: they are the same for whoever writes the same.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pipelines.embedded import ensure_model
from tests.engines.plugged import worker_in

QUESTIONS: Final = (
    "What is the capital of France? Answer in one sentence.",
    "List the days of the week, one per line.",
    "Repeat exactly: the quick brown fox jumps over the lazy dog, the quick brown fox.",
    "Write a Python function that adds two numbers.",
)
LONGEST: Final = 40
DRAFTS: Final = 9
"""Tokens at most: so short, they end before, at and behind each edge."""
THINKS, THOUGHT = "\n", "."
"""What opens and closes thinking. The prompt's last token opens it, and so do an answer's lines."""
SCHEMA: Final = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TAG: Final = {"structures": [{"begin": "The", "schema": SCHEMA, "end": "."}], "triggers": ["The"]}

Ask = tuple[str, dict[str, Any]]


def asks(written: dict[str, list[int]], text_of: Any) -> dict[str, list[Ask]]:
    """By kind: questions with what is asked of their answers, beside ``written`` without it."""
    found: dict[str, list[Ask]] = {}
    for question, tokens in written.items():
        for kind, asked in _asks(tokens, text_of):
            found.setdefault(kind, []).append((question, asked))
    return found


def _asks(tokens: list[int], text_of: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    for place in (DRAFTS - 4, *range(DRAFTS, DRAFTS + 4)):  # a first draft ends about there
        for least in (place - 3, place, place + 1):
            if tokens[place : place + 1] and tokens[place] not in tokens[:place]:
                yield "min_tokens", {"min_tokens": least, "stop_token_ids": [tokens[place]]}
    middle = text_of(tokens[6:8])
    for least in (4, 7, 9):
        yield "stop strings", {"stop": [middle], "min_tokens": least, "logprobs": 1}
    yield "stop strings", {"stop": [middle, text_of(tokens[4:6])], "logprobs": 1}
    yield "max_tokens", {"max_tokens": 1}
    yield "max_tokens", {"max_tokens": 9, "min_tokens": 9}
    for begin, end in ((3, 5), (5, 8), (6, 7)):
        yield "bad_words", {"bad_words": [text_of(tokens[begin:end]).strip() or "the"]}
    yield "allowed_token_ids", {"allowed_token_ids": sorted({*tokens} - {tokens[6]})}
    repeats = RepetitionDetectionParams(max_pattern_size=12, min_pattern_size=1, min_count=2)
    yield "repetition_detection", {"repetition_detection": repeats}
    yield "penalties", {"presence_penalty": 0.4, "frequency_penalty": 0.2, "min_tokens": 20}
    tag = StructuredOutputsParams(structural_tag=json.dumps(TAG))
    yield "structured", {"structured_outputs": tag}
    regex = StructuredOutputsParams(regex=r" (red|green|blue)( (red|green|blue)){3}")
    yield "structured", {"structured_outputs": regex, "min_tokens": 12}
    yield "structured", {"structured_outputs": StructuredOutputsParams(json=SCHEMA)}
    for budget in (None, 0, 1, 5, 9):  # none last: plain vLLM would move it into a budget's place
        yield "thinking_token_budget", {"thinking_token_budget": budget}


def _engine(speculative: dict[str, Any] | None) -> Any:
    from vllm import LLM
    from vllm.config.reasoning import ReasoningConfig
    from vllm.reasoning import ReasoningParserManager
    from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

    class Lines(BaseThinkingReasoningParser):  # type: ignore[misc]
        start_token, end_token = "Ċ", THOUGHT  # as the vocabulary writes them

        def extract_reasoning(self, *_: Any) -> tuple[None, None]:
            return None, None

    ReasoningParserManager.register_module("lines", module=Lines)
    thinking = ReasoningConfig(reasoning_start_str=THINKS, reasoning_end_str=THOUGHT)
    return LLM(
        str(ensure_model()), dtype="float32", enforce_eager=True, max_model_len=1024,
        max_num_seqs=4, reasoning_parser="lines", speculative_config=speculative,
        reasoning_config=thinking,
    )  # fmt: skip


def main(result_file: str) -> None:
    """Ask everything of plain vLLM, or of the hybrid where the environment switches it on."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    hybrid = os.environ["HVD_WORKER_ENABLED"] == "1"
    llm = _engine({"method": "suffix", "num_speculative_tokens": DRAFTS} if hybrid else None)
    worker = worker_in(llm) if hybrid else None
    if worker is not None:
        from tests.decoder.simulated import trusting_policy  # late: see ``plugged``

        worker.router.policy = trusting_policy()

    def answers(asked: list[Ask]) -> list[Any]:
        messages = [[{"role": "user", "content": question}] for question, _ in asked]
        given = [SamplingParams(**{"temperature": 0, "max_tokens": LONGEST} | a) for _, a in asked]
        return [o.outputs[0] for o in llm.chat(messages, given, use_tqdm=False)]

    plain = [(question, {}) for question in QUESTIONS]
    written = {q: list(o.token_ids) for q, o in zip(QUESTIONS, answers(plain), strict=True)}
    result: dict[str, Any] = {"answers": {}, "drafted": {}}
    for kind, asked in asks(written, llm.get_tokenizer().decode).items():
        before = sum(worker.status().drafted.values()) if worker is not None else 0
        result["answers"][kind] = [
            [q, {k: repr(v) for k, v in a.items()}, list(o.token_ids), o.text, o.finish_reason,
             o.stop_reason, [sorted(each) for each in o.logprobs or ()]]
            for (q, a), o in zip(asked * 2, answers(asked * 2), strict=True)
        ]  # fmt: skip
        if worker is not None:
            result["drafted"][kind] = sum(worker.status().drafted.values()) - before
    try:
        answers([(QUESTIONS[0], {"logprob_token_ids": [5, 6], "max_tokens": 2})])
    except VLLMValidationError as refused:
        result["refused"] = str(refused)
    if worker is not None:
        result["faults"] = worker.status().faults
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])

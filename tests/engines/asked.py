"""Ask one vLLM engine for everything: ``python -m tests.engines.asked JOB RESULT``.

The job holds ``model``, ``speculative_config`` or null, and ``ahead`` where it is vLLM's V2 runner
that is asked, scheduled ahead or not. All is asked twice: while a thread swaps policies, and then
with what that has left in the cache, while sides play, which takes a policy that stays. So few
blocks are there that requests are preempted.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from pathlib import Path
from typing import Any, Final

from tests.engines import interpreted
from tests.engines.decode import swap_forever
from tests.engines.plugged import worker_in

LIMIT: Final = 160
TOKENS: Final = 18
VOCABULARY: Final = 24
JSON: Final = ("[", "]", "1", "2", ",1", ",2")
"""What its last tokens say; the others are w0, w1 and so on."""
SCHEMA: Final = {"type": "array", "items": {"type": "integer"}, "minItems": 2}


def kinds(written: list[list[int]]) -> dict[str, dict[str, Any]]:
    """What is asked for, by kind, of requests that write ``written`` without it."""
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    repeats = RepetitionDetectionParams(max_pattern_size=12, min_pattern_size=1, min_count=2)
    said = [*(f"w{i}" for i in range(VOCABULARY - len(JSON))), *JSON]
    middle, first, second = written[0][9], *written[1][6:8]
    return {
        "greedy": {},
        "one choice": {"temperature": 1.0, "top_k": 1},
        "repetition": {"repetition_detection": repeats},
        "several choices": {"n": 3, "temperature": 1.0, "top_k": 1},
        "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
        "stop ids": {"stop_token_ids": [middle]},
        "stop strings": {"stop": [f"{said[first]} {said[second]}"], "min_tokens": 3},
        "min_tokens": {"min_tokens": 12, "stop_token_ids": [middle]},
        "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.2},
        "allowed": {"allowed_token_ids": list(range(0, VOCABULARY, 2))},
        "bad words": {"bad_words": [said[middle]]},
        "structured": {"structured_outputs": StructuredOutputsParams(regex="(w1|w3|w5|w8){4,40}")},
        "schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        "few tokens": {"max_tokens": 2},
        "no drafts": {"extra_args": {"hvd_speculate": "off"}},
        "to the end": {"max_tokens": LIMIT},
    }


def answers(llm: Any, asked: list[tuple[list[int], dict[str, Any]]]) -> list[Any]:
    """Of each request its choices: tokens, text, how they end, and probabilities."""
    from vllm import SamplingParams, TokensPrompt

    given = [SamplingParams(**{"temperature": 0, "max_tokens": TOKENS} | more) for _, more in asked]
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _ in asked]
    outputs = llm.generate(prompts, given, use_tqdm=False)
    return [
        [
            [list(c.token_ids), c.text, c.finish_reason, str(c.stop_reason),
             [{str(t): p.logprob for t, p in place.items()} for place in c.logprobs or ()]]
            for c in o.outputs
        ]
        for o in outputs
    ]  # fmt: skip


def sampled(llm: Any, runner: Any, prompts: list[list[int]]) -> list[list[Any]]:
    """Each time that a draft was verified with tokens drawn by lot: the text before it, its first
    token, and what was drawn there."""
    drawn: list[list[Any]] = []
    waiting: dict[str, list[Any]] = {}
    prepare, commit = runner.prepare_inputs, runner.batch.commit

    def preparing(*args: Any) -> Any:
        batch = prepare(*args)
        waiting.clear()
        for name, slot in zip(batch.req_ids, batch.idx_mapping_np.tolist(), strict=True):
            if runner.batch.verified.get(name):
                request = runner.batch.requests[name]
                draft = int(runner.req_states.draft_tokens[slot, 0])
                waiting[name] = [[*request.prompt, *request.output], draft]
        return batch

    def committing(names: list[str], tokens: list[list[int]]) -> None:
        rows = zip(names, tokens, strict=True)
        drawn.extend([*waiting[name], row[0]] for name, row in rows if name in waiting)
        commit(names, tokens)

    runner.prepare_inputs, runner.batch.commit = preparing, committing
    answers(llm, [(ids, {"temperature": 1.0, "n": 4}) for ids in prompts])
    runner.prepare_inputs, runner.batch.commit = prepare, commit
    return drawn


def aborted(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What the others write while every other request goes away in the middle."""
    from vllm import SamplingParams, TokensPrompt

    engine, asked = llm.llm_engine, SamplingParams(temperature=0, max_tokens=TOKENS)
    names = [f"{i}-aborted" for i in range(len(prompts))]
    for name, ids in zip(names, prompts, strict=True):
        engine.add_request(name, TokensPrompt(prompt_token_ids=ids), asked)
    made: dict[str, list[int]] = {}
    for step in range(1000):
        for output in engine.step():
            made[output.request_id] = list(output.outputs[0].token_ids)
        if step == 5:
            engine.abort_request(names[::2])
        if not engine.has_unfinished_requests():
            break
    return [made[name] for name in names[1::2]]


def note_sides(interleaver: Any) -> set[str]:
    """Who decides a step, of the sides that are compared."""
    follow, noted = interleaver.next_variant, set[str]()

    def following(champion: Any) -> Any:
        side = follow(champion)
        noted.update([] if side is None else [side.name])
        return side

    interleaver.next_variant = following
    return noted


def note_steps(runner: Any) -> dict[str, int]:
    """Count what is chosen, what is verified, and what reaches the target that is no token."""
    noted = dict.fromkeys(("chosen", "verified", "longer", "no token", "preempted", "begun"), 0)
    chosen, prepare, execute = runner.batch.chosen, runner.prepare_inputs, runner.execute_model
    waiting: dict[str, int] = {}

    def choosing(names: list[str], plan: Any) -> list[int]:
        lengths: list[int] = chosen(names, plan)
        waiting.update(zip(names, lengths, strict=True))
        noted["chosen"] += sum(lengths)
        return lengths

    def preparing(*args: Any) -> Any:
        batch = prepare(*args)
        if (drafts := batch.num_draft_tokens_per_req) is not None:
            noted["verified"] += int(drafts.sum())
            each = zip(batch.req_ids, drafts.tolist(), strict=True)
            noted["longer"] += sum(count > waiting.get(name, 0) for name, count in each)
        ids = batch.input_ids[: batch.num_tokens]
        noted["no token"] += int(((ids < 0) | (ids >= VOCABULARY)).sum())
        return batch

    def executing(output: Any, *args: Any, **kwargs: Any) -> Any:
        noted["preempted"] += len(output.preempted_req_ids or ())
        # where a cache holds all of a prompt but its end, vLLM places the longest draft behind it
        places = output.scheduled_spec_decode_tokens
        noted["begun"] += sum(len(places.get(new.req_id, ())) for new in output.scheduled_new_reqs)
        return execute(output, *args, **kwargs)

    runner.batch.chosen, runner.prepare_inputs = choosing, preparing
    runner.execute_model = executing
    return noted


def fail_now_and_then(runner: Any) -> None:
    """Have each third pass of the drafter fail, where there is one."""
    v2 = hasattr(runner, "speculator")
    owner, name = (runner.speculator, "_run_model") if v2 else (runner.drafter, "_greedy_sample")
    run, calls = getattr(owner, name, None), itertools.count()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) % 3 == 0:
            raise RuntimeError("no pass")
        return run(*args, **kwargs)

    if run is not None:
        setattr(owner, name, failing)


def thinking() -> dict[str, Any]:
    """Arguments of an engine that knows what opens and closes thinking, where grammars hold, too:
    a runner without it has them hold from the first token on."""
    from vllm.config import StructuredOutputsConfig
    from vllm.config.reasoning import ReasoningConfig
    from vllm.reasoning import ReasoningParserManager
    from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

    class Words(BaseThinkingReasoningParser):  # type: ignore[misc]
        start_token, end_token = "w3", "w5"

        def extract_reasoning(self, *_: Any) -> tuple[None, None]:
            return None, None

    ReasoningParserManager.register_module("words", module=Words)
    given = ReasoningConfig(reasoning_start_str="w3", reasoning_end_str="w5")
    always = StructuredOutputsConfig(enable_in_reasoning=True)
    return {
        "reasoning_parser": "words", "reasoning_config": given,
        "structured_outputs_config": always,
    }  # fmt: skip


def main(job_file: str, result_file: str) -> None:
    """Run one job."""
    job = json.loads(Path(job_file).read_text())
    if "ahead" in job:
        interpreted.install(job["ahead"])
    from vllm import LLM

    on_v2 = "ahead" in job
    llm = LLM(
        job["model"], dtype="float32", enforce_eager=True, max_model_len=LIMIT, max_num_seqs=6,
        max_num_batched_tokens=96, block_size=32, num_gpu_blocks_override=13,
        speculative_config=job["speculative_config"], disable_log_stats=False,
        **({} if on_v2 else thinking()),
    )  # fmt: skip

    from tests.engines.two_heads import prompts

    asked = [p[: LIMIT - 2 * TOKENS] for p in prompts(5, VOCABULARY)]
    asked.append([*asked[1], *asked[0][:6]])  # begins with what another is
    result: dict[str, Any] = {"answers": {}}
    config = llm.llm_engine.vllm_config
    result["runner"] = [config.use_v2_model_runner, config.max_concurrent_batches]
    worker, stop, noted, sides = None, threading.Event(), None, set[str]()
    threads = []
    if job["speculative_config"]:
        worker = worker_in(llm)
        sides = note_sides(worker.router.interleaver)
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        noted = note_steps(runner) if on_v2 else None
        threads = [threading.Thread(target=swap_forever, args=(worker.router, stop), daemon=True)]
    plain = answers(llm, [(ids, {}) for ids in asked[:2]])
    for thread in threads:
        thread.start()
    every = kinds([choices[0][0] for choices in plain])
    pairs = [
        (kind, ids)
        for kind in every
        for ids in (asked[0], asked[1], asked[-1])[: 2 + (kind == "greedy")]
    ]
    for time in ("first", "again"):
        made = answers(llm, [(ids, every[kind]) for kind, ids in pairs])
        for (kind, _), answer in zip(pairs, made, strict=True):
            result["answers"].setdefault(f"{kind}, {time}", []).append(answer)
        stop.set()
    if not on_v2:
        budgets = [{"thinking_token_budget": budget} for budget in (0, 1, 5, 9)]
        pairs_of = itertools.product(asked[:3], budgets)
        result["answers"]["thinking"] = answers(llm, list(pairs_of))
    if worker is not None:
        if on_v2:
            result["sampled"] = sampled(llm, runner, asked[:3])
        result["status"] = worker.status().model_dump(mode="json")
        fail_now_and_then(runner)
    result["answers"]["aborted"] = aborted(llm, asked[:4])
    for thread in threads:
        thread.join()
    if worker is not None:
        counted = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        result["vllm drafted"] = counted["vllm:spec_decode_num_draft_tokens"]
        result["vllm accepted"] = counted["vllm:spec_decode_num_accepted_tokens"]
        result["noted"], result["faults"] = noted, worker.faults
        result["left"] = len(worker.router.requests.slots)
        result["sides"] = sorted(sides)
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:3])

"""Service in bfloat16, as ``auto`` serves on a processor that is fast in it, wherever this runs;
and its end, by SIGTERM as a fleet has it.

What may differ: the tokens. In bfloat16 a batch of another shape rounds otherwise, two tokens that
are nearly as probable may change places, and an answer goes on from there another way. So the same
question may be answered differently in another company, with speculation and without, and nothing
here compares two answers.

What may not: every request gets what it asked for; each token is one that the target itself, read
in float32, finds within ``MARGIN`` of its most probable; counters tell what happened.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from decoder.contracts.bundle import frequency_policy
from decoder.policy.probes import to_bytes
from pipelines import embedded, machine
from pipelines.prompts import Prompt
from pipelines.stack.running import HVD
from pipelines.workloads import prompts
from tests.end_to_end.service import Answer, ask, embedded_scope
from tests.matrix import findings
from tests.server import PATIENCE_S, Server, serving

pytestmark = [pytest.mark.long, pytest.mark.engine]

MAX_TOKENS = 48
EACH = 2
KINDS = ("edits", "tools", "qa", "chat")
TOGETHER = 4
"""Requests at a time: the shape of a batch changes from step to step."""
MARGIN = 1.0
"""Logits. The worst of twelve such answers fell 0.2 short, by rounding alone."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("bfloat16"), machine.free_port()
    policy = folder / "counting.safetensors"
    policy.write_bytes(to_bytes(frequency_policy(embedded_scope(), 1.5)))
    environment = os.environ | {
        machine.FLAGS_VARIABLE: "avx2 avx512_bf16",
        "HVD_WORKER_TELEMETRY": "0",
        # Counting decides, and alone, so that both arms are verified often.
        "HVD_WORKER_POLICY_FILE": str(policy),
        "HVD_WORKER_FLOOR": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    limits = f"--max-model-len 1024 --max-num-seqs {TOGETHER} --shutdown-timeout=240"
    arguments = [*HVD, "serve", "--port", str(port), "--", *limits.split()]
    with serving(arguments, environment, port, folder / "worker.log") as started:
        yield started


def test_every_token_is_one_the_target_allows(server: Server) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    def answer(prompt: Prompt) -> Answer:
        messages = list(prompt.messages)
        return ask(server.url, embedded.SERVED_NAME, messages, MAX_TOKENS, ignore_eos=True)

    with ThreadPoolExecutor(TOGETHER) as pool:
        asked = [p for kind in KINDS for p in itertools.islice(prompts(kind), EACH)]
        answers = list(pool.map(answer, asked))
    assert "dtype=torch.bfloat16" in server.log()
    assert [len(answer.output) for answer in answers] == [MAX_TOKENS] * len(asked)
    assert list(findings.of_the_end(server, 64, {"cache", "model"})) == []
    tokens = MAX_TOKENS * len(asked)
    assert server.metric("hvd_tokens_total") == tokens
    assert server.metric("vllm:generation_tokens_total") == tokens
    model = AutoModelForCausalLM.from_pretrained(embedded.ensure_model(), dtype=torch.float32)
    with torch.inference_mode():
        for answer in answers:
            ids = torch.tensor([answer.prompt + answer.output[:-1]])
            logits = model(ids, logits_to_keep=len(answer.output)).logits[0]
            said = logits.gather(1, torch.tensor(answer.output)[:, None])[:, 0]
            assert float((logits.max(-1).values - said).max()) <= MARGIN


def test_the_answer_under_way_is_whole_and_the_next_client_may_try_elsewhere(
    server: Server,
) -> None:
    asked = {
        "model": embedded.SERVED_NAME, "max_tokens": MAX_TOKENS, "temperature": 0,
        "messages": [{"role": "user", "content": "Count from one to two hundred."}],
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    url, tokens, refused = f"{server.url}/v1/chat/completions", list[int](), None
    with httpx.stream("POST", url, json=asked, timeout=PATIENCE_S) as stream:
        for line in stream.iter_lines():
            if line == "data: [DONE]":
                break
            if line:
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens += choice.get("token_ids") or ()
            if tokens and refused is None:
                server.child.process.send_signal(signal.SIGTERM)
                while refused is None or refused.status_code == 200:
                    refused = httpx.get(f"{server.url}/health", timeout=PATIENCE_S)
                asked_late = httpx.post(url, json=asked, timeout=PATIENCE_S)
    assert refused is not None and refused.status_code == 503
    assert asked_late.status_code == 503 and asked_late.headers["retry-after"] == "1"
    assert len(tokens) == MAX_TOKENS
    server.child.process.wait(PATIENCE_S)
    assert "cannot schedule new futures" not in Path(server.child.log).read_text(errors="replace")

"""The whole way with real parts: vLLM, a Kafka broker, MLflow and the learner, each a process.

One worker answers requests one after another, so that the state of its suffix cache at every draft
can be rebuilt here from the returned tokens alone, and every label read back from Kafka can be
computed a second time by its definition. It serves in float32, whatever the processor is fast in:
outputs are compared token for token.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from rich.console import Console

from decoder.contracts.bundle import frequency_policy
from decoder.contracts.topics import POLICY, policy_key
from decoder.drafting.suffix import SuffixCache
from decoder.settings import WorkerSettings
from learner.release.registry import Registry
from pipelines.replay.cache_drafts import propose
from pipelines.stack.running import Home, Ports, Stack, running
from pipelines.workloads import prompts
from tests.conftest import naive_accepted_length
from tests.decoder.telemetry.broker import send
from tests.end_to_end.service import Answer, Reader, ask, embedded_scope
from tests.events import DraftEvent

pytestmark = [
    pytest.mark.long,
    pytest.mark.stack,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # mlflow's own
]

MAX_TOKENS = 72
MAX_MODEL_LEN = 2048
REQUESTS = {"edits": 6, "tools": 4, "chat": 3}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = Home.under(tmp_path_factory.mktemp("stack"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HVD_LEARNER_MIN_EVENTS", "200")
        environment.setenv("HVD_LEARNER_CANDIDATE_EVERY", "150")
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        # What is asked here is whether the policy in force is obeyed, the floor may overrule it.
        environment.setenv("HVD_WORKER_FLOOR", "0")
        environment.setenv("HVD_WORKER_NAME", "e2e")
        limits = f"--dtype float32 -- --max-model-len {MAX_MODEL_LEN} --max-num-seqs 4"
        options = tuple(limits.split())
        with running(Ports.free(), home, Console(quiet=True), options) as started:
            yield started


@pytest.fixture(scope="module")
def reader(stack: Stack) -> Iterator[Reader]:
    made = Reader(stack.kafka)
    yield made
    made.close()


@pytest.fixture(scope="module")
def answers(stack: Stack, reader: Reader) -> dict[str, Answer]:
    """Served one after another, under the name each request travels by in the telemetry.

    A person has taken promotion into their hands and lets counting decide, so that both arms are
    verified often.
    """
    reader.until("a worker", lambda: bool(reader.workers))
    promote(stack, reader, threshold=1.5)
    found = {}
    for kind, count in REQUESTS.items():
        for index, prompt in enumerate(itertools.islice(prompts(kind), count)):
            name = f"{kind}-{index}"
            found[name] = asked(stack, list(prompt.messages), name)
            stack.check()
            reader.read()
    made = lambda: reader.workers[-1].events_made  # noqa: E731
    reader.until("every label", lambda: reader.workers[-1].requests_stopped == len(found))
    reader.until("every event", lambda: len(reader.events) == made())
    return found


def promote(stack: Stack, reader: Reader, threshold: float) -> int:
    """Register a policy that counts, pin it, wait for the worker."""
    registry, scope = Registry(stack.tracking_uri), embedded_scope()
    version = registry.register(frequency_policy(scope, threshold))
    name = registry.standing(scope).name
    registry._client.set_registered_model_alias(name, "pinned", str(version))
    reader.until("the swap", lambda: reader.workers[-1].policy_version == version)
    assert reader.workers[-1].threshold == threshold
    return version


def asked(stack: Stack, messages: list[dict[str, str]], name: str) -> Answer:
    further = {"vllm_xargs": {"hvd_workload": name}}
    return ask(stack.api, stack.model, messages, MAX_TOKENS, **further)


def test_every_label_equals_the_accepted_length_of_the_returned_tokens(
    answers: dict[str, Answer], reader: Reader
) -> None:
    by_name: dict[str, dict[int, DraftEvent]] = defaultdict(dict)
    for event in (e for e in reader.events if e.draft_len):
        assert event.position not in by_name[event.workload], "an event was sent twice"
        by_name[event.workload][event.position] = event
    cache, kinds = SuffixCache(WorkerSettings()), set()
    for name, answer in answers.items():
        row = cache.start(name, np.array(answer.prompt, np.int32), "")
        cache.index(None)
        for position in range(1, len(answer.output)):
            cache.extend(name, answer.output[position - 1 : position])
            event = by_name[name].pop(position, None)
            if event is None:
                continue  # no cycle began here
            left = min(MAX_TOKENS - position, MAX_MODEL_LEN - len(answer.prompt) - position)
            context = np.array(answer.prompt + answer.output[:position], np.int32)
            draft = propose(cache, row, context, left - 1)
            assert event.draft_len == (len(draft.tokens) if draft is not None else 0)
            if draft is None:
                continue
            assert event.accepted == naive_accepted_length(
                draft.tokens, answer.output[position:]
            ), (name, position)
            kinds.add(event.label)
        cache.extend(name, answer.output[-1:])
        cache.stop(name)
        assert not by_name[name], "events at positions that were never reached"
    assert kinds == {"verified", "hindsight"}


def test_nothing_is_lost_between_worker_and_learner(
    answers: dict[str, Answer], reader: Reader
) -> None:
    reader.until(
        "the learner to have read everything",
        lambda: (
            reader.learners[-1].events_consumed
            == reader.workers[-1].events_made
            == reader.workers[-1].events_sent
        ),
    )
    worker, learner = reader.workers[-1], reader.learners[-1]
    assert worker.events_dropped == worker.events_failed == worker.faults == 0
    assert worker.events_unaccounted == 0 and not worker.events_refused
    assert learner.records_refused == learner.events_duplicate == learner.records_missing == 0
    assert learner.drafts_consumed == worker.drafts_labelled
    assert worker.tokens == sum(len(a.output) for a in answers.values())
    assert set(worker.cycles) >= {"cache", "model"}


def test_the_learner_trains_and_leaves_to_a_person_what_is_pinned(
    answers: dict[str, Answer], stack: Stack, reader: Reader
) -> None:
    # What is pinned only counts; sooner or later something chooses better than that.
    pinned = reader.workers[-1].policy_version

    def done() -> bool:
        return reader.learners[-1].candidates >= 1 and reader.learners[-1].updates > 0

    for index, prompt in zip(range(80), prompts("edits", seed=7), strict=False):
        if done():
            break
        asked(stack, list(prompt.messages), f"more-{index}")
        reader.read()
    reader.until("training and a candidate", done)
    assert reader.learners[-1].champion_version == reader.workers[-1].policy_version == pinned
    assert reader.learners[-1].promotions == 0


def test_moving_the_alias_changes_what_is_served(
    answers: dict[str, Answer], stack: Stack, reader: Reader
) -> None:
    version = promote(stack, reader, threshold=1e9)
    cycles_before = reader.workers[-1].cycles.get("cache", 0)
    prompt = next(prompts("edits"))
    first = asked(stack, list(prompt.messages), "after-the-swap")
    assert first.output == answers["edits-0"].output, "a policy changed the output"
    reader.until("its labels", lambda: any(e.policy_version == version for e in reader.events))
    assert reader.workers[-1].cycles.get("cache", 0) == cycles_before


def test_a_malformed_bundle_is_refused_and_counted(stack: Stack, reader: Reader) -> None:
    before = reader.workers[-1].policy_version
    send(stack.kafka, POLICY.name, b"not a bundle", key=policy_key(embedded_scope(), "champion"))
    reader.until("the refusal", lambda: reader.workers[-1].refusals.get("malformed") == 1)
    assert reader.workers[-1].policy_version == before
    assert asked(stack, list(next(prompts("chat")).messages), "after-the-refusal").output


def test_logs_hold_no_prompt(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = "".join(
        path.read_text(errors="replace")
        for path in stack.children["worker"].log.parent.glob("*.log")
    )
    assert "Edit this Python function" not in text

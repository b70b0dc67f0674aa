"""What is wrong with a server's answers, a sentence for each fault, so that one run shows all."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from decoder.telemetry.metrics import EVERY_S
from tests.matrix.answers import Answer, differences
from tests.matrix.asks import SCHEMA, Ask
from tests.server import Server, metric

CLOSE: Final = 1e-3
"""Of log probabilities: engines that verify in batches of other shapes add up in another order."""
ROUNDS: Final = 600
"""Looks at the metrics page, until it says that every request is over."""
RAISED: Final = re.compile(r"(?:^|\] )[\w.]*(?:Error|Exception)\b")
"""The line of a traceback that names the exception, behind vLLM's own prefix or without one."""


def of_replies(
    asks: list[Ask], got: Mapping[str, Answer], expected: Mapping[str, Answer]
) -> Iterator[str]:
    """Replies held to what plain vLLM answered, and to what was asked."""
    for ask in asks:
        mine, plain = got[ask.name], expected[ask.name]
        if mine.get("refused") != plain.get("refused"):
            yield f"{ask.name}: {mine.get('message')!r} instead of {plain.get('message')!r}"
        elif ask.exact:
            found = differences(mine, plain, close=CLOSE)
            yield from (f"{ask.name}{what}" for what in itertools.islice(found, 5))
        yield from (f"{ask.name}: {what}" for what in _broken_promises(ask, mine))


def _broken_promises(ask: Ask, reply: Answer) -> Iterator[str]:
    """What the request asked for and did not get, whatever the tokens are."""
    if "refused" in reply:
        return
    asked, left, choices = ask.body, ask.leaves_after is not None, reply["choices"]
    wanted = asked.get("n", 1) * (len(asked["prompt"]) if ask.name == "batch-0" else 1)
    if len(choices) != wanted:
        yield f"{len(choices)} answers to a request for {wanted}"
    for choice in choices:
        count, finish = len(choice["token_ids"]), choice["finish_reason"]
        if not count or count > asked["max_tokens"]:
            yield f"{count} tokens of at most {asked['max_tokens']}"
        if not left and asked.get("ignore_eos") and finish != "length":
            yield f"ended by {finish!r}, asked to go on to its length"
        if finish == "length" and ask.kind != "end" and count != asked["max_tokens"]:
            yield f"{count} tokens, said to be all of {asked['max_tokens']}"
        if asked.get("top_k") == 4 and not _among_the_first(choice):
            yield "a token that top_k rules out"
        if finish != "length":  # what was cut off need not have the structure
            said = choice["message"]["content"] if "message" in choice else choice["text"]
            yield from _unfit(ask, said or "")


def _among_the_first(choice: Mapping[str, Any]) -> bool:
    """Whether each sampled token is one of the most probable that are listed beside it."""
    return all(
        entry["logprob"] >= min(other["logprob"] for other in entry["top_logprobs"]) - CLOSE
        for entry in choice["logprobs"]["content"]
    )


def _unfit(ask: Ask, text: str) -> Iterator[str]:
    """Structure that was asked for and is not there."""
    if "response_format" in ask.body:
        try:
            found = json.loads(text)
        except ValueError:
            yield f"no JSON: {text!r}"
            return
        if ask.body["response_format"]["type"] == "json_schema" and (
            set(found) != set(SCHEMA["properties"]) or not isinstance(found["age"], int)
        ):
            yield f"not of the schema: {found}"
    rules = ask.body.get("structured_outputs", {})
    if "regex" in rules and not re.fullmatch(rules["regex"], text):
        yield f"not of the regular expression: {text!r}"
    if "choice" in rules and text not in rules["choice"]:
        yield f"none of the choices: {text!r}"


def of_the_end(server: Server, drafts: int, arms: set[str]) -> Iterator[str]:
    """What a server is found to be when its requests are over.

    Args:
        drafts: tokens of a draft, at most.
        arms: what must have been verified.
    """
    if server.lives():
        for _ in range(ROUNDS):
            time.sleep(2 * EVERY_S)  # what the page says now may be older than the last reply
            if _all_stopped(server):
                break
        yield from _impossible(server.page(), drafts, arms)
    else:
        yield "the engine died"
    yield from _logged(server.log())


def _impossible(page: str, drafts: int, arms: set[str]) -> Iterator[str]:
    """What the page of a server, all of whose requests are over, says that cannot be so."""
    started, stopped = metric(page, "hvd_requests_started_total"), _stopped(page)
    if not started or started != stopped:
        yield f"{started:.0f} requests started and {stopped:.0f} stopped"
    if faults := metric(page, "hvd_faults_total"):
        yield f"{faults:.0f} faults"
    for arm in ("cache", "model"):
        cycles, drafted, accepted = (
            metric(page, f"hvd_{name}_total", arm=arm) for name in ("cycles", "drafted", "accepted")
        )
        if not cycles >= 5 * (arm in arms):
            yield f"{cycles:.0f} cycles verified a {arm} draft"
        if not accepted <= drafted <= drafts * cycles:
            yield f"{arm}: {cycles:.0f} cycles, {drafted:.0f} drafted, {accepted:.0f} accepted"
    said = "vllm:spec_decode_num_"
    many, drafted, accepted = (
        metric(page, f"{said}{what}_total")
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if not 0 < accepted <= drafted <= drafts * many:
        yield f"vLLM counts {many:.0f} drafts, {drafted:.0f} drafted, {accepted:.0f} accepted"
    places = [
        metric(page, f"{said}accepted_tokens_per_pos_total", position=str(place))
        for place in range(drafts)
    ]
    if sum(places) != accepted or places != sorted(places, reverse=True) or places[0] > many:
        yield f"vLLM counts accepted tokens by place as {places}"


def _stopped(page: str) -> float:
    return metric(page, "hvd_requests_stopped_total")


def _all_stopped(server: Server) -> bool:
    """Whether the page has come to say that every request is over."""
    page = server.page()
    return metric(page, "hvd_requests_started_total") == _stopped(page) > 0


def _logged(log: str) -> Iterator[str]:
    """The first exception in the log, which no reply may have shown."""
    _, _, after = log.partition("Traceback (most recent call last)")
    if after:
        lines = after.splitlines()[1:]
        raised = (i for i, line in enumerate(lines) if RAISED.search(line))
        last = next(raised, len(lines) - 1)
        yield "in the log: " + "\n".join(lines[max(0, last - 6) : last + 1])
